"""Runs scripts/sweep.py as a user does, with ./train_xmod on models and shards of a few kilobytes: rows, stopping and
going on, runs that fail or diverge, cut-off files and bad grids."""

import csv
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

from test_training import BINARY, flags, some_text, write_shard

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "sweep.py"

HEAD = """
compute = 1e8  # some 20 steps
seeds = [1]
tokens_per_step = 64
val_tokens = 128
flags = "--checkpoint-interval 5"
"""
BACKBONES = """
[backbones.mini]
active_layers = 4
dense_prefix = 1
dim = 16
heads = 2
kv_heads = 1
head_dim = 8
ffn_dim = 24
vocab_size = 256
"""
POINTS = """
[[points]]
backbones = ["mini"]
contexts = [16]
K = [2, 4]
A = [1]

[[points]]
backbones = ["mini"]
contexts = [16]
K = [4]
A = [2]
seeds = [1, 2]

[[points]]
held_out = true
backbones = ["mini"]
contexts = [32]
K = [2]
A = [1]
"""
GRID = HEAD + BACKBONES + POINTS
DENSE, K2, K4, A2 = (f"mini-L16-C1e8-{kind}" for kind in ("dense", "A1K2", "A1K4", "A2K4"))
FITTED = [(DENSE, "1"), (K2, "1"), (K4, "1"), (DENSE, "2"), (A2, "1"), (A2, "2")]
HELD_OUT = [("mini-L32-C1e8-dense", "1"), ("mini-L32-C1e8-A1K2", "1")]
ONE = HEAD + BACKBONES + """
[[points]]
backbones = "mini"
contexts = 16
K = 2
A = 1
"""
COLUMNS = ("name,arch,backbone,seed,L,K,A,prefix,N_act,N,params_matrix,layers,dense_layers,sparse_layers,active_layers,dim,"
           "heads,kv_heads,head_dim,ffn_dim,vocab_size,compute,tokens,flops_per_token,flops_ratio_to_dense,steps,"
           "val_loss_topk,val_loss_threshold,train_loss,seconds,dataset,command")


class SweepTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)  # a trainer may outlive its sweep
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.out = self.folder / "out"
        write_shard(self.folder / "train_0.bin", some_text(500, 1))
        write_shard(self.folder / "val_0.bin", some_text(200, 99))

    def command(self, *arguments, **changes):
        options = {"train_data": "train_*.bin", "val_data": "val_*.bin", "out": "out", "threads": 1, "binary": BINARY,
                   **changes}
        return [sys.executable, str(SCRIPT), *map(str, arguments or ["grid.toml"]), *flags(options)]

    def start(self, grid, *arguments, **changes):
        if grid is not None:
            (self.folder / "grid.toml").write_text(grid)
        return subprocess.Popen(self.command(*arguments, **changes), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                text=True, cwd=self.folder, env={**os.environ, "OMP_WAIT_POLICY": "passive"})

    def sweep(self, grid, *arguments, status=0, **changes):
        """Its output."""
        process = self.start(grid, *arguments, **changes)
        out, err = process.communicate(timeout=300)
        self.assertEqual(process.returncode, status, out + err)
        self.assertEqual(err, "")
        return out

    def expect_error(self, parts, grid, *arguments, status=1, **changes):
        """One line, and nothing trained or written."""
        before = {path: path.stat().st_mtime_ns for path in self.out.rglob("*")}
        process = self.start(grid, *arguments, **changes)
        out, err = process.communicate(timeout=300)
        self.assertRegex(err, r"\Asweep\.py: [^\n]+\n\Z")
        for part in parts:
            self.assertIn(part, err)
        self.assertEqual(process.returncode, status, err)
        self.assertEqual({path: path.stat().st_mtime_ns for path in self.out.rglob("*")}, before)

    def rows(self, name="runs.csv"):
        with open(self.out / name, newline="") as file:
            return list(csv.DictReader(file))

    def names(self, name="runs.csv"):
        return [(row["name"], row["seed"]) for row in self.rows(name)]

    def rows_without_times(self):
        return [{**row, "seconds": None} for row in self.rows()]


class TrainingTest(SweepTest):
    def test_trains_once_and_writes_a_row_a_run(self):
        output = self.sweep(GRID, jobs=2)
        self.assertIn("8 of 8 runs done", output)
        self.assertEqual(self.names(), FITTED)
        self.assertEqual(self.names("held_out.csv"), HELD_OUT)
        self.assertEqual((self.out / "runs.csv").read_text().splitlines()[0], COLUMNS)
        for row in self.rows() + self.rows("held_out.csv"):
            self.check_row(row)

        before = {path: path.stat().st_mtime_ns for path in self.out.rglob("seed-*/**/*")}
        tables = [(self.out / name).read_bytes() for name in ("runs.csv", "held_out.csv")]
        output = self.sweep(None)
        self.assertIn("8 of 8 runs finished already", output)
        self.assertNotIn("started", output)
        self.assertEqual({path: path.stat().st_mtime_ns for path in self.out.rglob("seed-*/**/*")}, before)
        self.assertEqual([(self.out / name).read_bytes() for name in ("runs.csv", "held_out.csv")], tables)

    def check_row(self, row):
        """Against the plan, the run's own metrics, and its command."""
        words = shlex.split(row["command"])
        self.assertEqual(words[:2], ["train_xmod", "train"])
        self.assertNotIn(str(self.folder), row["command"])
        model = words[2:words.index("--eval-interval")]
        plan = json.loads(subprocess.run([BINARY, "plan", "--json", *model], capture_output=True, check=True).stdout)
        for column, key in {"N": "params_total", "N_act": "params_active", "tokens": "tokens",
                            **{key: key for key in ("params_matrix", "layers", "dense_layers", "sparse_layers",
                                                    "active_layers", "flops_per_token", "flops_ratio_to_dense")}}.items():
            tolerance = 64 if key == "tokens" else 1e-6 * plan[key]  # the trainer goes to the nearest step
            self.assertAlmostEqual(float(row[column]), plan[key], delta=tolerance, msg=column)
        with open(self.out / row["name"] / f"seed-{row['seed']}" / "metrics.csv", newline="") as file:
            steps = list(csv.DictReader(file))
        for key in ("val_loss_topk", "val_loss_threshold"):
            self.assertEqual(float(row[key]), float(steps[-1][key]))
        self.assertEqual((row["steps"], row["tokens"]), (steps[-1]["step"], steps[-1]["tokens"]))
        late = [float(step["train_loss"]) for step in steps[-(len(steps) // 10):]]
        self.assertAlmostEqual(float(row["train_loss"]), sum(late) / len(late), places=5)
        self.assertAlmostEqual(float(row["seconds"]), sum(64 / float(step["tokens_per_second"]) for step in steps),
                               delta=0.06)
        dense = row["arch"] == "dense"
        self.assertEqual((row["K"] == "1", row["A"] == ""), (dense, dense))
        self.assertEqual([row[key] for key in ("backbone", "prefix", "dim", "heads", "kv_heads", "head_dim", "ffn_dim",
                                               "vocab_size", "compute", "dataset")],
                         ["mini", "1", "16", "2", "1", "8", "24", "256", "1e8", "train_*.bin"])
        given = dict(zip(words[2::2], words[3::2]))
        self.assertEqual(given["--seq-len"], row["L"])
        self.assertEqual(int(given["--batch-size"]) * int(row["L"]), 64)
        self.assertEqual(int(given["--eval-batches"]) * 64, 128)
        self.assertEqual((given.get("--token-sparsity"), given.get("--anchor-stride")),
                         (None, None) if dense else (row["K"], row["A"]))

    def test_the_command_of_a_row_repeats_the_run(self):
        self.sweep(ONE)
        row = self.rows()[1]
        command = row["command"].replace("train_xmod", str(BINARY), 1).replace("--out out", "--out again", 1)
        subprocess.run(command, shell=True, check=True, cwd=self.folder, stdout=subprocess.DEVNULL)
        last = (self.folder / "again" / row["name"] / "seed-1" / "metrics.csv").read_text().splitlines()[-1].split(",")
        self.assertEqual(float(row["val_loss_topk"]), float(last[4]))

    def test_stopped_and_gone_on(self):
        grid = ONE.replace("1e8", "1e9").replace("[1]", "[1, 2]")  # two runs of some 200 steps
        self.sweep(grid, jobs=2)
        expected = self.rows_without_times()
        self.assertEqual(len(expected), 4)
        self.out.rename(self.folder / "whole")

        for step, stop, status in ((20, signal.SIGINT, 130), (60, signal.SIGTERM, 130)):
            before = self.last_step()
            process = self.start(grid)
            while not self.last_step() >= max(step, before + 1):  # it trains
                self.assertIsNone(process.poll(), "it ended before it was stopped")
                time.sleep(0.01)
            process.send_signal(stop)
            _, err = process.communicate(timeout=60)
            self.assertEqual(process.returncode, status, err)
            self.assertIn("the same command goes on", err)
            self.assertEqual(self.names(), [])
        output = self.sweep(grid)
        self.assertIn("dense seed 1: going on from", output)
        self.assertEqual(self.rows_without_times(), expected)

    def last_step(self):
        """Of the newest checkpoint of the first run."""
        folder = self.out / "mini-L16-C1e9-dense" / "seed-1"
        return max((int(path.name[5:]) for path in folder.glob("step_????????")), default=0)

    def test_a_row_appears_with_the_end_of_its_run(self):
        process = self.start(GRID.replace("1e8", "3e8"))
        while not (self.out / "runs.csv").exists() or not self.rows():
            self.assertIsNone(process.poll(), "it ended before a row was there")
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)  # not even now is a file half written
        process.communicate(timeout=60)
        self.assertLess(len(self.rows()), 6)
        self.assertTrue((self.out / "runs.csv").read_text().endswith("\n"))

    def test_a_row_that_is_cut_off_is_written_anew(self):
        self.sweep(ONE)
        whole = (self.out / "runs.csv").read_bytes()
        for cut in (whole[:-30], whole[:-1], whole[:len(COLUMNS) - 5], b""):
            (self.out / "runs.csv").write_bytes(cut)
            self.assertIn("2 of 2 runs finished already", self.sweep(None))
            self.assertEqual((self.out / "runs.csv").read_bytes(), whole)

    def test_rows_of_other_grids_stay(self):
        self.sweep(ONE)
        first = self.rows()
        output = self.sweep(ONE.replace("K = 2", "K = 4"))
        self.assertIn("1 of 2 runs finished already", output)  # the dense one
        self.assertIn("runs.csv: 2 of 2 runs, 1 row of other grids", output)
        self.assertEqual(sorted(self.names()), sorted([(DENSE, "1"), (K2, "1"), (K4, "1")]))
        self.assertIn(first[1], self.rows())

    def test_a_failing_run_does_not_stop_the_others_and_is_tried_again(self):
        (self.out / K2 / "seed-1").mkdir(parents=True)
        (self.out / K2 / "seed-1" / "metrics.csv").mkdir()
        (self.folder / "grid.toml").write_text(GRID)
        self.expect_error([K2, "command.txt"], None)
        (self.out / K2 / "seed-1" / "metrics.csv").rmdir()
        wide = GRID.replace("vocab_size = 256", "vocab_size = 90")  # tokens of the data are above that
        output = self.sweep(wide, status=1)
        self.assertIn("8 failed", output)
        self.assertRegex(output, r"dense seed 1: FAILED: .*log.txt")
        self.assertEqual(self.names(), [])
        self.assertIn("8 of 8 runs done", self.sweep(GRID, jobs=2))

    def test_a_run_that_diverged_has_a_row_that_says_so(self):
        grid = ONE.replace("--checkpoint", "--lr 1e30 --grad-clip 0 --checkpoint")
        output = self.sweep(grid, status=1)
        self.assertRegex(output, r"A1K2 seed 1: FAILED: step \d+: the .* is .*out/mini-L16-C1e8-A1K2/seed-1/log.txt")
        self.assertIn(f"the loss became NaN in {DENSE} seed 1, {K2} seed 1", output)
        rows = self.rows()
        self.assertEqual([row["name"] for row in rows], [DENSE, K2])
        for row in rows:
            for key in ("val_loss_topk", "val_loss_threshold", "train_loss"):
                self.assertTrue(math.isnan(float(row[key])))
            self.assertLess(int(row["steps"]), 20)
            self.assertGreater(int(row["N"]), 10000)
        output = self.sweep(None)
        self.assertIn("2 of 2 runs finished already", output)
        self.assertIn("the loss became NaN", output)
        self.assertEqual(self.rows(), rows)
        self.expect_error([DENSE, "was trained with --lr 1e30, not no --lr", "another --out"], ONE)

    def test_list_and_table_only_train_nothing(self):
        output = self.sweep(GRID, "grid.toml", "--list")
        self.assertIn(f"0%  {DENSE} seed 1: 4 layers, 0.01M parameters", output)
        self.assertIn("0 of 8 runs done", output)
        self.assertFalse(self.out.exists())
        self.sweep(GRID, "grid.toml", "--table-only")
        self.assertEqual(self.names(), [])
        self.sweep(ONE)
        (self.out / "runs.csv").unlink()
        self.sweep(GRID, "grid.toml", "--table-only", dataset="words")
        self.assertEqual(self.names(), [(DENSE, "1"), (K2, "1")])
        self.assertEqual([row["dataset"] for row in self.rows()], ["words"] * 2)


class BadInputTest(SweepTest):
    def test_grids(self):
        def part(text):
            return HEAD + BACKBONES + "[[points]]\n" + text.replace(";", "\n")

        plain = 'backbones = ["mini"];contexts = [16];K = [2];A = [1];'
        for text, parts in (
                ("compute = ", ["not TOML: "]),
                (GRID.replace("seeds", "seed", 1), ["unknown key seed", "seeds"]),
                (GRID.replace("tokens_per_step = 64", ""), ["tokens_per_step is missing"]),
                (GRID.replace("tokens_per_step = 64", "tokens_per_step = 1.5"), ["1.5, expected a whole number"]),
                (GRID.replace("val_tokens = 128", "val_tokens = 100"), ["val_tokens 100", "multiple"]),
                (GRID.replace("--checkpoint-interval", "--seq-len"), ["flags: --seq-len cannot stand", "contexts"]),
                (GRID.replace("--checkpoint-interval", "--checkpoint-intervall"), ["did you mean --checkpoint-interval?"]),
                (GRID.replace("ffn_dim = 24", ""), ["backbone mini: ffn_dim is missing"]),
                (GRID.replace("ffn_dim = 24", 'ffn_dim = "24"'), ["backbone mini: ffn_dim: found '24'"]),
                (GRID.replace("ffn_dim = 24", "ffn_dim = 24\nlayers = 3"), ["backbone mini: unknown key layers"]),
                (GRID.replace("kv_heads = 1", "kv_heads = 3"), ["dense", "--heads"]),
                (GRID.replace("compute = 1e8", ""), ["points 1: compute is missing"]),
                (GRID.replace("compute = 1e8", "compute = -1"), ["points 1: compute: found -1"]),
                (GRID.replace("compute = 1e8", "compute = nan"), ["points 1: compute: found nan"]),
                (part("held_out = 1;" + plain), ["points 1: held_out: found 1, expected true or false"]),
                (part(plain.replace("K = [2];", "")), ["points 1: K is missing"]),
                (part(plain.replace("K = [2]", "k = [2]")), ["points 1: unknown key k"]),
                (part(plain.replace("[2]", "[]")), ["points 1: K: found an empty list"]),
                (part(plain.replace("[2]", "[1]")), ["points 1: K: found 1, expected 2 or more"]),
                (part(plain.replace("[2]", "[2.5]")), ["points 1: K: found 2.5"]),
                (part(plain.replace("[2]", "[17]")), ["A1K17: K 17 is above the context of 16"]),
                (part(plain.replace("A = [1]", "A = [3]")), ["A3K2: A 3 has no complete interval", "at most 2"]),
                (part(plain.replace("[16]", "[24]")), ["points 1: context 24: tokens_per_step 64"]),
                (part(plain.replace('"mini"', '"maxi"')), ["points 1: unknown backbone maxi; expected mini"]),
                (part(plain) + "[[points]]\nheld_out = true\n" + plain.replace(";", "\n"), [K2, "held out and is not"]),
                (HEAD + BACKBONES, ["points is missing"])):
            with self.subTest(parts):
                self.expect_error(["grid.toml: ", *parts], text)
        self.expect_error(["nowhere.toml: No such file"], None, "nowhere.toml")
        (self.folder / "bytes.toml").write_bytes(b"\xff\xfe")
        self.expect_error(["bytes.toml: not TOML"], None, "bytes.toml")

    def test_arguments_and_what_is_there(self):
        self.expect_error(["--jobs 0"], GRID, jobs=0, status=2)
        self.expect_error(["--val-data nothing_*", "no such file"], GRID, val_data="nothing_*")
        self.expect_error(["--binary ./nowhere", "build it with make"], GRID, binary="./nowhere")
        self.sweep(ONE)
        self.expect_error([DENSE, "no --lr, not --lr 0.1"], ONE.replace("--checkpoint", "--lr 0.1 --checkpoint"))
        (self.out / "runs.csv").write_text("name,loss\n")
        self.expect_error(["runs.csv:1: the columns of another kind of table"], ONE)
        (self.out / "runs.csv").write_bytes(b"\xff\xfe\x00")
        self.expect_error(["runs.csv", "not a text file"], ONE)

    def test_ready_made_grids(self):
        for path in sorted((ROOT / "scripts" / "sweeps").glob("*.toml")):
            output = self.sweep(None, path, "--list")
            self.assertNotIn(" 0 of 0 ", output)
            kinds = {line.split()[1].rpartition("-")[2] for line in output.splitlines()[:-1]}
            self.assertIn("dense", kinds)
            self.assertGreaterEqual(len({kind[3:] for kind in kinds - {"dense"}}), 3)  # values of K
            self.assertGreaterEqual(len({kind[1] for kind in kinds - {"dense"}}), 3)  # of A


if __name__ == "__main__":
    unittest.main(verbosity=2)
