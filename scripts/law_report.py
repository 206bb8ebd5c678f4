"""What a fit of the scaling law tells: which constants the data determine, errors, the law's file."""

import json
import math

import numpy as np

import law_fit
from law_fit import EFFECTS, NAMES, P
from law_runs import fail

EQUATION = ("Delta = e - u*Nact^-eta_N * (1 - (N/Nact)^-rho_N) + w*L^-eta_L*(K^rho_L - 1) "
            "- z*(K^rho_K - 1)*((2A/(A+1))^rho_A - 1)")


def require_identified(runs, settings):
    """Refuses a design under which some constants cannot be told, whatever the losses were: it is probed with laws
    drawn at random."""
    lower, upper = law_fit.limits(settings)
    free = [i for i in range(P) if lower[i] < upper[i] and NAMES[i] not in settings.priors]
    lost = unidentified(runs, free)
    if not lost:
        return
    names = ", ".join(NAMES[i] for i in lost)
    counts = ", ".join(f"{len(runs.levels(name))} of {name}" for name in ("L", "K", "A", "N_act"))
    fail(f"{runs.path}: too few runs for the parameters {names}: {len(runs)} of X-MoD with {counts}, and {len(free)} "
         "parameters; train more, or hold some by --fix or --prior")


def unidentified(runs, free):
    """Those of the free parameters that no losses of these runs could tell."""
    design = law_fit.Design(runs)
    theta = law_fit.draw_starts(np.random.default_rng(7), 8)
    slope = design.by_constants(theta, design.whiten(design.values(theta)[1]))[:, free]  # (8, free, n)
    size = np.linalg.norm(slope, axis=2, keepdims=True)
    blind = (size < 1e-12).all(0)[:, 0]
    slope = np.pad(slope, [(0, 0), (0, 0), (0, max(0, len(free) - len(runs)))])
    _, values, directions = np.linalg.svd((slope / np.maximum(size, 1e-300)).transpose(0, 2, 1), full_matrices=False)
    share = np.where(values[:, :, None] < 1e-6 * values[:, :1, None], np.abs(directions), 0).max(1)  # (8, free)
    return [i for i, lost, part in zip(free, blind, share.min(0)) if lost or part > 1e-3]


def verdicts(found):
    """{constant: (low, high, verdict)} by the samples: whether the interval is bounded, and how narrow."""
    lower, upper = law_fit.limits(found.settings)
    constants = found.design.middle.constants(found.samples)
    low, high = law_fit.interval(constants, found.settings.confidence)
    tail = (1 - found.settings.confidence) / 2
    result = {}
    for i, name in enumerate(NAMES):
        margin = 1e-3 * (upper[i] - lower[i])
        at_low = (found.samples[:, i] <= lower[i] + margin).mean() > tail
        at_high = (found.samples[:, i] >= upper[i] - margin).mean() > tail
        told = verdict(name, low[i], high[i], lower[i] == upper[i], at_low, at_high)
        if name == "e" and told == "determined" and high[i] - low[i] > abs(found.theta[law_fit.U]):
            told = "loose"  # it and the capacity's gain are not told apart
        result[name] = (low[i], high[i], told + (", with a prior" if name in found.settings.priors else ""))
    return result


def verdict(name, low, high, fixed, at_low, at_high):
    if fixed:
        return "fixed"
    if at_low and at_high:
        return "undetermined: all values between its bounds will do"
    if at_low and name in "uwz":
        return "not told from 0"
    if at_low or at_high:
        return f"undetermined: reaches its {'lower' if at_low else 'upper'} bound"
    if name != "e" and (low <= 0 or high / low > 4):
        return "loose"
    return "determined"


def loose_directions(found):
    """Combinations of constants that the noise leaves free by more than a factor of e: [(size, {name: weight})], from
    the singular values of the Jacobian with respect to the logarithms of the constants (e: in steps of 0.1)."""
    lower, upper = law_fit.limits(found.settings)
    theta, target = found.theta[None], np.zeros(len(found.design.K))
    slope = found.design.by_constants(theta, found.problem.residuals(theta, target)[1])[0]
    scale = np.maximum(np.abs(found.theta), 1e-3)
    scale[law_fit.E] = 0.1
    scale[[law_fit.U, law_fit.W, law_fit.Z]] = 1
    free = [i for i in range(P) if lower[i] < upper[i]]
    _, values, directions = np.linalg.svd((slope.T * scale)[:, free], full_matrices=False)
    loose = []
    for value, direction in zip(values, directions):
        size = max(found.noise, found.seed_noise) / max(value, 1e-300)
        if size > 1:
            largest = direction[np.argmax(np.abs(direction))]
            parts = {NAMES[free[i]]: float(x / largest) for i, x in enumerate(direction) if abs(x / largest) > 0.15}
            loose.append((float(size), dict(sorted(parts.items(), key=lambda part: -abs(part[1])))))
    return loose[::-1]


def rms(values):
    return math.sqrt(float(np.mean(np.square(values)))) if len(values) else math.nan


# ---------------------------------------------------------------------------------------------------------------
# text


def table(header, rows):
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    return "\n".join("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
                     for row in [header, *rows])


def describe(runs):
    def values(name):
        levels = runs.levels(name)
        return " ".join(level if isinstance(level, str) else f"{level:g}" for level in levels)

    lines = [f"{len(runs)} runs of X-MoD against {len(set(runs.group.tolist()))} dense baselines"
             + (f" ({runs.skipped} runs of other architectures left out)" if runs.skipped else "")]
    lines += [f"  {name:<8}{values(name)}" for name in ("L", "K", "A", "N_act", "compute")]
    return "\n".join(lines)


def fit_text(found, runs):
    share = f"{found.settings.confidence:.0%}"
    told = verdicts(found)
    rows = [[name, f"{value:.5g}", f"{told[name][0]:.4g} .. {told[name][1]:.4g}", told[name][2]]
            for name, value in zip(NAMES, found.constants)]
    lines = [table(["constant", "estimate", f"{share} interval", ""], rows), "", "Effects in the middle of the design"]
    lines += effect_lines(found)
    loose = loose_directions(found)
    if loose:
        lines += ["", "Combinations that the noise leaves free by more than a factor of e (the first constant changes"
                  " by one power, the others by theirs; e counts in tenths of a nat):"]
        lines += ["  " + " ".join(f"{name}^{weight:+.2f}" for name, weight in parts.items())
                  + (f"   free by e^{size:.1f}" if size < 100 else "   free") for size, parts in loose]
    lines += ["", error_text(found, runs)]
    return "\n".join(lines)


def effect_lines(found):
    middle = found.design.middle
    low, high = law_fit.interval(found.samples, found.settings.confidence)
    stride = math.exp(middle.stride)
    anchor = stride / (2 - stride)
    at = {"u": f"Nact {math.exp(middle.N_act):.4g}, N/Nact {math.exp(middle.growth):.3g}",
          "w": f"L {math.exp(middle.L):.4g}, K {math.exp(middle.K):.3g}",
          "z": f"K {math.exp(middle.K):.3g}, A {anchor:.3g}"}
    rows = []
    for name, title in EFFECTS.items():
        i = NAMES.index(name)
        sign = 1 if name == "w" else -1
        ends = sorted((sign * low[i], sign * high[i]))
        rows.append([title, f"{sign * found.theta[i]:+.4f}", f"{ends[0]:+.4f} .. {ends[1]:+.4f}", f"at {at[name]}"])
    return [table(["effect", "nats", "interval", ""], rows)]


def error_text(found, runs):
    lower, upper = law_fit.limits(found.settings)
    spread = "no configuration has two seeds" if not runs.seed_pairs else \
        f"{runs.seed_spread:.4f} (over {runs.seed_pairs} further seeds)"
    return (f"root mean square error {rms(found.predict(runs) - runs.delta):.4f} nats, {len(runs)} runs and "
            f"{(lower < upper).sum()} free constants; the differences themselves vary by "
            f"{np.std(runs.delta):.4f}\nnoise of a run by the residuals {found.noise:.4f}; spread over seeds {spread}")


# ---------------------------------------------------------------------------------------------------------------
# the law's file


def law_json(found, runs, routing):
    told = verdicts(found)
    constants = found.design.middle.constants(found.samples)
    return {
        "equation": EQUATION,
        "units": "N and Nact in parameters, L in tokens, Delta in nats",
        "constants": dict(zip(NAMES, map(float, found.constants))),
        "intervals": {name: {"low": float(low), "high": float(high), "verdict": verdict}
                      for name, (low, high, verdict) in told.items()},
        "confidence": found.settings.confidence,
        "range": {name: [float(min(values)), float(max(values))] for name, values in
                  (("L", runs.L), ("K", runs.K), ("A", runs.A), ("N_act", runs.N_act), ("compute", runs.compute))},
        "fit": {"runs": runs.path, "count": len(runs), "routing": routing, "noise": found.noise,
                "rms": rms(found.predict(runs) - runs.delta),
                "seed_spread": None if math.isnan(runs.seed_spread) else runs.seed_spread},
        "backbones": runs.shapes,
        "samples": [[float(f"{x:.7g}") for x in sample] for sample in constants],
    }


def read_law(path, complete=True):
    """The law's file as a dict; complete: every constant must be there."""
    try:
        with open(path, encoding="utf-8") as file:
            law = json.load(file)
    except OSError as error:
        fail(f"cannot read {path}: {error.strerror}; give the file that `scaling_law.py fit --out` wrote")
    except ValueError:
        fail(f"{path}: not valid JSON; give the file that `scaling_law.py fit --out` wrote")
    constants = law.get("constants") if isinstance(law, dict) else None
    if not isinstance(constants, dict):
        fail(f"{path}: no \"constants\" in it; give the file that `scaling_law.py fit --out` wrote")
    for name, value in constants.items():
        if name not in NAMES:
            fail(f"{path}: a constant {name!r}, expected {', '.join(NAMES)}")
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))
                                  or not math.isfinite(value)):
            fail(f"{path}: {name} is {json.dumps(value)}, expected a number, or null where it is missing")
    missing = [name for name in NAMES if constants.get(name) is None]
    if complete and missing:
        fail(f"{path}: the constants {', '.join(missing)} are missing; fit the law to runs of your own")
    for part, expected, sound in PARTS_OF_LAW:
        if part in law and not sound(law[part]):
            fail(f"{path}: its {part} is no {expected}; give the file that `scaling_law.py fit --out` wrote")
    return law


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def are_numbers(value, count):
    return isinstance(value, list) and len(value) == count and all(map(is_number, value))


# What may stand beside the constants.
PARTS_OF_LAW = (
    ("samples", f"list of rows of {P} numbers",
     lambda value: isinstance(value, list) and all(are_numbers(row, P) for row in value)),
    ("confidence", "number from 0 to 1", lambda value: is_number(value) and 0 <= value <= 1),
    ("range", "table of pairs of numbers",
     lambda value: isinstance(value, dict) and all(are_numbers(ends, 2) for ends in value.values())),
    ("fit", "table with the noise as a number",
     lambda value: isinstance(value, dict) and (value.get("noise") is None or is_number(value["noise"]))),
    ("backbones", "table of backbones with their N_act", lambda value: isinstance(value, dict) and all(
        isinstance(shape, dict) and is_number(shape.get("N_act", 1)) and shape.get("N_act", 1) > 0
        for shape in value.values())))
