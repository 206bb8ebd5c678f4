"""Runs `train_xmod eval --tasks` as a user does, on a small model and a few made-up items: formats of the output, the
independent scoring by the PyTorch reference (skipped without PyTorch), bad input of every kind. `make test` builds the
program first."""

import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BINARY = ROOT / "train_xmod"
sys.path.insert(0, str(ROOT / "scripts"))
from run_tests import python_with  # noqa: E402

# 14 thousand parameters in layers D SS D D, sequences of 32 tokens, 256 or 300 ids.
MODEL = ("--arch xmod --dim 16 --heads 2 --kv-heads 1 --head-dim 8 --ffn-dim 24 --active-layers 4 --dense-prefix 1 "
         "--token-sparsity 2 --seq-len 32 --steps 3 --batch-size 3 --lr 0.02 --threads 1").split()
BYTES = [bytes([byte]) for byte in range(256)]
WORDS = "the cat sat on a mat and saw that it was red".split()


def tokenizer_file(tokens):
    header = struct.pack("<256i", 20240328, 2, len(tokens), -1, *[0] * 252)
    return header + b"".join(bytes([len(token)]) + token for token in tokens)


class EvalTasks(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)
        cls.make_model("out", 256)
        cls.make_tasks()

    @classmethod
    def make_model(cls, out, vocab_size):
        """A model that was trained for 3 steps on shards of words, and its tokenizer."""
        data = cls.folder / f"data_{out}"
        data.mkdir()
        text = " ".join(random.Random(1).choices(WORDS, k=200)).encode()
        (data / "train.bin").write_bytes(struct.pack("<256i", 20240520, 1, len(text), *[0] * 253)
                                         + struct.pack(f"<{len(text)}H", *text))
        (data / "tokenizer.bin").write_bytes(tokenizer_file(BYTES + [b"t%d" % i for i in range(vocab_size - 256)]))
        cls.program("train", "--train-data", data / "train.bin", "--out", out, "--vocab-size", vocab_size, *MODEL)
        return cls.folder / out / "step_00000003"

    @classmethod
    def make_tasks(cls):
        """12 items a task: short ones, ones that fill the context, longer ones, choices longer than the context."""
        pick = random.Random(2)

        def text(most):
            return " ".join(pick.choices(WORDS, k=pick.randint(1, most)))

        choices = [{"query": text(8), "choices": [text(12 if i == 5 else 3) for _ in range(2 + i % 4)], "gold": i % 2}
                   for i in range(12)]
        passages = [{"context": text(8), "continuation": pick.choice(["a", "the", "it"])} for _ in range(12)]
        flags = []
        for name in ("hellaswag", "arc-easy", "arc-challenge", "piqa", "lambada", "boolq"):
            rows = passages if name == "lambada" else choices
            (cls.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            flags += [f"--{name}", f"{name}.jsonl"]
        subprocess.run([sys.executable, ROOT / "scripts" / "prepare_eval.py", "--tokenizer-dir", "data_out", "--out", "tasks",
                        *flags], cwd=cls.folder, check=True, capture_output=True)

    @classmethod
    def run_program(cls, *arguments):
        environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
        return subprocess.run(list(map(str, [BINARY, *arguments])), capture_output=True, text=True, cwd=cls.folder,
                              env=environment)

    @classmethod
    def program(cls, *arguments):
        result = cls.run_program(*arguments)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def eval(self, *arguments):
        return self.program("eval", "--checkpoint", "out/step_00000003", "--threads", 1, *arguments)

    def expect_error(self, parts, *arguments, status=1):
        result = self.run_program("eval", *arguments)
        self.assertEqual(result.returncode, status, result.stderr)
        self.assertEqual(len(result.stderr.splitlines()), 1, result.stderr)
        self.assertEqual(result.stdout, "")
        for part in parts:
            self.assertIn(part, result.stderr)

    def refused(self, parts, content, name="bad.bin", checkpoint="out/step_00000003"):
        (self.folder / name).write_bytes(content)
        self.expect_error([name, *parts], "--checkpoint", checkpoint, "--tasks", name)

    def all_tasks(self):
        return sorted(path.relative_to(self.folder) for path in (self.folder / "tasks").iterdir())

    # --- what it prints ---

    def test_the_table_has_the_columns_of_the_paper(self):
        lines = self.eval("--tasks", *self.all_tasks()).splitlines()
        self.assertEqual(lines[0].split(), "Hella. ARC-e ARC-c PIQA LAMB. BoolQ Avg.".split())
        self.assertEqual([line[:14].strip() for line in lines[1:]],
                         ["acc", "std. error", "acc_norm", "std. error", "perplexity", "std. error", "items",
                          "contexts cut"])
        self.assertEqual(lines[7].split()[1:], ["12"] * 6)

    def test_json_and_items_agree(self):
        found = json.loads(self.eval("--tasks", *self.all_tasks(), "--json", "--per-item", "items.jsonl"))
        self.assertEqual(list(found), ["checkpoint", "tasks"])
        items = [json.loads(line) for line in (self.folder / "items.jsonl").read_text().splitlines()]
        self.assertEqual(len(items), 6 * 12)
        for task in found["tasks"]:
            mine = [item for item in items if item["task"] == task["task"]]
            self.assertEqual([item["item"] for item in mine], list(range(12)))
            right = [item["greedy"] if task["task"] == "lambada" else item["choice"] == item["gold"] for item in mine]
            self.assertAlmostEqual(task["acc"], sum(right) / 12)
            self.assertEqual("acc_norm" in task, task["task"] not in ("lambada", "boolq"))
            self.assertGreater(task["contexts_cut"], 0)
            self.assertLess(task["contexts_cut"], 12)
            for item in mine:
                if "choice" in item:
                    self.assertEqual(item["loglikelihoods"][item["choice"]], max(item["loglikelihoods"]))

    def test_validation_loss_and_tasks_together(self):
        val = ["--val-data", "data_out/train.bin"]
        alone, tasks = self.eval(*val), self.eval("--tasks", "tasks/piqa.bin")
        self.assertEqual(self.eval(*val, "--tasks", "tasks/piqa.bin"), alone + tasks)
        both = json.loads(self.eval(*val, "--tasks", "tasks/piqa.bin", "--json"))
        self.assertEqual(list(both), ["checkpoint", "val_loss_topk", "val_loss_threshold", "targets", "tasks"])

    def test_the_first_items_whatever_the_batch_size(self):
        found = [json.loads(self.eval("--tasks", "tasks/lambada.bin", "--json", "--max-items", 5, "--batch-size", size))
                 for size in (1, 3, 2147483647)]
        for other in found:
            self.assertEqual(other["tasks"][0]["items"], 5)
            self.assertAlmostEqual(other["tasks"][0]["perplexity"] / found[0]["tasks"][0]["perplexity"], 1, places=5)

    def test_llmc_files_are_normalised_by_tokens(self):
        data = bytearray((self.folder / "tasks" / "hellaswag.bin").read_bytes())
        lengths = sum(2 + i % 4 for i in range(12))
        data[16:32] = bytes(16)
        (self.folder / "val.bin").write_bytes(data[:-2 * lengths])
        self.assertIn("acc_norm of val is normalised by tokens", self.eval("--tasks", "val.bin"))
        task = json.loads(self.eval("--tasks", "val.bin", "--json"))["tasks"][0]
        self.assertEqual((task["task"], task["normalised_by"]), ("val", "tokens"))

    def test_the_pytorch_reference_makes_the_same_choices(self):
        python = python_with("torch")
        if python is None:
            self.skipTest("PyTorch is not installed (scripts/install_deps.sh reference)")
        command = [python, ROOT / "scripts" / "check_tasks.py", "--binary", BINARY, "--checkpoint", "out/step_00000003",
                   "--tasks", *self.all_tasks()]
        result = subprocess.run(command, capture_output=True, text=True, cwd=self.folder)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        lines = result.stdout.splitlines()
        self.assertEqual(len(lines), 6)
        for line in lines:
            self.assertIn("12 items", line)
            self.assertIn("equal in 12", line)
            self.assertLess(float(line.split(" differ by ")[1].split()[0]), 1e-3)

    # --- bad input ---

    def test_bad_files(self):
        good = (self.folder / "tasks" / "piqa.bin").read_bytes()
        for parts, content in (
                (["truncated header: have 0 bytes"], b""),
                (["magic number 20240520", "prepare_eval.py"], struct.pack("<i", 20240520) + good[4:]),
                (["version 9"], good[:4] + struct.pack("<i", 9) + good[8:]),
                (["truncated"], good[:-1]),
                (["over-long"], good + b"\0\0"),
                (["item 0", "mark"], good[:1024] + b"\0\0" + good[1026:]),
                (["item 0", "id 300", "vocabulary size 256"], good[:1036] + struct.pack("<H", 300) + good[1038:])):
            self.refused(parts, content)
        self.expect_error(["nowhere", "No such file"], "--checkpoint", "out/step_00000003", "--tasks", "nowhere")

    def test_a_file_for_another_tokenizer(self):
        good = (self.folder / "tasks" / "piqa.bin").read_bytes()
        self.refused(["another tokenizer", "--tokenizer-dir CHECKPOINT"], good[:20] + b"\1" + good[21:])
        other = self.make_model("larger", 300)
        self.refused(["another tokenizer"], good, checkpoint=other)
        (other / "tokenizer.bin").unlink()
        self.expect_error(["tokenizer.bin: not found", "300"], "--checkpoint", other, "--tasks", "tasks/piqa.bin")

    def test_bad_flags(self):
        checkpoint = ["--checkpoint", "out/step_00000003"]
        for parts, flags in ((["eval needs --val-data GLOB or --tasks FILE..."], []),
                             (["--tasks needs a value"], ["--tasks"]),
                             (["unexpected argument tasks/piqa.bin"], ["--json", "tasks/piqa.bin"]),
                             (["--per-item needs --tasks"], ["--val-data", "v", "--per-item", "p"]),
                             (["--max-items -1"], ["--tasks", "tasks/piqa.bin", "--max-items", "-1"])):
            self.expect_error(parts, *checkpoint, *flags, status=2)

    def test_per_item_cannot_be_written(self):
        self.expect_error(["nowhere/items"], "--checkpoint", "out/step_00000003", "--tasks", "tasks/piqa.bin",
                          "--per-item", "nowhere/items")
        (self.folder / "kept").write_text("earlier")
        self.refused(["magic"], bytes(2000))
        self.expect_error(["bad.bin"], "--checkpoint", "out/step_00000003", "--tasks", "bad.bin", "--per-item", "kept")
        self.assertEqual((self.folder / "kept").read_text(), "earlier")


if __name__ == "__main__":
    unittest.main(verbosity=2)
