"""Predictions of the scaling law for models that `train_xmod plan` describes, and the choice among them."""

import json
import math
from dataclasses import dataclass

import numpy as np

import law_fit
from compare_lists import UserError, run_binary
from law_report import read_law, rms, table
from law_runs import fail

SPARSITIES = (2, 3, 4, 6, 8, 12, 16, 24, 32)
STRIDES = (1, 2, 3, 4, 6, 8)
SHAPE_FLAGS = {"dim": "--dim", "heads": "--heads", "kv_heads": "--kv-heads", "head_dim": "--head-dim",
               "ffn_dim": "--ffn-dim", "active_layers": "--active-layers", "vocab_size": "--vocab-size",
               "prefix": "--dense-prefix"}


@dataclass(eq=False)
class Candidate:
    K: int
    A: int
    plan: dict
    delta: float = 0.0
    samples: np.ndarray = None  # of delta
    wins: float = 0.0  # the share of samples in which it is the best

    @property
    def memory(self):
        return self.plan["memory"]["total"]


class Law:
    """A fitted law; without samples it has no intervals."""

    def __init__(self, path):
        law = read_law(path)
        self.path = path
        self.constants = np.array([law["constants"][name] for name in law_fit.NAMES], float)
        samples = law.get("samples") or [self.constants]
        self.samples = np.array(samples, float)
        self.confidence = law.get("confidence", 0.95)
        self.range = law.get("range", {})
        self.backbones = law.get("backbones") or {}
        self.noise = law.get("fit", {}).get("noise")

    def predict(self, N, N_act, L, K, A):
        """The difference to dense (n,), and its samples (samples, n)."""
        arguments = [np.asarray(x, float) for x in (N, N_act, L, K, A)]
        return law_fit.predict(self.constants, *arguments), law_fit.predict(self.samples, *arguments)

    def interval(self, samples):
        return law_fit.interval(samples, self.confidence)

    def outside(self, **point):
        """"K above 8, L below 128": where a point lies beyond the runs of the fit by more than a hundredth."""
        parts = []
        for name, value in point.items():
            low, high = self.range.get(name, (-math.inf, math.inf))
            if value > 1.01 * high:
                parts.append(f"{name} above {high:.4g}")
            elif value < 0.99 * low:
                parts.append(f"{name} below {low:.4g}")
        return ", ".join(parts)


def backbone_flags(law, active):
    """The flags of the backbone that --active names: one of the sweep's, a preset, or the sweep's nearest in size."""
    if active in law.backbones:
        return shape_flags(law.backbones[active])
    size = parse_size(active)
    near = {name: abs(math.log(float(shape["N_act"]) / size)) for name, shape in law.backbones.items()
            if size and "N_act" in shape}
    if near and min(near.values()) < 0.1:
        return shape_flags(law.backbones[min(near, key=near.get)])
    return ["--preset", active]


def shape_flags(shape):
    return [word for name, flag in SHAPE_FLAGS.items() if name in shape for word in (flag, str(shape[name]))]


def parse_size(text):
    """556M -> 5.56e8; None where it is no number."""
    scale = {"k": 1e3, "m": 1e6, "b": 1e9}.get(text[-1:].lower())
    try:
        size = float(text[:-1]) * scale if scale else float(text)
    except ValueError:
        return None
    return size if 0 < size < math.inf else None


def candidates(law, options):
    """All K and A asked for, with their plans, each kind of layers once: a stride longer than the model is that of its
    only interval."""
    found, seen = [], set()
    for A in sorted(set(options.strides)):
        for K in sorted(set(options.sparsities)):
            if K > options.context:
                continue
            plan = make_plan(law, options, K, A)
            if plan["pattern"] not in seen:
                seen.add(plan["pattern"])
                longest = max(map(len, plan["pattern"].split("D")))
                found.append(Candidate(K, min(A, longest // K), plan))
    if not found:
        fail(f"--sparsities: none is at most --context {options.context}; give smaller ones")
    plans = [c.plan for c in found]
    delta, samples = law.predict([p["params_total"] for p in plans], [p["params_active"] for p in plans],
                                 options.context, [c.K for c in found], [c.A for c in found])
    for c, d, s in zip(found, delta, samples.T):
        c.delta, c.samples = float(d), s
    return found


def make_plan(law, options, K, A):
    words = ["plan", *backbone_flags(law, options.active), "--arch", "xmod", "--token-sparsity", str(K),
             "--anchor-stride", str(A), "--seq-len", str(options.context), "--compute", repr(options.compute),
             "--batch-size", str(options.batch_size), *options.flags, "--json"]
    try:
        return json.loads(run_binary(options.binary, *words))
    except UserError as error:
        fail(f"--active {options.active}, K {K}, A {A}: {error}")


def choose(found, memory):
    """Those that fit the memory, best first."""
    fitting = [c for c in found if c.memory <= memory]
    if fitting:
        best = np.argmin([c.samples for c in fitting], axis=0)
        for i, c in enumerate(fitting):
            c.wins = float(np.mean(best == i))
    return sorted(fitting, key=lambda c: c.delta)


# ---------------------------------------------------------------------------------------------------------------
# text


HEADER = ["K", "A", "to dense", "interval", "best in", "layers", "parameters", "FLOPs", "memory", "tokens", ""]


def row_of(law, options, c, wins=True):
    low, high = law.interval(c.samples)
    note = law.outside(L=options.context, K=c.K, A=c.A, N_act=c.plan["params_active"], compute=options.compute)
    return [str(c.K), str(c.A), f"{c.delta:+.4f}", f"{low:+.4f} .. {high:+.4f}" if len(c.samples) > 1 else "",
            f"{c.wins:.0%}" if wins and len(c.samples) > 1 else "", str(c.plan["layers"]),
            show_count(c.plan["params_total"]), f"{c.plan['flops_ratio_to_dense']:.2f}",
            f"{c.memory / 2**30:.2f} GiB", show_count(c.plan["tokens"]), note and "extrapolates: " + note]


def show_count(number):
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return str(number)


def recommendation_text(law, options, found):
    memory = options.memory * 2**30
    ranked = choose(found, memory)
    if not ranked:
        least = min(found, key=lambda c: c.memory)
        fail(f"--memory {options.memory:g}: none of {len(found)} configurations fits; the smallest, K {least.K} "
             f"A {least.A}, needs {least.memory / 2**30:.2f} GiB; give a smaller --batch-size, --context or backbone")
    best = ranked[0]
    lines = [table(HEADER, [row_of(law, options, c) for c in ranked[:options.top]]), ""]
    advice = "Train"
    if best.delta >= 0:
        lines.append("No configuration is predicted to be better than the dense model.")
        advice = "The nearest is"
    lines.append(f"{advice} K {best.K} A {best.A}: {tie_text(law, ranked)}")
    too_large = [c for c in found if c.memory > memory and c.delta < best.delta]
    if too_large:
        c = min(too_large, key=lambda c: c.delta)
        lines.append(f"{len(too_large)} better ones do not fit {options.memory:g} GiB; the best, K {c.K} A {c.A}, is "
                     f"predicted at {c.delta:+.4f} and needs {c.memory / 2**30:.2f} GiB")
    flags = [*backbone_flags(law, options.active), "--arch", "xmod", "--token-sparsity", str(best.K), "--anchor-stride",
             str(best.A), "--seq-len", str(options.context), "--compute", f"{options.compute:g}",
             "--batch-size", str(options.batch_size), *options.flags]
    return "\n".join(lines + ["", "train_xmod train " + " ".join(flags)])


def tie_text(law, ranked):
    """How far the choice is from the runners-up, by the samples of their difference."""
    best = ranked[0]
    if len(best.samples) == 1:
        return "the law's file has no samples, so nothing tells how certain that is"
    tied = [c for c in ranked[1:] if law.interval(c.samples - best.samples)[0] <= 0]
    if not tied:
        return "better than every other at this confidence"
    names = ", ".join(f"K {c.K} A {c.A}" for c in tied[:4]) + (", ..." if len(tied) > 4 else "")
    return f"not told apart from {len(tied)} other{'s' * (len(tied) > 1)} ({names})"


def check_text(law, runs):
    """Runs against their predictions."""
    predicted, samples = law.predict(runs.N, runs.N_act, runs.L, runs.K, runs.A)
    low, high = law.interval(samples)
    rows = [[runs.name[i], f"{predicted[i]:+.4f}", f"{low[i]:+.4f} .. {high[i]:+.4f}" if len(samples) > 1 else "",
             f"{runs.delta[i]:+.4f}", f"{predicted[i] - runs.delta[i]:+.4f}",
             law.outside(L=runs.L[i], K=runs.K[i], A=runs.A[i], N_act=runs.N_act[i])] for i in range(len(runs))]
    noise = f"; noise of a run in the fit {law.noise:.4f}" if law.noise else ""
    return (table(["run", "predicted", "interval", "true", "error", "beyond the fit"], rows)
            + f"\n\nroot mean square error {rms(predicted - runs.delta):.4f}{noise}")


def candidates_json(law, options, found, ranked):
    def entry(c):
        low, high = law.interval(c.samples)
        return {"K": c.K, "A": c.A, "delta": c.delta, "low": float(low), "high": float(high), "best_in": c.wins,
                "fits": c in ranked, **{key: c.plan[key] for key in ("layers", "params_total", "params_active",
                                                                      "flops_ratio_to_dense", "tokens")},
                "memory": c.memory}

    rest = sorted((c for c in found if c not in ranked), key=lambda c: c.delta)
    return [entry(c) for c in [*ranked, *rest]]
