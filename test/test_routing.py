"""Runs `./train_xmod routing` and scripts/plot_routing.py as a user does, on models and shards of a few kilobytes."""

import csv
import importlib.util
import json
import os
import subprocess
import sys
import unittest
from pathlib import Path

from test_training import DENSE, MOD, TrainingTest, some_text, write_shard, write_tokenizer

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "plot_routing.py"
NEEDS_MATPLOTLIB = unittest.skipIf(importlib.util.find_spec("matplotlib") is None, "matplotlib is missing")


class RoutingTest(TrainingTest):
    """A trained checkpoint, layers D SS D D, and 18 validation sequences of 16 tokens."""

    def setUp(self):
        super().setUp()
        self.checkpoint = self.train_once()

    def train_once(self, out="out", **changes):
        return self.train(out, eval_interval=0, checkpoint_interval=0, **changes) / "step_00000030"

    def words(self, checkpoint=None, val_data="val_0.bin"):
        return ["routing", "--checkpoint", checkpoint or self.checkpoint, "--val-data", val_data, "--threads", 1]

    def routing(self, *arguments, **changes):
        return self.succeed(*self.words(**changes), *arguments)

    def refused(self, parts, *arguments, status=1, **changes):
        """And no file is left."""
        before = sorted(self.folder.rglob("*"))
        self.expect_error(parts, *self.words(**changes), *arguments, status=status)
        self.assertEqual(sorted(self.folder.rglob("*")), before)


class CommandTest(RoutingTest):
    def test_json_csv_and_table_say_the_same(self):
        report = json.loads(self.routing("--json", "--csv", "layers.csv", "--batch-size", 5))
        self.assertEqual(report["pattern"], "DSSDD")
        self.assertEqual((report["sequences"], report["context"]), (18, 16))
        with open(self.folder / "layers.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        self.assertEqual([row["layer"] for row in rows], ["1", "2"])
        for row, layer in zip(rows, report["layers"]):
            for routing in "threshold", "topk":
                self.assertAlmostEqual(float(row[f"selected_{routing}"]), layer[routing]["selected"], delta=1e-6)
                self.assertAlmostEqual(float(row[f"covered_{routing}"]), layer[routing]["covered"], delta=1e-6)
            self.assertEqual(float(row["selected_topk"]), 8)
            self.assertAlmostEqual(float(row["agreement"]), layer["agreement"], delta=1e-6)
        coverage = report["all"]["threshold"]["coverage"]
        self.assertAlmostEqual(float(rows[-1]["covered_threshold"]), coverage, delta=1e-6)
        self.assertEqual(report["all"]["independent_subsets"]["coverage"], 0.75)

        table = self.routing("--batch-size", 4).decode()
        self.assertIn("xmod A1K2: 2 sparse layers in 1 interval; 18 sequences of 16 tokens\n", table)
        self.assertIn(f"{100 * coverage:#.4g}", table)

    def test_losses_are_those_of_eval(self):
        losses = json.loads(self.succeed("eval", "--checkpoint", self.checkpoint, "--val-data", "val_0.bin", "--json"))
        report = json.loads(self.routing("--json"))
        for name in "val_loss_topk", "val_loss_threshold":
            self.assertAlmostEqual(report[name], losses[name], delta=1e-9)

    def test_eval_batches_counts_from_the_beginning(self):
        few = json.loads(self.routing("--json", "--batch-size", 2, "--eval-batches", 2))
        self.assertEqual(few["sequences"], 4)
        write_shard(self.folder / "val_0.bin", some_text(300, 99)[:4 * 16 + 1])
        self.assertEqual(json.loads(self.routing("--json", "--batch-size", 2)), few)

    def test_single_sparse_layers_have_no_overlap(self):
        checkpoint = self.train_once("mod", **MOD)
        report = json.loads(self.routing("--json", checkpoint=checkpoint))
        self.assertIsNone(report["all"]["threshold"]["jaccard"])
        self.assertRegex(self.routing(checkpoint=checkpoint).decode(), r"\nmod K2 .* - ")

    def test_map_holds_the_text(self):
        self.routing("--map", "map.csv", "--map-tokens", 40)
        with open(self.folder / "map.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        text = "".join(row["text"] for row in rows).replace("\\n", "\n")
        self.assertEqual(text, some_text(40, 99).decode())
        self.assertEqual((rows[39]["sequence"], rows[39]["position"]), ("2", "7"))
        for row in rows:
            self.assertRegex(row["layers"], r"\AD[S.][S.]DD\Z")
        self.routing("--map", "map.csv", "--map-tokens", 1000000)
        self.assertEqual(len((self.folder / "map.csv").read_text().splitlines()), 1 + 18 * 16)

    def test_map_by_the_checkpoints_tokenizer(self):
        write_tokenizer(self.checkpoint / "tokenizer.bin", [b"<%d>" % i for i in range(256)])
        self.routing("--map", "map.csv", "--map-tokens", 1)
        first = some_text(1, 99)[0]
        self.assertIn(f"\n0,0,{first},<{first}>,D", (self.folder / "map.csv").read_text())

    def test_models_without_sparse_layers(self):
        for name, changes in ("dense", DENSE), ("xmod", {"active_layers": 2}):
            checkpoint = self.train_once(f"no-{name}", **changes)
            self.refused([str(checkpoint), f"a {name} model", "none of them sparse",
                          "mod, xmod, routed-ffn and selected-q"], checkpoint=checkpoint)

    def test_bad_input(self):
        self.refused("no such directory", checkpoint="nowhere")
        self.refused("no file matches", val_data="nothing*.bin")
        self.refused("--csv and --map are both", "--csv", "a", "--map", "a", status=2)
        self.refused("--map-tokens 0", "--map", "a", "--map-tokens", 0, status=2)
        self.refused("--eval-batches", "--eval-batches", -1, status=2)
        self.refused(["nowhere/a.csv", "No such file"], "--csv", "nowhere/a.csv")
        self.refused(["out", "not a regular file"], "--map", "out")

    def test_a_vocabulary_without_tokenizer_has_no_map(self):
        checkpoint = self.train_once("odd", vocab_size=300)
        self.refused(["tokenizer.bin: not found", "vocabulary of 300"], "--map", "map.csv", "--csv", "a.csv",
                     checkpoint=checkpoint)
        self.routing(checkpoint=checkpoint)  # the figures need none


class PlotTest(RoutingTest):
    def setUp(self):
        super().setUp()
        (self.folder / "xmod.json").write_bytes(self.routing("--json", "--map", "map.csv", "--map-tokens", 90))

    def run_script(self, *arguments):
        return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], cwd=self.folder, capture_output=True,
                              text=True)

    def plot(self, *arguments):
        """The picture."""
        run = self.run_script(*arguments, "--out", "picture.svg")
        self.assertEqual((run.returncode, run.stderr, run.stdout), (0, "", "wrote picture.svg\n"))
        return (self.folder / "picture.svg").read_text()

    def complaint(self, *arguments, out="picture.svg", status=1):
        run = self.run_script(*arguments, "--out", out)
        self.assertEqual((run.returncode, run.stdout), (status, ""), run.stderr)
        self.assertFalse((self.folder / "picture.svg").exists())
        if status == 1:
            self.assertRegex(run.stderr, r"\Aplot_\w+\.py: [^\n]+\n\Z")
        return run.stderr

    @NEEDS_MATPLOTLIB
    def test_reports(self):
        checkpoint = self.train_once("mod", **MOD)
        (self.folder / "mod.json").write_bytes(self.routing("--json", checkpoint=checkpoint))
        picture = self.plot("xmod.json", "mod.json", "xmod.json")
        for part in ("xmod A1K2", "mod K2", "K = 2, intervals of 2 layers", "K = 2, intervals of 1 layer",
                     "repeated subset", "independent subsets", "under threshold routing", "Jaccard"):
            self.assertIn(part, picture)
        picture = self.plot("xmod.json", "--labels", "our own", "--routing", "topk")
        for part in "our own", "under top-k routing":
            self.assertIn(part, picture)

    @NEEDS_MATPLOTLIB
    def test_map(self):
        picture = self.plot("--map", "map.csv", "--width", 40)
        for part in ("layer 0", "layer 4", "a sparse layer selects the token", ">↵<", ">c<"):
            self.assertIn(part, picture)
        (self.folder / "words.csv").write_text(
            'sequence,position,id,text,layers\n0,0,7,"a, ""b",DS.D\n0,1,8,\\xE2\\\\$猫,D..D\n', encoding="utf-8")
        picture = self.plot("--map", "words.csv")
        for part in ">·<", ">\\<", ">猫<", ">$<", ">b<":
            self.assertIn(part, picture)

    @NEEDS_MATPLOTLIB
    def test_the_folder_is_missing(self):
        self.assertIn("cannot write nowhere/a.svg", self.complaint("xmod.json", out="nowhere/a.svg"))

    def test_arguments(self):
        for parts, arguments in (("one of them", []), ("one of them", ["xmod.json", "--map", "map.csv"]),
                                 ("2 names for 1 reports", ["xmod.json", "--labels", "a", "b"]),
                                 ("--width 0", ["--map", "map.csv", "--width", 0])):
            self.assertIn(parts, self.complaint(*arguments, status=2))
        self.assertIn(".png, .svg or .pdf", self.complaint("xmod.json", out="a.txt", status=2))
        self.assertIn("usage", self.run_script("--help").stdout)

    def test_reports_that_are_none(self):
        report = json.loads((self.folder / "xmod.json").read_text())
        self.assertIn("cannot read nothing.json", self.complaint("nothing.json"))

        def changed(**values):
            return json.dumps({**report, **values}).encode()

        for content, part in ((b"", "not valid JSON"), (b"\xff", "not a text file"), (b"[" * 100000, "not valid JSON"),
                              (b"[]", "not a routing report"), (b"{}", "no 'token_sparsity'"),
                              (changed(layers=[]), "not a routing report"), (changed(layers=[{}]), "no 'layer'"),
                              (changed(token_sparsity="x"), "not a routing report"),
                              (changed(all={**report["all"], "layers": 9}), "not a routing report")):
            (self.folder / "bad.json").write_bytes(content)
            found = self.complaint("bad.json")
            self.assertIn("bad.json", found)
            self.assertIn(part, found)
            self.assertIn("train_xmod routing --json", found)

    def test_maps_that_are_none(self):
        first = "sequence,position,id,text,layers\n"
        for content, part in (("", "first line"), ("a,b\n", "first line"), (first, "no token"),
                              (first + "0,0,1,a\n", "line 2 has 4"),
                              (first + "0,0,1,a,DXD\n", "line 2: its layers are 'DXD'"),
                              (first + "0,0,1,a,DSD\n0,1,1,a,DS\n", "line 3: its layers are 'DS'"),
                              (first + '0,0,1,"a\n', "line 2")):
            (self.folder / "bad.csv").write_text(content)
            found = self.complaint("--map", "bad.csv")
            self.assertIn("bad.csv", found)
            self.assertIn(part, found)
        self.assertIn("cannot read .", self.complaint("--map", "."))


if __name__ == "__main__":
    unittest.main()
