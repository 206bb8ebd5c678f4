"""Runs scripts/compare.py as a user does, with ./train_xmod on models and shards of a few kilobytes: training,
stopping and going on, runs that fail, bad lists, and the tables by values worked out by hand."""

import csv
import importlib.util
import json
import os
import pty
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

from test_training import BINARY, MODEL, flags, some_text, write_shard

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "compare.py"

SHAPE = {name: value for name, value in MODEL.items() if name not in ("arch", "dense_prefix", "token_sparsity")}
COMMON = " ".join(flags({**SHAPE, "batch_size": 3, "eval_interval": 0, "checkpoint_interval": 20}))
LIST = f"""
# Three of them.
title: Small models
note: Very small.
baseline: dense
common: {COMMON}

dense: --arch dense  # the usual one
mod:   --arch mod --token-sparsity 2
xmod:  --arch xmod --dense-prefix 1 --token-sparsity 2
"""
BUDGET = "1e8"  # some 25 steps


class CompareTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.out = self.folder / "out"
        write_shard(self.folder / "train_0.bin", some_text(500, 1))
        write_shard(self.folder / "val_0.bin", some_text(200, 99))

    def write_list(self, text, name="small.txt"):
        (self.folder / name).write_text(text)
        return name

    def command(self, *arguments, **changes):
        options = {"train_data": "train_*.bin", "val_data": "val_*.bin", "compute": BUDGET, "out": "out", "threads": 1,
                   "binary": BINARY, "no_picture": True, **changes}
        seeds = [] if "--seeds" in arguments else ["--seeds", 1]
        dashes = arguments.index("--") if "--" in arguments else len(arguments)
        words = [*arguments[:dashes], *seeds, *flags(options), *arguments[dashes:]]
        return [sys.executable, str(SCRIPT), *map(str, words)]

    def start(self, *arguments, **changes):
        return subprocess.Popen(self.command(*arguments, **changes), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                text=True, cwd=self.folder, env={**os.environ, "OMP_WAIT_POLICY": "passive"})

    def compare(self, *arguments, status=0, **changes):
        """Its output."""
        process = self.start(*arguments, **changes)
        out, err = process.communicate(timeout=300)
        self.assertEqual(process.returncode, status, out + err)
        self.assertEqual(err, "")
        return out

    def expect_error(self, parts, *arguments, status=1, **changes):
        """One line, and nothing trained."""
        before = sorted(self.out.rglob("*"))
        process = self.start(*arguments, **changes)
        out, err = process.communicate(timeout=300)
        self.assertRegex(err, r"\Acompare\.py: [^\n]+\n\Z")
        for part in [parts] if isinstance(parts, str) else parts:
            self.assertIn(part, err)
        self.assertEqual(process.returncode, status, err)
        self.assertEqual(sorted(self.out.rglob("*")), before)

    def run_of(self, name, seed=1):
        return self.out / name / f"seed-{seed}"

    def metrics(self, name, seed=1):
        """Rows without the timing."""
        rows = (self.run_of(name, seed) / "metrics.csv").read_text().splitlines()
        return [row.rpartition(",")[0] for row in rows]

    def set_losses(self, name, seed, topk, threshold):
        """Puts other final losses into a finished run."""
        path = self.run_of(name, seed) / "metrics.csv"
        rows = path.read_text().splitlines()
        cells = rows[-1].split(",")
        cells[4:6] = str(topk), str(threshold)
        path.write_text("\n".join(rows[:-1] + [",".join(cells)]) + "\n")

    def table(self, stem="small"):
        """{configuration: its row of the CSV}"""
        with open(self.out / f"{stem}.csv", newline="") as file:
            return {row["configuration"]: row for row in csv.DictReader(file)}


class TrainingTest(CompareTest):
    def test_trains_once_and_writes_tables(self):
        self.write_list(LIST)
        output = self.compare("small.txt", "--seeds", 1, 2, jobs=2)
        self.assertIn("xmod seed 2: finished in", output)
        self.assertIn("6 of 6 runs done", output)
        starts, ends = [[i for i, line in enumerate(output.splitlines()) if word in line] for word in
                        (": started", ": finished")]
        self.assertLess(starts[1], ends[0])  # two at a time
        self.assertLess(ends[0], starts[2])  # and no more

        for name, row in self.table().items():
            model = {**SHAPE, **({"dense_prefix": 1} if name == "xmod" else {}),
                     **({} if name == "dense" else {"token_sparsity": 2})}
            plan = json.loads(subprocess.run([BINARY, "plan", "--json", *flags({"arch": name, **model})],
                                             capture_output=True, check=True).stdout)
            for key in ("layers", "params_total", "flops_per_token", "flops_ratio_to_dense"):
                self.assertEqual(float(row[key]), plan[key])
            last = self.metrics(name)[-1].split(",")
            self.assertEqual(row["tokens"], last[1])
            self.assertEqual(float(row["val_loss_topk_seed_1"]), float(last[4]))
            self.assertEqual(float(row["val_loss_threshold_seed_1"]), float(last[5]))
        self.assertIn(" dense ", (self.run_of("dense") / "command.txt").read_text())
        self.assertIn("training: 500 tokens", (self.run_of("dense") / "log.txt").read_text())
        text = (self.out / "small.md").read_text()
        for part in ("# Small models\n", "Very small.", "| minus dense |", "seeds 1, 2", COMMON):
            self.assertIn(part, text)
        self.assertNotIn("Incomplete", text)

        before = {path: path.stat().st_mtime_ns for path in self.out.rglob("seed-*/**/*")}
        output = self.compare("small.txt", "--seeds", 2, 1)
        self.assertIn("6 of 6 runs finished already", output)
        self.assertNotIn("started", output)
        self.assertEqual({path: path.stat().st_mtime_ns for path in self.out.rglob("seed-*/**/*")}, before)

    @unittest.skipIf(importlib.util.find_spec("matplotlib") is None, "matplotlib is missing")
    def test_picture(self):
        self.write_list(LIST)
        self.compare("small.txt", no_picture=None)
        self.assertEqual((self.out / "small.png").read_bytes()[:8], b"\x89PNG\r\n\x1a\n")

    def test_stopped_and_gone_on(self):
        names = ["mod", "xmod"]
        self.write_list(LIST.replace("baseline: dense", "").replace("dense:", "#"))
        budget = {"compute": "1.2e9"}  # some 300 steps
        self.compare("small.txt", jobs=2, **budget)
        expected = [self.metrics(name) for name in names]
        self.out.rename(self.folder / "whole")

        for step, stop in ((20, signal.SIGINT), (60, signal.SIGTERM)):
            before = {name: self.last_step(name) for name in names}
            process = self.start("small.txt", jobs=2, **budget)
            while not all(self.last_step(name) >= max(step, before[name] + 1) for name in names):  # it trains
                self.assertIsNone(process.poll(), "it ended before it was stopped")
                time.sleep(0.01)
            process.send_signal(stop)
            _, err = process.communicate(timeout=60)
            self.assertEqual(process.returncode, 130, err)
            self.assertIn("the same command goes on", err)
            rows = [self.metrics(name) for name in names]
            time.sleep(0.1)
            self.assertEqual([self.metrics(name) for name in names], rows)  # nothing runs on

        output = self.compare("small.txt", jobs=2, **budget)
        for name, rows in zip(names, expected):
            self.assertIn(f"{name} seed 1: going on from", output)
            self.assertEqual(self.metrics(name), rows)

    def last_step(self, name):
        """Of the newest checkpoint."""
        return max((int(path.name[5:]) for path in self.run_of(name).glob("step_????????")), default=0)

    def test_a_run_whose_last_checkpoint_is_missing_is_resumed(self):
        self.write_list(LIST)
        self.compare("small.txt")
        newest = max(self.run_of("xmod").glob("step_*"))
        expected = self.metrics("xmod")
        for file in newest.iterdir():
            file.unlink()
        newest.rmdir()
        output = self.compare("small.txt")
        self.assertIn("2 of 3 runs finished already", output)
        self.assertTrue(newest.is_dir())
        self.assertEqual(self.metrics("xmod"), expected)

    def test_a_run_without_checkpoints_is_finished(self):
        self.write_list(LIST)
        self.compare("small.txt")
        subprocess.run("rm -r out/*/*/step_*", shell=True, check=True, cwd=self.folder)
        self.assertIn("3 of 3 runs finished already", self.compare("small.txt"))

    def test_a_failing_run_does_not_stop_the_others(self):
        self.write_list(LIST + "wild: --arch dense --lr 1e30 --grad-clip 0\nlast: --arch dense --lr 1e-3\n")
        output = self.compare("small.txt", status=1)
        self.assertRegex(output, r"wild seed 1: FAILED: step \d+: the .* is .*out/wild/seed-1/log.txt")
        self.assertIn("last seed 1: finished", output)
        self.assertIn("4 of 5 runs done, 1 failed", output)
        text = (self.out / "small.md").read_text()
        self.assertIn("**Incomplete:** 1 of 5 runs missing: wild seed 1.", text)
        self.assertEqual(self.table()["wild"]["val_loss_topk_mean"], "")

    def test_a_run_that_could_not_begin_may_be_mended(self):
        self.write_list("dense: --arch dense --batch-size 1000000\n")
        self.assertIn("dense seed 1: FAILED: ", self.compare("small.txt", status=1))
        self.write_list(LIST)
        self.assertIn("dense seed 1: finished", self.compare("small.txt"))

    def test_runs_started_by_hand(self):
        self.write_list(LIST)
        directory = self.run_of("dense")
        directory.mkdir(parents=True)
        command = [str(BINARY), "train", "--arch", "dense", *COMMON.split(), "--val-data", "val_*.bin", "--train-data",
                   "train_*.bin", "--seed", "1", "--out", str(directory), f"--compute={BUDGET}", "--threads", "2"]
        subprocess.run(command, check=True, cwd=self.folder, stdout=subprocess.DEVNULL)
        self.expect_error(["dense/seed-1: holds a run without a command.txt", "another --out"], "small.txt")
        (directory / "command.txt").write_text(" ".join(command))
        self.assertIn("1 of 3 runs finished already", self.compare("small.txt"))

    def test_a_terminal_has_a_line_that_is_rewritten(self):
        self.write_list(LIST)
        ours, theirs = pty.openpty()
        with subprocess.Popen(self.command("small.txt", compute="1.2e10"), stdout=theirs, stderr=theirs,
                              cwd=self.folder) as process:
            os.close(theirs)
            text = b""
            while b"left | dense 1: " not in text:
                text += os.read(ours, 1000)
            process.terminate()
        os.close(ours)
        self.assertRegex(text.decode(), r"\r0 of 3 runs done, \d+m?\d*s left \| dense 1: \d+% ")


class TableTest(CompareTest):
    """The losses of the first two seeds are put in, those of the third are missing for xmod."""

    def setUp(self):
        super().setUp()
        self.write_list(LIST)
        self.compare("small.txt", "--seeds", 1, 2, 3, compute="1e6", jobs=3)
        for name, seed, topk, threshold in (("dense", 1, 2.0, 2.0), ("dense", 2, 2.5, 2.5), ("dense", 3, 3.0, 3.0),
                                            ("mod", 1, 2.0, 2.25), ("mod", 2, 2.5, 2.75), ("mod", 3, 3.0, 3.25),
                                            ("xmod", 1, 1.75, 2.0), ("xmod", 2, 2.0, 2.5)):
            self.set_losses(name, seed, topk, threshold)
        (self.run_of("xmod", 3) / "metrics.csv").unlink()
        self.output = self.compare("small.txt", "--table-only", "--seeds", 1, 2, 3, compute="1e6")

    def test_means_spreads_and_differences(self):
        table = self.table()

        def values(name, routing):
            return [float(table[name][f"val_loss_{routing}_{part}"])
                    for part in ("mean", "spread", "difference", "difference_spread")]

        self.assertEqual(values("dense", "topk"), [2.5, 0.5, 0, 0])
        self.assertEqual(values("mod", "topk"), [2.5, 0.5, 0, 0])
        self.assertEqual(values("mod", "threshold"), [2.75, 0.5, 0.25, 0])
        # xmod: the mean of 1.75 and 2.0; against dense of the same seeds, -0.25 and -0.5
        self.assertEqual(values("xmod", "topk"), [1.875, 0.176776695, -0.375, 0.176776695])
        self.assertEqual(values("xmod", "threshold"), [2.25, 0.353553391, 0, 0])
        self.assertEqual([table["xmod"][f"val_loss_topk_seed_{seed}"] for seed in (1, 2, 3)], ["1.75", "2.0", ""])
        self.assertEqual([table[name]["runs"] for name in table], ["3", "3", "2"])

    def test_markdown(self):
        lines = (self.out / "small.md").read_text().splitlines()
        self.assertIn("**Incomplete:** 1 of 9 runs missing: xmod seed 3.", lines)
        self.assertIn("(1 run missing)", self.output)
        row = next(line for line in lines if line.startswith("| xmod "))
        self.assertTrue(row.endswith("| 1.8750 ± 0.1768 | -0.3750 ± 0.1768 | 2.2500 ± 0.3536 | +0.0000 ± 0.0000 |"), row)
        row = next(line for line in lines if line.startswith("| dense "))
        self.assertTrue(row.endswith("| 2.5000 ± 0.5000 | 0 | 2.5000 ± 0.5000 | 0 |"), row)
        self.assertIn("| dense | `--arch dense` |", lines)

    def test_one_seed_has_no_spread_and_no_baseline_no_difference(self):
        self.compare("small.txt", "--table-only", "--seeds", 3, compute="1e6")
        lines = (self.out / "small.md").read_text().splitlines()
        self.assertTrue(next(line for line in lines if line.startswith("| mod "))
                        .endswith("| 3.0000 | +0.0000 | 3.2500 | +0.2500 |"))
        self.assertTrue(next(line for line in lines if line.startswith("| xmod ")).endswith("| – | – | – | – |"))
        self.assertEqual(self.table()["mod"]["val_loss_topk_spread"], "")

        self.write_list(LIST.replace("baseline: dense\n", ""))
        self.compare("small.txt", "--table-only", "--seeds", 1, 2, 3, compute="1e6")
        self.assertNotIn("minus", (self.out / "small.md").read_text())
        self.assertEqual(self.table()["mod"]["val_loss_topk_difference"], "")


class SeveralListsTest(CompareTest):
    def test_a_configuration_in_two_lists_is_trained_once(self):
        self.write_list(LIST)
        self.write_list(f"common: --arch dense\ncommon: {COMMON}\nbaseline: dense\ndense:\n"
                        "hot: --lr=0.01\n", "other.txt")
        output = self.compare("small.txt", "other.txt")
        self.assertEqual(output.count("dense seed 1: started"), 1)
        self.assertIn("4 of 4 runs done", output)
        self.assertEqual(list(self.table("small")), ["dense", "mod", "xmod"])
        self.assertEqual(list(self.table("other")), ["dense", "hot"])
        self.assertEqual(self.table("small")["dense"]["val_loss_topk_mean"],
                         self.table("other")["dense"]["val_loss_topk_mean"])

    def test_a_name_with_other_flags(self):
        self.write_list(LIST)
        self.write_list(LIST.replace("--arch mod --token-sparsity 2", "--arch mod --token-sparsity 3"), "other.txt")
        self.expect_error(["other.txt:9: mod has --token-sparsity 3, not --token-sparsity 2 as at small.txt:9",
                           "another name"], "small.txt", "other.txt")

    def test_ready_made_lists(self):
        """Every flag is one of the trainer's, and no configuration costs much more than the dense model."""
        lists = sorted((ROOT / "scripts" / "compare").glob("*.txt"))
        self.assertEqual([path.stem for path in lists], ["deco", "table1", "table2", "table3", "tiny"])
        self.compare(*lists, "--table-only", compute="2e13")
        for path in lists:
            table = self.table(path.stem)
            self.assertGreaterEqual(len(table), 3)
            for name, row in table.items():
                self.assertEqual(row["runs"], "0")
                self.assertLess(float(row["flops_ratio_to_dense"]), 1.2)
                self.assertIn("K8" in name, (False, "--token-sparsity 8" in row["flags"]))
        self.assertEqual(self.table("table1")["xmod-A4K4"]["layers"], "20")
        self.assertEqual(self.table("table1")["moe-64"]["flops_ratio_to_dense"], "1.0")


class BadInputTest(CompareTest):
    def test_lists(self):
        for text, parts in (
                ("dense: --arch dense\nmod --arch mod\n", [":2: found 'mod --arch mod'", "`name: flags`"]),
                ("dense: --arch dense\n\nmy model: --arch mod\n", [":3:", "found 'my model: --arch mod'"]),
                ("../up: --arch dense", [":1:", "a name of letters"]),
                ("dense: --arch dense\ncommon: --lr 1", [":2: common: stands behind a configuration"]),
                ("dense: --arch dense\n# x\ndense: --arch mod", [":3: dense is already", "bad.txt:1"]),
                ("dense: arch dense", [":1: found 'arch', expected a flag"]),
                ("dense: --arch dense mod", [":1: found 'mod', expected a flag"]),
                ("dense: --arch 'dense", [":1: No closing quotation"]),
                ("dense: --arhc dense", [":1: unknown flag --arhc, did you mean --arch?"]),
                ("common: --seq-length 7\ndense:", [":1: unknown flag --seq-length, did you mean --seq-len?"]),
                ("dense: --seed 3", [":1: --seed cannot stand here", "--seeds"]),
                ("dense: --steps=3", [":1: --steps cannot stand here", "--compute"]),
                ("x: --arch dense\ny: --arch thick", ["bad.txt:2: y: ", "thick"]),
                ("dense: --arch dense --anchor-stride 2", ["bad.txt:1: dense: ", "--anchor-stride does not belong"]),
                ("baseline: mod\ndense: --arch dense", [":1: baseline mod is not in the list", "dense"]),
                ("# nothing\ntitle: none\n", ["bad.txt: no configuration in it"])):
            with self.subTest(text):
                self.expect_error(["bad.txt", *parts], self.write_list(text, "bad.txt"))
        self.expect_error(["nowhere.txt: No such file"], "nowhere.txt")
        (self.folder / "bytes.txt").write_bytes(b"\xff\xfe")
        self.expect_error(["bytes.txt: not a text file"], "bytes.txt")

    def test_a_run_that_is_there_with_other_flags(self):
        self.write_list(LIST)
        self.compare("small.txt", compute="1e6")
        for parts, arguments, changes in (
                (["dense seed 1 was trained with no --lr, not --lr 0.1", "out/dense/seed-1/command.txt",
                  "another --out, or remove"], ["--", "--lr", 0.1], {}),
                (["--batch-size 3, not --batch-size 4"], ["--", "--batch-size", 4], {}),
                (["--compute 1e6, not --compute 2e6"], [], {"compute": "2e6"}),
                (["train_*.bin", "not --train-data"], [], {"train_data": "train_0*"})):
            self.expect_error(parts, "small.txt", *arguments, **{"compute": "1e6", **changes})
        self.assertIn("3 of 3 runs finished already",  # what has no effect on the result may change
                      self.compare("small.txt", "--", "--checkpoint-interval", 7, compute="1000000", threads=2,
                                   train_data=self.folder / "train_*.bin"))
        (self.run_of("mod") / "command.txt").write_text("something else")
        self.expect_error(["mod/seed-1/command.txt: not a command"], "small.txt", compute="1e6")

    def test_arguments(self):
        self.write_list(LIST)
        (self.folder / "deep").mkdir()
        self.write_list(LIST, "deep/small.txt")
        for parts, arguments, changes in (
                (["--compute much"], [], {"compute": "much"}),
                (["--compute -1"], [], {"compute": "-1"}),
                (["--compute nan"], [], {"compute": "nan"}),
                (["--seeds 1", "each once"], ["--seeds", 1, 1], {}),
                (["--seeds", "'x'"], ["--seeds", "x"], {}),
                (["--jobs 0"], [], {"jobs": 0}),
                (["--threads 0"], [], {"threads": 0}),
                (["deep/small.txt", "another list has the name"], ["deep/small.txt"], {})):
            self.expect_error(parts + ["--help"], "small.txt", *arguments, status=2, **changes)
        self.expect_error(["--val-data nothing_*", "no such file", "prepare_data.py"], "small.txt",
                          val_data="nothing_*")
        self.expect_error(["--binary ./nowhere", "build it with make"], "small.txt", binary="./nowhere")
        self.expect_error(["behind --: unknown flag --lrr, did you mean --lr?"], "small.txt", "--", "--lrr", 1)
        self.expect_error(["behind --: --seed"], "small.txt", "--", "--seed", 1)


if __name__ == "__main__":
    unittest.main(verbosity=2)
