"""scripts/scaling_law.py: the fit against made-up runs, SciPy and finite differences; the commands as a user runs them,
bad files, and that ./train_xmod predicts the same."""

import csv
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
from dataclasses import replace
from pathlib import Path

from test_training import BINARY

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "scaling_law.py"
PAPER = ROOT / "scripts" / "paper_law.json"
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as the script does
sys.path.insert(0, str(ROOT / "scripts"))

import numpy as np

import law_crossval
import law_fit
import law_recovery
import law_report

NAMES = law_fit.NAMES
PLANS = law_recovery.Plans(str(BINARY))
TRUTH = law_recovery.true_constants()
COLUMNS = ["name", "arch", "backbone", "seed", "L", "K", "A", "N_act", "N", "dim", "heads", "kv_heads", "head_dim",
           "ffn_dim", "active_layers", "vocab_size", "prefix", "compute", "val_loss_topk", "val_loss_threshold",
           "dataset", "command"]
SHAPES = {"165M": {"dim": 512, "heads": 16, "kv_heads": 8, "head_dim": 64, "ffn_dim": 1536, "active_layers": 28,
                   "vocab_size": 100352, "prefix": 4},
          "298M": {"dim": 768, "heads": 16, "kv_heads": 8, "head_dim": 64, "ffn_dim": 2304, "active_layers": 28,
                   "vocab_size": 100352, "prefix": 4}}
DENSE_LOSS = {("165M", 1024): 3.25, ("165M", 4096): 3.15, ("298M", 1024): 3.05, ("298M", 4096): 2.95,
              ("165M", 2048): 3.2, ("298M", 2048): 3.0}


def made_up(grid="large", noise=0.005, seed=0):
    empty = law_recovery.design(law_recovery.GRIDS[grid], PLANS)
    return law_recovery.with_losses(empty, TRUTH, noise, np.random.default_rng(seed))


def rows_of(noise=0.003, seed=0, grid="small", losses=("val_loss_topk", "val_loss_threshold")):
    """A sweep's rows, dense ones first."""
    random = np.random.default_rng(seed)
    runs = law_recovery.design(law_recovery.GRIDS[grid], PLANS)
    law = law_fit.predict(TRUTH, runs.N, runs.N_act, runs.L, runs.K, runs.A)
    rows = []

    def add(name, arch, backbone, seed, L, K, A, N, N_act, loss):
        found = {"name": name, "arch": arch, "backbone": backbone, "seed": seed, "L": int(L), "K": int(K), "A": A,
                 "N": int(N), "N_act": int(N_act), **SHAPES[backbone], "compute": "1e+18", "dataset": "made up",
                 "command": f"train_xmod train --arch {arch}, with a comma"}
        rows.append({**found, **{column: f"{loss + noise * random.standard_normal():.6f}" for column in losses}})

    for (backbone, L), loss in DENSE_LOSS.items():
        N_act = PLANS.counts(backbone, 2, 1)[1]
        for seed in (1, 2):
            add(f"{backbone}-L{L}-dense", "dense", backbone, seed, L, 1, "", N_act, N_act, loss)
    for i in range(len(runs)):
        backbone, L = runs.backbone[i], int(runs.L[i])
        add(runs.name[i], "xmod", backbone, 1 + i % 2, L, runs.K[i], int(runs.A[i]), runs.N[i], runs.N_act[i],
            DENSE_LOSS[backbone, L] + law[i])
    return rows


def csv_text(rows, columns=COLUMNS):
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


class LawTest(unittest.TestCase):
    def test_value_by_hand(self):
        # e 0.5; capacity 3/10 * (1 - 1/4); context 8/64 * 15; stride 0.25 * 1 * (2.25 - 1)
        constants = [0.5, 3, 0.5, 2, 8, 1, 2, 0.25, 0.5, 2]
        value = law_fit.predict(constants, *(np.array([x], float) for x in (200, 100, 64, 4, 3)))
        np.testing.assert_allclose(value, 0.5 - 0.225 + 1.875 - 0.3125, rtol=1e-14)

    def test_effects_and_constants_are_two_ways_to_say_the_same(self):
        runs = made_up()
        design = law_fit.Design(runs)
        theta = design.middle.effects(TRUTH)
        np.testing.assert_allclose(design.middle.constants(theta), TRUTH, rtol=1e-12)
        np.testing.assert_allclose(design.values(theta[None], slopes=False)[0],
                                   law_fit.predict(TRUTH, runs.N, runs.N_act, runs.L, runs.K, runs.A), atol=1e-13)
        # An effect is what its term amounts to in the middle of the design.
        m = np.exp(list(vars(design.middle).values()))
        self.assertAlmostEqual(theta[law_fit.U], TRUTH[1] * m[0] ** -TRUTH[2] * (1 - m[1] ** -TRUTH[3]))
        self.assertAlmostEqual(theta[law_fit.W], TRUTH[4] * m[2] ** -TRUTH[5] * (m[3] ** TRUTH[6] - 1))
        self.assertAlmostEqual(theta[law_fit.Z], TRUTH[7] * (m[3] ** TRUTH[8] - 1) * (m[4] ** TRUTH[9] - 1))

    def test_derivatives(self):
        runs = made_up()
        design = law_fit.Design(runs)
        target = design.whiten(runs.delta)
        priors = [(NAMES.index(name), 0.3, 0.1) for name in NAMES]
        problem = law_fit.Problem(design, None, None, priors=priors, ridge=0.1)
        for theta in law_fit.draw_starts(np.random.default_rng(3), 4):
            slope = problem.residuals(theta[None], target)[1][0]
            for i in range(law_fit.P):
                step = np.zeros(law_fit.P)
                step[i] = 1e-6
                up, down = (problem.residuals((theta + sign * step)[None], target)[0][0] for sign in (1, -1))
                expected = (up - down) / 2e-6
                np.testing.assert_allclose(slope[i], expected, rtol=1e-5, atol=1e-6 * max(1, np.abs(expected).max()))

    def test_whitening_makes_the_differences_independent(self):
        runs = replace(made_up("small"), dense_runs=np.full(108, 2))
        design = law_fit.Design(runs)
        # A run's own noise, and that of the mean of two dense runs, which its group shares.
        covariance = np.eye(len(runs)) + (runs.group[:, None] == runs.group) / 2
        whiten = design.whiten(np.eye(len(runs)))
        np.testing.assert_allclose(whiten.T @ covariance @ whiten, np.eye(len(runs)), atol=1e-12)

    def test_minimum_is_scipys(self):
        from scipy.optimize import least_squares

        runs = made_up("small")
        design = law_fit.Design(runs)
        target = design.whiten(runs.delta)
        lower, upper = law_fit.limits(law_fit.Settings())
        for scale in (np.inf, 0.01):
            problem = law_fit.Problem(design, lower, upper, scale)
            found, cost = law_fit.minimise(problem, design.middle.effects(TRUTH)[None], target)
            robust = {} if np.isinf(scale) else {"loss": "soft_l1", "f_scale": scale}
            theirs = least_squares(lambda x: problem.residuals(x[None], target)[0][0],
                                   found[0].clip(lower + 1e-6, upper),
                                   lambda x: problem.residuals(x[None], target)[1][0].T, bounds=(lower, upper),
                                   xtol=1e-14, ftol=1e-14, gtol=1e-14, x_scale="jac", **robust)
            self.assertLess(cost[0], 2 * theirs.cost * (1 + 1e-6))
            np.testing.assert_allclose(found[0], theirs.x, rtol=0.01, atol=1e-4)

    def test_stays_within_bounds(self):
        runs = made_up("small")
        settings = law_fit.Settings(starts=8, bounds={"rho_N": (2.0, 3.0)}, fixed={"eta_L": 1.2})
        found = law_fit.bootstrap(law_fit.fit(runs, replace(settings, bootstrap=40)), runs)
        self.assertAlmostEqual(found.constants[law_fit.RHO_N], 2.0, places=4)
        self.assertEqual(found.constants[law_fit.ETA_L], 1.2)
        verdicts = {name: told[2] for name, told in law_report.verdicts(found).items()}
        self.assertIn("lower bound", verdicts["rho_N"])
        self.assertEqual(verdicts["eta_L"], "fixed")


class RecoveryTest(unittest.TestCase):
    """The whole of it is scripts/law_recovery.py."""

    def test_exact_without_noise(self):
        runs = made_up(noise=0)
        np.testing.assert_allclose(law_fit.fit(runs, law_fit.Settings(starts=16)).constants, TRUTH, rtol=1e-3)

    def test_intervals_left_out_groups_and_choice(self):
        repeats = [law_recovery.repeat(made_up(seed=seed), TRUTH, PLANS, law_fit.Settings(16, 150, seed), ["L", "K"])
                   for seed in range(3)]
        held = [value for r in repeats for value in r.held.values()]
        self.assertGreaterEqual(sum(held), 27, [r.held for r in repeats])  # of 30, at 95%
        noise = 0.005 * 2 ** 0.5  # of a run and of its baseline
        for r in repeats:
            self.assertEqual({verdict for verdict in r.verdict.values()}, {"determined"})
            for error in r.left_out.values():
                self.assertLess(error, 1.3 * noise)
                self.assertGreater(error, 0.5 * noise)  # or it was not left out
            self.assertEqual(r.regret, [0] * len(law_recovery.SETTINGS))
        # Narrow enough to say something.
        for name, limit in (("eta_L", 0.1), ("rho_L", 0.1), ("rho_N", 0.5), ("rho_A", 0.6), ("eta_N", 0.05)):
            self.assertLess(np.median([r.width[name] for r in repeats]), limit, name)

    def test_noise_is_told(self):
        for noise in (0.002, 0.01):
            found = law_fit.fit(made_up(noise=noise), law_fit.Settings(starts=8))
            self.assertAlmostEqual(found.noise / noise, 1, delta=0.15)

    def test_few_runs_near_the_law_are_no_proof_of_little_noise(self):
        runs = made_up(noise=0.001)
        found = law_fit.bootstrap(law_fit.fit(runs, law_fit.Settings(8, 60)), runs)
        seeds = replace(runs, seed_spread=0.01, seed_pairs=5)
        careful = law_fit.bootstrap(law_fit.fit(seeds, law_fit.Settings(8, 60)), seeds)
        self.assertAlmostEqual(np.median(careful.samples.std(0) / found.samples.std(0)), 10, delta=3)
        np.testing.assert_allclose(careful.theta, found.theta)

    def test_one_bad_run_does_little(self):
        runs = made_up()
        clean = law_fit.fit(runs, law_fit.Settings(starts=8))
        runs.delta[17] += 0.5
        spoilt = law_fit.fit(runs, law_fit.Settings(starts=8))
        change = np.abs(spoilt.predict(runs) - clean.predict(runs)).max()
        self.assertLess(change, 0.01)
        design, target = spoilt.design, spoilt.design.whiten(runs.delta)
        plain, _ = law_fit.minimise(replace(spoilt.problem, scale=np.inf), spoilt.theta[None].copy(), target)
        squares = design.values(plain, slopes=False)[0]
        self.assertGreater(np.abs(squares - clean.predict(runs)).max(), 2 * change)

    def test_what_a_design_cannot_tell(self):
        runs = made_up()
        every = list(range(law_fit.P))

        def lost(mask, free=every):
            return [NAMES[i] for i in law_report.unidentified(runs.where(mask), free)]

        self.assertEqual(lost(np.full(len(runs), True)), [])
        self.assertEqual(lost(runs.L == 1024), ["w", "eta_L"])
        self.assertEqual(lost(runs.backbone == "298M"), ["u", "eta_N"])
        self.assertEqual(lost(runs.A == 1), ["z", "rho_K", "rho_A"])
        self.assertEqual(lost((runs.A == 1) | (runs.A == 4)), ["z", "rho_A"])
        self.assertEqual(lost((runs.A == 1) | (runs.A == 4), every[:-1]), [])

    def test_a_loose_combination_is_named(self):
        """Two strides that lie close leave z and rho_A free together, and the sum tells so."""
        runs = made_up("small", noise=0.02)
        found = law_fit.bootstrap(law_fit.fit(runs, law_fit.Settings(starts=8, bootstrap=60)), runs)
        named = [set(parts) for _, parts in law_report.loose_directions(found)]
        self.assertTrue(any("z" in parts for parts in named), named)
        self.assertIn("free", law_report.fit_text(found, runs))

    def test_crossval_says_what_the_rest_does_not_tell(self):
        runs = made_up("small")
        parts = law_crossval.leave_one_out(runs, law_fit.Settings(starts=8), "A")
        self.assertEqual([p.left_out for p in parts], [1, 2, 4])
        self.assertEqual([p.lost for p in parts], [[], ["z", "rho_A"], ["z", "rho_A"]])
        for p in parts:
            self.assertEqual(len(p.error), 36)
            self.assertLess(law_report.rms(p.error), 0.03)

    def test_priors_pull_what_the_data_leave_open(self):
        runs = made_up("small", noise=0.01)
        known = {name: (value, 0.02) for name, value in zip(NAMES, TRUTH) if name in ("u", "eta_N", "w")}
        free = law_fit.bootstrap(law_fit.fit(runs, law_fit.Settings(8, 60)), runs)
        pulled = law_fit.bootstrap(law_fit.fit(runs, law_fit.Settings(8, 60, priors=known)), runs)
        for name in known:
            i = NAMES.index(name)
            self.assertLess(abs(pulled.constants[i] / TRUTH[i] - 1), 0.1)
            self.assertLess(abs(pulled.constants[i] / TRUTH[i] - 1), abs(free.constants[i] / TRUTH[i] - 1), name)


def plan_json(*words):
    command = [BINARY, "plan", *map(str, words), "--json"]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


class CommandTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.path = Path(cls.folder.name)
        cls.rows = rows_of()
        (cls.path / "runs.csv").write_text(csv_text(cls.rows))
        cls.fitted = cls.law("fit", "runs.csv", "--out", "law.json", "--starts", 16, "--bootstrap", 100)

    @classmethod
    def run_script(cls, *words):
        command = [sys.executable, str(SCRIPT), *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, cwd=cls.path)

    @classmethod
    def law(cls, *words):
        result = cls.run_script(*words)
        assert result.returncode == 0 and result.stderr == "", result.stdout + result.stderr
        return result.stdout

    def expect_error(self, parts, *words, status=1):
        result = self.run_script(*words)
        self.assertRegex(result.stderr, r"\Ascaling_law\.py: [^\n]+\n\Z")
        self.assertEqual((result.returncode, result.stdout), (status, ""))
        for part in parts:
            self.assertIn(part, result.stderr)

    def fit_of(self, text):
        (self.path / "bad.csv").write_text(text)
        return "fit", "bad.csv", "--starts", 4, "--bootstrap", 20

    def model(self, *words):
        return ("--law", "law.json", "--active", "298M", "--context", 3072, "--compute", "1e18", *words)

    def law_file(self):
        return json.loads((self.path / "law.json").read_text())


class FitTest(CommandTest):
    def test_effects_lie_within_their_intervals(self):
        found = re.findall(r"\n  \w+ \w+ +([+-][.\d]+)  ([+-][.\d]+) \.\. ([+-][.\d]+) +at ", self.fitted)
        self.assertEqual(len(found), 3, self.fitted)
        for effect, low, high in found:
            self.assertLess(float(low), float(effect))
            self.assertLess(float(effect), float(high))

    def test_report_and_file(self):
        self.assertIn("108 runs of X-MoD against 6 dense baselines", self.fitted)
        law = self.law_file()
        for name in NAMES:
            self.assertRegex(self.fitted, rf"\n  {name} +{re.escape(format(law['constants'][name], '.5g'))} ")
            ends = law["intervals"][name]
            self.assertLessEqual(ends["low"], law["constants"][name])
            self.assertGreaterEqual(ends["high"], law["constants"][name])
        self.assertEqual(law["range"]["L"], [1024, 4096])
        self.assertEqual(len(law["samples"]), 100)
        self.assertLess(abs(law["fit"]["seed_spread"] / 0.003 - 1), 0.3)
        self.assertIn(f"{law['fit']['seed_spread']:.4f} (over 60 further seeds)", self.fitted)

    def test_same_seed_same_fit(self):
        self.law("fit", "runs.csv", "--out", "again.json", "--starts", 16, "--bootstrap", 100)
        self.assertEqual((self.path / "again.json").read_text(), (self.path / "law.json").read_text())

    def test_a_difference_is_to_the_mean_of_its_own_dense_runs(self):
        sys.argv[0] = "scaling_law.py"
        from law_runs import read_runs
        runs = read_runs([str(self.path / "runs.csv")])
        for i in (0, 50, 107):
            same = [float(row["val_loss_topk"]) for row in self.rows if row["arch"] == "dense"
                    and (row["backbone"], row["L"]) == (runs.backbone[i], runs.L[i])]
            self.assertEqual(len(same), 2)
            self.assertAlmostEqual(runs.delta[i], runs.loss[i] - sum(same) / 2)
        other = read_runs([str(self.path / "runs.csv")], "threshold")
        self.assertEqual(other.loss[0], float(self.rows[12]["val_loss_threshold"]))

    def test_dense_runs_may_lie_in_another_file(self):
        dense = [row for row in self.rows if row["arch"] == "dense"]
        rest = [row for row in self.rows if row["arch"] != "dense"]
        (self.path / "dense.csv").write_text(csv_text(dense))
        (self.path / "rest.csv").write_text(csv_text(rest))
        text = self.law("check", "rest.csv", "dense.csv", "--law", "law.json")
        self.assertEqual(text, self.law("check", "runs.csv", "--law", "law.json"))

    def test_prior_and_fixed(self):
        text = self.law("fit", "runs.csv", "--starts", 4, "--bootstrap", 20, "--prior", PAPER,
                        "--fix", "rho_A=1.5", "--bounds", "eta_L=0.5:0.8")
        self.assertRegex(text, r"rho_A +1.5 .*fixed")
        self.assertRegex(text, r"eta_L +0.8 .*upper bound")
        self.assertRegex(text, r"\n  e +\S+ .*, with a prior")

    def test_crossval(self):
        text = self.law("crossval", "runs.csv", "--starts", 8)
        for line in (r"L +1024 +36 ", r"A +all +108 ", r"N_act +298M +54 .*does not tell u, eta_N", r"K +8 +36 "):
            self.assertRegex(text, line)
        beyond = text[text.index("Beyond"):]
        self.assertEqual(re.findall(r"^  (\w+) +(\S+) +\d+ ", beyond, re.M),
                         [("L", "4096"), ("A", "4"), ("N_act", "298M"), ("K", "8")])

    def test_plot(self):
        self.law("plot", "runs.csv", "--out", "law", "--format", "svg", "--starts", 4)
        regularities = (self.path / "law_regularities.svg").read_text()
        for part in ("Nact 165M, A 1", "sparse context L/K", "L 2048", "Nact 298M", "A 4"):
            self.assertIn(part, regularities)
        predictions = (self.path / "law_predictions.svg").read_text()
        for part in ("in range: rms 0.00", "beyond in Nact", "leaving out one L", "A 2: rms"):
            self.assertIn(part, predictions)
        self.law("plot", "runs.csv", "--out", "absolute", "--absolute", "--starts", 4)
        self.assertEqual((self.path / "absolute_regularities.png").read_bytes()[:4], b"\x89PNG")


class PredictTest(CommandTest):
    def plan(self, K, A, *words):
        return plan_json("--preset", "298M", "--arch", "xmod", "--token-sparsity", K, "--anchor-stride", A, "--seq-len",
                         3072, "--batch-size", 1, *words)

    def predict(self, active, context, *words):
        return json.loads(self.law("predict", "--law", "law.json", "--active", active, "--context", context,
                                   "--compute", "1e18", *words))

    def test_the_trainer_predicts_the_same(self):
        found, = json.loads(self.law("predict", *self.model("--sparsities", 16, "--strides", 2, "--json")))
        told = self.plan(16, 2, "--law", self.path / "law.json")
        self.assertAlmostEqual(told["scaling_law"]["delta"], found["delta"], places=12)
        self.assertAlmostEqual(told["scaling_law"]["low"], found["low"], places=12)
        self.assertAlmostEqual(told["scaling_law"]["high"], found["high"], places=12)
        self.assertEqual(told["scaling_law"]["beyond"], "K above 8")
        self.assertEqual((found["layers"], found["params_total"]), (told["layers"], told["params_total"]))
        self.assertIn("K above 8", self.law("predict", *self.model("--sparsities", 16, "--strides", 2)))

    def test_check_compares_with_runs(self):
        text = self.law("check", "runs.csv", "--law", "law.json")
        row = next(line.split() for line in text.splitlines() if line.startswith("  298M-L4096-A4K8"))
        predicted, true, error = float(row[1]), float(row[-2]), float(row[-1])
        self.assertAlmostEqual(predicted - true, error, delta=1e-3)
        self.assertRegex(text, r"root mean square error 0\.00\d\d")

    def test_recommends_the_best_that_fits(self):
        everything = json.loads(self.law("predict", *self.model("--json")))
        for memory in (1000, 25, 12):
            fitting = [c for c in everything if c["memory"] <= memory * 2**30]
            found = json.loads(self.law("recommend", *self.model("--memory", memory, "--json")))
            self.assertEqual(len(found), len(everything))
            self.assertEqual([c["fits"] for c in found], [i < len(fitting) for i in range(len(found))])
            best = min(fitting, key=lambda c: c["delta"])
            self.assertEqual((found[0]["K"], found[0]["A"]), (best["K"], best["A"]))
            self.assertAlmostEqual(sum(c["best_in"] for c in found), 1)
        self.assertLess(len(fitting), len(everything))
        self.assertEqual(self.plan(best["K"], best["A"])["memory"]["total"], best["memory"])
        text = self.law("recommend", *self.model("--memory", 12))
        self.assertIn(f"Train K {best['K']} A {best['A']}: ", text)
        self.assertIn(" better ones do not fit 12 GiB", text)
        command = text.strip().splitlines()[-1].split()
        self.assertEqual(command[:2], ["train_xmod", "train"])
        self.assertEqual(plan_json(*command[2:])["params_total"], best["params_total"])

    def test_backbone_by_name_size_preset_and_flags(self):
        def total(active, *words):
            found, = self.predict(active, 3072, "--sparsities", 4, "--strides", 1, "--json", *words)
            return found["params_total"]

        plan = self.plan(4, 1)["params_total"]
        for active in ("298M", "300M", "2.9e8"):
            self.assertEqual(total(active), plan)
        self.assertGreater(total("556M"), 1.5 * plan)
        self.assertGreater(total("298M", "--", "--active-layers", "40"), 1.2 * plan)

    def test_equal_layers_are_one_candidate(self):
        """A backbone of 3 units has room for A 1 and 2; asked for more, it is a 2."""
        found = self.predict("tiny", 256, "--sparsities", 2, "--json", "--", "--active-layers", "5")
        self.assertEqual([c["A"] for c in found], [1, 2])
        only, = self.predict("tiny", 256, "--sparsities", 2, "--strides", 7, "--json", "--", "--active-layers", "5")
        self.assertEqual(only, found[1])

    def test_no_advice_to_train_what_is_worse_than_dense(self):
        law = {**self.law_file(), "samples": []}
        law["constants"]["e"] = 9
        (self.path / "worse.json").write_text(json.dumps(law))
        text = self.law("recommend", "--law", "worse.json", *self.model("--memory", 1000)[2:])
        self.assertRegex(text, r"\nNo configuration is predicted to be better than the dense model\.\nThe nearest is K \d")

    def test_refusals(self):
        self.expect_error(["paper_law.json", "eta_L, rho_L, z, rho_K, rho_A are missing"], "predict", "--law",
                          PAPER, *self.model()[2:])
        self.expect_error(["--memory 0.5", "none of", "the smallest", "GiB"], "recommend", *self.model("--memory", 0.5))
        self.expect_error(["--active 12M", "preset"], "predict", "--law", "law.json", "--active", "12M", "--context",
                          256, "--compute", "1e13")
        self.expect_error(["--sparsities", "--context 3"], "predict", "--law", "law.json", "--active", "298M",
                          "--context", 3, "--compute", "1e13", "--sparsities", 4)
        self.expect_error(["no-binary", "build it"], "predict", *self.model("--binary", "no-binary"))
        for text, part in (("{", "not valid JSON"), ("[]", "no \"constants\""), ('{"constants": {"q": 1}}', "'q'"),
                           ('{"constants": {"e": "x"}}', "e is \"x\"")):
            (self.path / "bad.json").write_text(text)
            self.expect_error(["bad.json", part], "check", "runs.csv", "--law", "bad.json")
        for part, values in {"samples": ("x", [[1] * 9], [["a"] * 10], [[None] * 10]), "confidence": ("x", 7, None),
                             "range": ([1], {"L": [1]}, {"L": "x"}), "fit": ([1], {"noise": "x"}),
                             "backbones": (["tiny"], {"tiny": 3}, {"tiny": {"N_act": "x"}})}.items():
            for value in values:
                (self.path / "bad.json").write_text(json.dumps({**self.law_file(), part: value}))
                self.expect_error(["bad.json", part], "check", "runs.csv", "--law", "bad.json")
        self.expect_error(["cannot read nowhere.json"], "check", "runs.csv", "--law", "nowhere.json")


class BadRunsTest(CommandTest):
    def test_too_few(self):
        one_context = [row for row in self.rows if row["L"] == 1024]
        self.expect_error(["too few runs for the parameters w, eta_L", "1 of L"], *self.fit_of(csv_text(one_context)))
        two_strides = [row for row in self.rows if row["A"] != 2]
        self.expect_error(["too few runs for the parameters z, rho_A", "2 of A"], *self.fit_of(csv_text(two_strides)))
        self.law(*self.fit_of(csv_text(two_strides)), "--fix", "rho_A=1")
        one_stride = [row for row in self.rows if row["A"] in ("", 1)]
        self.expect_error(["for the parameters z, rho_K, rho_A", "1 of A"], *self.fit_of(csv_text(one_stride)))
        text = self.law(*self.fit_of(csv_text(one_stride)), "--fix", "z=0")
        self.assertEqual(re.findall(r"\n  (\w+) .* fixed", text), ["z", "rho_K", "rho_A"])
        self.assertIn("7 free constants", text)
        self.expect_error(["too few runs for the parameters", "5 of X-MoD", "10 parameters"],
                          *self.fit_of(csv_text(self.rows[:17])))

    def test_no_dense_baseline(self):
        rest = [row for row in self.rows if row["arch"] != "dense" or (row["backbone"], row["L"]) != ("298M", 2048)]
        self.expect_error(["bad.csv", "no dense run", "backbone 298M, L 2048, compute 1e+18"],
                          *self.fit_of(csv_text(rest)))
        other = [{**row, "compute": "2e18"} if row["arch"] == "dense" else row for row in self.rows]
        self.expect_error(["no dense run", "165M", "298M", "L 4096"], *self.fit_of(csv_text(other)))
        self.expect_error(["no run of xmod"], *self.fit_of(csv_text(self.rows[:12])))

    def test_mixed_vocabularies_and_data(self):
        for column, value, part in (("vocab_size", 256, "vocabularies"), ("dataset", "other", "data sets")):
            rows = [*self.rows[:-1], {**self.rows[-1], column: value}]
            self.expect_error([column, str(value), rows[-1]["name"], part], *self.fit_of(csv_text(rows)))

    def test_values(self):
        for column, value, part in (("val_loss_topk", "nan", "finite"), ("val_loss_topk", "inf", "finite"),
                                    ("val_loss_topk", "", "a number"), ("K", "four", "a number"), ("A", "", "a number"),
                                    ("A", "0.5", "1 or more"), ("N", "-3", "more than 0")):
            rows = [*self.rows[:20], {**self.rows[20], column: value}, *self.rows[21:]]
            self.expect_error(["bad.csv: line 22", self.rows[20]["name"], column, part], *self.fit_of(csv_text(rows)))

    def test_a_run_twice(self):
        self.expect_error(["line 122", "the run of line 30 again"], *self.fit_of(csv_text([*self.rows, self.rows[28]])))

    def test_cut_off(self):
        text = csv_text(self.rows)
        last = text.rindex("\n", 0, -1) + 1
        for length in (last + 1, last + 30, len(text) - 10, len(text) - 1):
            self.expect_error(["bad.csv: line 121", "cut off in mid-line"], *self.fit_of(text[:length]))
        lines = text.split("\n")
        lines[40] += ",1"
        self.expect_error(["bad.csv: line 41", "values, expected"], *self.fit_of("\n".join(lines)))

    def test_no_table(self):
        missing = [name for name in COLUMNS if name not in ("N_act", "val_loss_topk")]
        self.expect_error(["no column N_act, val_loss_topk"], *self.fit_of(csv_text(self.rows, missing)))
        self.expect_error(["bad.csv", "empty"], *self.fit_of(""))
        self.expect_error(["bad.csv", "no run after"], *self.fit_of(csv_text([])))
        self.expect_error(["cannot read nowhere.csv"], "fit", "nowhere.csv")
        (self.path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
        self.expect_error(["bytes.csv", "not a text file"], "fit", "bytes.csv")
        (self.path / "bytes.csv").write_text(csv_text(self.rows)[:1500] + "\0" * 100)
        self.expect_error(["bytes.csv", "not a text file"], "fit", "bytes.csv")

    def test_nothing_half_written(self):
        self.expect_error(["cannot write nowhere/law.json"], *self.fit_of(csv_text(self.rows)), "--out",
                          "nowhere/law.json")

    def test_usage(self):
        for words in (["--fix", "u=1"], ["--fix", "rho_A=x"], ["--fix", "rho=1"], ["--fix", "rho_A=nan"],
                      ["--bounds", "eta_N=2:1"], ["--bounds", "eta_N=nan:1"], ["--starts", "0"], ["--prior-width", "-1"], ["--routing", "other"]):
            self.expect_error([words[0]], "fit", "runs.csv", *words, status=2)
        self.expect_error(["COMMAND"], status=2)

    def test_without_numpy(self):
        for script in (SCRIPT, SCRIPT.with_name("law_recovery.py")):
            result = subprocess.run([sys.executable, "-S", "-E", str(script)], capture_output=True, text=True)
            self.assertRegex(result.stderr, r"\A\w+\.py: needs numpy: [^\n]+\n\Z")
            self.assertEqual(result.returncode, 1)


if __name__ == "__main__":
    unittest.main()
