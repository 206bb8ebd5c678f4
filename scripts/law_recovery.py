#!/usr/bin/env python3
"""Does the fit find a scaling law that is there? Runs are made up from a known law with noise, and fitted.

    scripts/law_recovery.py --repeats 50

Each repeat draws new noise for every run, dense ones included, fits the law, predicts groups of runs that were left
out, and chooses K and A for settings between the runs of the design. The table tells in how many repeats the stated
interval of each constant held the true value, how large the errors on left-out groups were, and how good the choices.
The architectures are the paper's, their parameters those of `train_xmod plan`. Of the law's constants five are the
paper's; the other five, which its text does not give, were chosen so that the law comes within 0.025 nats of the losses
of its X-MoDs with 28 layers.
"""

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass, replace

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy comes: the matrices are too small for threads

try:
    import numpy as np

    import law_crossval
    import law_fit
    import law_report
    from compare_lists import UserError, run_binary
    from law_runs import Runs, fail
except ImportError as error:
    sys.exit(f"law_recovery.py: needs {error.name}: run scripts/install_deps.sh plot, or pip install {error.name}")

HERE = os.path.dirname(os.path.abspath(__file__))
CHOSEN = {"eta_L": 1.0, "rho_L": 0.6, "z": 0.05, "rho_K": 0.6, "rho_A": 1.0}


@dataclass
class Grid:
    """What is made up as run."""
    backbones: tuple = ("165M", "298M", "556M", "1.65B")
    L: tuple = (1024, 2048, 4096, 16384)
    K: tuple = (2, 4, 8, 16, 32)
    A: tuple = (1, 2, 4, 8)
    seeds: int = 1


GRIDS = {"large": Grid(), "small": Grid(("165M", "298M"), (1024, 2048, 4096), (2, 4, 8), (1, 2, 4), 2)}

# To choose K and A for; none of these contexts was run, nor the largest backbone.
SETTINGS = [("298M", 1536, (1, 2, 3, 4)), ("556M", 3072, (1, 2, 3, 4)), ("936M", 6144, (1, 2)), ("936M", 12288, (1,))]
SPARSITIES = (2, 4, 8, 16, 32)


def true_constants():
    known = law_report.read_law(os.path.join(HERE, "paper_law.json"), complete=False)["constants"]
    constants = {name: CHOSEN[name] if known[name] is None else known[name] for name in law_fit.NAMES}
    return np.array([constants[name] for name in law_fit.NAMES])


class Plans:
    """N and Nact by train_xmod plan, asked once for each model."""

    def __init__(self, binary):
        self.binary, self.known = binary, {}

    def counts(self, backbone, K, A):
        if (backbone, K, A) not in self.known:
            try:
                plan = json.loads(run_binary(self.binary, "plan", "--preset", backbone, "--arch", "xmod", "--seq-len",
                                             "2048", "--token-sparsity", str(K), "--anchor-stride", str(A), "--json"))
            except UserError as error:
                fail(str(error))
            self.known[backbone, K, A] = plan["params_total"], plan["params_active"]
        return self.known[backbone, K, A]


def design(grid, plans):
    """Runs without losses."""
    points = [(b, L, K, A) for b in grid.backbones for L in grid.L for K in grid.K for A in grid.A
              for _ in range(grid.seeds)]
    backbone, L, K, A = (np.array(column) for column in zip(*points))
    N, N_act = np.array([plans.counts(b, k, a) for b, _, k, a in points], float).T
    _, group = np.unique([f"{b} {l}" for b, l, _, _ in points], return_inverse=True)
    n = len(points)
    return Runs("made up", np.array([f"{b}-L{l}-A{a}K{k}" for b, l, k, a in points]), backbone, L.astype(float),
                K.astype(float), A.astype(float), N, N_act, np.ones(n), np.zeros(n), np.zeros(n), group,
                np.full(n, grid.seeds))


def with_losses(runs, constants, noise, random):
    """Every run and every dense run has its own noise; the dense loss itself does not matter."""
    dense = 3 + noise * random.standard_normal(runs.group.max() + 1) / np.sqrt(runs.dense_runs[0])
    law = law_fit.predict(constants, runs.N, runs.N_act, runs.L, runs.K, runs.A)
    loss = 3 + law + noise * random.standard_normal(len(runs))
    return replace(runs, loss=loss, delta=loss - dense[runs.group])


def choose(constants, plans, backbone, L, strides):
    """The best K and A by a law, and the values of all."""
    choices = [(K, A) for K in SPARSITIES for A in strides]
    K, A = np.array(choices, float).T
    N, N_act = np.array([plans.counts(backbone, k, a) for k, a in choices], float).T
    values = law_fit.predict(constants, N, N_act, float(L), K, A)
    return choices[np.argmin(values)], dict(zip(choices, values))


@dataclass
class Repeat:
    held: dict  # constant -> whether its interval held the true value
    verdict: dict
    width: dict
    error: dict  # constant -> estimate - truth
    left_out: dict  # factor -> rms over all groups
    chosen: list  # for each setting (K, A)
    regret: list  # nats lost by the choice


def repeat(runs, constants, plans, settings, factors):
    found = law_fit.bootstrap(law_fit.fit(runs, settings), runs)
    told = law_report.verdicts(found)
    truth = dict(zip(law_fit.NAMES, constants))
    left_out = {}
    for factor in factors:
        parts = law_crossval.leave_one_out(runs, replace(settings, starts=max(8, settings.starts // 4)), factor)
        left_out[factor] = law_report.rms(np.concatenate([p.error for p in parts]))
    chosen, regret = [], []
    for setting in SETTINGS:
        best, values = choose(constants, plans, *setting)
        mine, _ = choose(found.constants, plans, *setting)
        chosen.append(mine)
        regret.append(values[mine] - values[best])
    return Repeat({name: told[name][0] <= truth[name] <= told[name][1] for name in truth},
                  {name: told[name][2] for name in truth}, {name: told[name][1] - told[name][0] for name in truth},
                  dict(zip(law_fit.NAMES, found.constants - constants)), left_out, chosen, regret)


# ---------------------------------------------------------------------------------------------------------------


def report(repeats, constants, plans, noise, runs, confidence):
    n = len(repeats)
    rows = []
    for name, value in zip(law_fit.NAMES, constants):
        sure = [r for r in repeats if r.verdict[name] == "determined"]
        rows.append([name, f"{value:.5g}", f"{np.mean([r.error[name] for r in repeats]):+.2g}",
                     f"{np.sqrt(np.mean([r.error[name] ** 2 for r in repeats])):.2g}",
                     f"{np.median([r.width[name] for r in repeats]):.2g}",
                     f"{sum(r.held[name] for r in repeats)} of {n}", f"{len(sure)} of {n}",
                     f"{sum(r.held[name] for r in sure)} of {len(sure)}"])
    lines = [f"{len(runs)} runs, {runs.group.max() + 1} dense baselines, noise {noise:g} each, {n} repeats", "",
             markdown(["constant", "true", "mean error", "rms error", f"{confidence:.0%} interval, width",
                       "interval holds the truth", "called determined", "and then holds the truth"], rows), ""]
    # A run and its baseline each have the noise; the parts of a group share the baseline's.
    expected = noise * np.sqrt(1 + 1 / runs.dense_runs[0])
    rows = [[factor, *(f"{f([r.left_out[factor] for r in repeats]):.4f}" for f in (np.median, np.max))]
            for factor in repeats[0].left_out]
    if rows:
        lines += [markdown(["left out one by one", "rms error, median", "largest"], rows), "",
                  f"The noise of a difference is {expected:.4f}.", ""]
    rows = []
    for i, (backbone, L, strides) in enumerate(SETTINGS):
        best, values = choose(constants, plans, backbone, L, strides)
        second = sorted(values.values())[1] - values[best]
        right = sum(r.chosen[i] == best for r in repeats)
        rows.append([backbone, str(L), " ".join(map(str, strides)), f"K {best[0]} A {best[1]}", f"{second:.4f}",
                     f"{right} of {n}", f"{max(r.regret[i] for r in repeats):.4f}"])
    lines += [markdown(["backbone", "L", "A", "best of the true law", "ahead of the second by", "chosen",
                        "most lost by a choice"], rows)]
    return "\n".join(lines)


def markdown(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", choices=GRIDS, default="large", help="large determines every constant; small is 54 "
                        "models with two seeds")
    parser.add_argument("--repeats", type=int, default=50, metavar="N")
    parser.add_argument("--noise", type=float, default=0.005, metavar="X", help="standard deviation of a loss")
    parser.add_argument("--bootstrap", type=int, default=400, metavar="N")
    parser.add_argument("--starts", type=int, default=32, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--leave-out", nargs="*", default=["L", "A", "N_act", "K"], metavar="FACTOR",
                        choices=["L", "A", "N_act", "K"])
    parser.add_argument("--binary", default=os.path.join(os.path.dirname(HERE), "train_xmod"), metavar="FILE")
    options = parser.parse_args()

    plans, constants = Plans(options.binary), true_constants()
    empty = design(GRIDS[options.grid], plans)
    repeats, start = [], time.monotonic()
    for i in range(options.repeats):
        runs = with_losses(empty, constants, options.noise, np.random.default_rng([options.seed, i]))
        settings = law_fit.Settings(options.starts, options.bootstrap, options.seed + i)
        repeats.append(repeat(runs, constants, plans, settings, options.leave_out))
        if sys.stderr.isatty():
            left = (time.monotonic() - start) / (i + 1) * (options.repeats - i - 1)
            print(f"\r{i + 1} of {options.repeats}, {left:.0f} s left ", end="", file=sys.stderr, flush=True)
    print(report(repeats, constants, plans, options.noise, empty, law_fit.Settings.confidence))


if __name__ == "__main__":
    main()
