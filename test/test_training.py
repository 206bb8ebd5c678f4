"""Runs ./train_xmod as a user does, on models and shards of a few kilobytes: killed and resumed runs, repeats, bad
input of every kind, full disks, evaluation and generation. `make test` builds the program first."""

import array
import csv
import fcntl
import json
import math
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

BINARY = Path(__file__).resolve().parent.parent / "train_xmod"
NOBODY = 65534  # a user without rights

# 14 thousand parameters in layers D SS D D, sequences of 16 tokens.
MODEL = {"arch": "xmod", "vocab_size": 256, "dim": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "ffn_dim": 24,
         "active_layers": 4, "dense_prefix": 1, "token_sparsity": 2, "seq_len": 16}
MOD = {"arch": "mod", "dense_prefix": None}
DENSE = {"arch": "dense", "dense_prefix": None, "token_sparsity": None}
MOE = {**DENSE, "arch": "moe", "experts": 4, "experts_per_token": 2, "shared_experts": 1, "expert_dim": 8,
       "expert_bias_rate": 0.05}
DECO = {"arch": "deco", "token_sparsity": None, "experts": 4, "expert_dim": 8, "entropy_weight": 0.1,
        "entropy_growth": 1.1}
# The architectures beside the paper's own.
OTHERS = {"routed-ffn": {"arch": "routed-ffn"}, "selected-q": {"arch": "selected-q"}, "moe": MOE, "deco": DECO}


def flags(options):
    """{"batch_size": 3, "resume": True, "val_data": None} -> --batch-size 3 --resume"""
    words = []
    for name, value in options.items():
        if value is not None:
            words.append("--" + name.replace("_", "-"))
            if value is not True:
                words.append(str(value))
    return words


def write_shard(path, ids, width=2, magic=None, version=None, count=None):
    """A token shard in llm.c's layout."""
    header = [magic or {2: 20240520, 4: 20240801}[width], version or {2: 1, 4: 7}[width],
              len(ids) if count is None else count]
    body = array.array({2: "H", 4: "I"}[width], list(ids))
    Path(path).write_bytes(struct.pack("<256i", *header, *[0] * 253) + body.tobytes())


def write_tokenizer(path, tokens, eot=-1, pre_split=0):
    header = [20240328, 2, len(tokens), eot, pre_split]
    body = b"".join(bytes([len(token)]) + token for token in tokens)
    Path(path).write_bytes(struct.pack("<256i", *header, *[0] * 251) + body)


def some_text(size, seed):
    words = random.Random(seed).choices([b"the ", b"cat ", b"sat ", b"on ", b"a mat.\n", b"and "], k=size)
    return b"".join(words)[:size]


def read_metrics(out):
    with open(out / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def record(out):
    """Everything that a run leaves behind and that must not depend on how often it was interrupted: name -> bytes.
    One column of metrics.csv is a timing."""
    files = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    rows = [line.split(b",") for line in files["metrics.csv"].split(b"\n")]
    timing = rows[0].index(b"tokens_per_second")
    files["metrics.csv"] = b"\n".join(b",".join(row[:timing] + row[timing + 1:]) for row in rows)
    return files


class Safetensors:
    """A file's parts, to be put together wrongly."""

    def __init__(self, path):
        content = path.read_bytes()
        length = struct.unpack("<Q", content[:8])[0]
        self.header, self.data = json.loads(content[8:8 + length]), bytearray(content[8 + length:])

    def values(self, name):
        begin, end = self.header[name]["data_offsets"]
        return struct.unpack(f"<{(end - begin) // 4}f", self.data[begin:end])

    def set(self, name, values):
        begin, end = self.header[name]["data_offsets"]
        self.data[begin:end] = struct.pack(f"<{len(values)}f", *values)

    def pack(self):
        header = json.dumps(self.header).encode()
        return struct.pack("<Q", len(header)) + header + self.data


class TrainingTest(unittest.TestCase):
    """A folder with three small training shards, 39 sequences in all, and a validation shard."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        for i, size in enumerate([200, 117, 333]):
            write_shard(self.folder / f"train_{i}.bin", some_text(size, i))
        write_shard(self.folder / "val_0.bin", some_text(300, 99))

    def arguments(self, **changes):
        run = {**MODEL, "train_data": self.folder / "train_*.bin", "val_data": self.folder / "val_0.bin",
               "out": self.folder / "out", "batch_size": 3, "steps": 30, "eval_interval": 5, "checkpoint_interval": 3,
               "seed": 7, "threads": 1}
        return ["train", *flags({**run, **changes})]

    def start(self, *arguments, **options):
        # Waiting threads sleep: others may need the processor.
        environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
        return subprocess.Popen([BINARY, *map(str, arguments)], stdout=options.pop("stdout", subprocess.PIPE),
                                stderr=subprocess.PIPE, cwd=self.folder, env=environment, **options)

    def run_binary(self, *arguments, **options):
        """(exit status, stdout, stderr)"""
        process = self.start(*arguments, **options)
        out, err = process.communicate(timeout=300)
        return process.returncode, out, err.decode(errors="replace")

    def succeed(self, *arguments, **options):
        status, out, err = self.run_binary(*arguments, **options)
        self.assertEqual(status, 0, err)
        self.assertRegex(err, r"\A(note: prompt [^\n]+\n)?(\d+ tokens, \d+ a second; [^\n]+\n)?\Z")  # of generate
        return out

    def train(self, out="out", **changes):
        """The run's directory."""
        self.succeed(*self.arguments(out=self.folder / out, **changes))
        return self.folder / out

    def mount_small_disk(self):
        """The run's directory, on a file system of 1 MiB of its own."""
        out = self.folder / "out"
        out.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(out)]
        if os.geteuid() != 0 or subprocess.run(mount, stderr=subprocess.DEVNULL).returncode != 0:
            self.skipTest("only root may mount a small file system")
        self.addCleanup(subprocess.run, ["umount", str(out)])
        return out

    def fill_disk(self, out):
        """The file that does so: it leaves some 40 kB, less than a checkpoint."""
        filler = out / "filler"
        filler.write_bytes(bytes(os.statvfs(out).f_bavail * os.statvfs(out).f_bsize - 40000))
        return filler

    def expect_error(self, parts, *arguments, status=1, before="", **options):
        """One line on stderr that begins with "error: " and has all of `parts`, behind what matches `before`, and the
        exit status."""
        found, _, err = self.run_binary(*arguments, **options)
        self.assertRegex(err, rf"\A{before}error: [^\n]+\n\Z")
        for part in [parts] if isinstance(parts, str) else parts:
            self.assertIn(part, err)
        self.assertEqual(found, status, err)

    def assert_same_record(self, out, expected):
        found = record(out)
        self.assertEqual(sorted(found), sorted(expected))
        for name in expected:
            self.assertTrue(found[name] == expected[name], f"{name} differs")

    def checkpoints(self, out):
        return sorted(path.name for path in out.iterdir() if path.name != "metrics.csv")


class ResumeTest(TrainingTest):
    """N steps = n steps + kill + resume, byte for byte. 13 steps make an epoch; every shard and epoch border lies
    somewhere in a run."""

    def interrupt(self, out, moment, **changes):
        """Starts or goes on with a run and kills it when moment() returns; false if it came to its end before."""
        process = self.start(*self.arguments(out=out, resume=True, **changes))
        moment(process)
        process.kill()
        _, err = process.communicate()
        self.assertIn((process.returncode, err), [(0, b""), (-signal.SIGKILL, b"")])
        return process.returncode != 0

    def last_step(self, out):
        """Of the newest checkpoint."""
        return max((int(path.name[5:]) for path in out.glob("step_????????")), default=0)

    def wait_for_step(self, process, out, step):
        path = out / "metrics.csv"
        while process.poll() is None and not (path.exists() and path.read_bytes().count(b"\n") > step):
            pass

    def finish(self, out, **changes):
        return self.succeed(*self.arguments(out=out, resume=True, **changes)).decode()

    def test_killed_at_random_moments(self):
        chance = random.Random(1)
        for name, times, changes in [("xmod", 15, {}),
                                     ("mod", 15, {**MOD, "optimizer": "adamw", "keep_checkpoints": 1}),
                                     ("dense", 15, {**DENSE, "grad_accum": 2, "keep_checkpoints": 3}),
                                     ("moe", 6, {**MOE, "grad_accum": 2}),
                                     ("deco", 6, {**DECO, "grad_accum": 2}),
                                     ("routed-ffn", 3, OTHERS["routed-ffn"]),
                                     ("selected-q", 3, OTHERS["selected-q"])]:
            with self.subTest(name):
                changes = {**changes, "checkpoint_interval": 2}
                expected = record(self.train(name, **changes))
                killed = self.folder / (name + "_killed")

                def some_moment(process):
                    """Some steps after the start, between two of them, in one or in a checkpoint."""
                    self.wait_for_step(process, killed, self.last_step(killed) + chance.randrange(7))
                    time.sleep(chance.uniform(0, 0.02))

                kills = sum(self.interrupt(killed, some_moment, **changes) for _ in range(times))
                self.assertGreater(kills, 0)
                self.finish(killed, **changes)
                self.assert_same_record(killed, expected)

    def test_killed_while_a_checkpoint_is_written_or_removed(self):
        expected = record(self.train(checkpoint_interval=1, keep_checkpoints=1))
        killed = self.folder / "killed"

        def wait_for_temporary(process, which):
            """Until the which-th temporary directory is there."""
            seen = set()
            while len(seen) < which and process.poll() is None:
                if killed.exists():
                    seen.update(name for name in os.listdir(killed) if name[:5] == "step_" and name[-4:] == ".tmp")

        left_behind = 0
        for which in [1, 2, 3, 4, 5, 6] * 2:
            self.interrupt(killed, lambda process: wait_for_temporary(process, which),
                           checkpoint_interval=1, keep_checkpoints=1)
            left_behind += any(name.endswith(".tmp") for name in self.checkpoints(killed))
        self.assertGreater(left_behind, 0)
        self.finish(killed, checkpoint_interval=1, keep_checkpoints=1)
        self.assert_same_record(killed, expected)

    def test_killed_before_the_first_checkpoint(self):
        changes = {"steps": 400, "checkpoint_interval": 0, "eval_interval": 0}
        expected = record(self.train(**changes))
        killed = self.folder / "killed"

        self.assertTrue(self.interrupt(killed, lambda process: self.wait_for_step(process, killed, 3), **changes))
        self.assertEqual(self.checkpoints(killed), [])
        self.assertIn("no checkpoint in", self.finish(killed, **changes))
        self.assert_same_record(killed, expected)

    def test_every_checkpoint_leads_to_the_same_end(self):
        """What a kill may leave, made on purpose: rows beyond the checkpoint, a row cut off, temporary files, a
        checkpoint moved aside."""
        out = self.train(keep_checkpoints=100)
        expected = record(out)
        for step in [3, 12, 15, 27]:
            with self.subTest(step=step):
                resumed = self.folder / f"resumed_{step}"
                shutil.copytree(out, resumed)
                for directory in resumed.glob("step_*"):
                    if int(directory.name[5:]) > step:
                        shutil.rmtree(directory)
                newest = resumed / f"step_{step:08}"
                shutil.copytree(newest, resumed / "step_00000031.tmp")
                (resumed / "step_00000031.tmp" / "model.safetensors").write_bytes(b"half")
                if step == 15:
                    newest.rename(str(newest) + ".replaced")
                (resumed / "metrics.csv.tmp").write_text("half")
                with open(resumed / "metrics.csv", "a") as file:
                    file.write("31,1488,8456601")
                self.assertIn(f"resuming from {newest}", self.finish(resumed, keep_checkpoints=100))
                self.assert_same_record(resumed, expected)

    def test_a_finished_run_stays_as_it_is(self):
        out = self.train(keep_checkpoints=4)
        expected = record(out)
        self.assertEqual(self.checkpoints(out), [f"step_{step:08}" for step in (21, 24, 27, 30)])
        self.assertIn("already at step 30 of 30", self.finish(out, keep_checkpoints=4))
        self.assert_same_record(out, expected)
        self.assertIn("already at step 30 of 20", self.finish(out, keep_checkpoints=4, steps=20))
        self.assert_same_record(out, expected)

    def test_a_run_killed_before_it_removed_old_checkpoints(self):
        out = self.train(keep_checkpoints=4)
        self.finish(out, keep_checkpoints=2)
        self.assertEqual(self.checkpoints(out), ["step_00000027", "step_00000030"])

    def test_a_directory_with_checkpoints_is_not_trained_into(self):
        out = self.train(steps=3)
        expected = record(out)
        self.expect_error(["--out", "step_00000003", "--resume", "another --out"], *self.arguments(out=out))
        self.assert_same_record(out, expected)

    def test_another_number_of_threads_goes_on_alike(self):
        out = self.train(threads=1, keep_checkpoints=100)
        expected = record(out)
        for threads in 2, 3:
            for step in range(24, 31, 3):
                shutil.rmtree(out / f"step_{step:08}")
            self.finish(out, threads=threads, keep_checkpoints=100)
            self.assert_same_record(out, expected)

    def test_computing_activations_again_goes_on_alike(self):
        for name, changes in {"xmod": {}, **OTHERS}.items():
            with self.subTest(name):
                out = self.train(name, **changes, keep_checkpoints=100)
                expected = record(out)
                for recompute in "ffn", "block":
                    for step in range(24, 31, 3):
                        shutil.rmtree(out / f"step_{step:08}")
                    self.finish(out, **changes, recompute=recompute, keep_checkpoints=100)
                    self.assert_same_record(out, expected)

    def test_two_runs_at_a_time(self):
        out = self.train(steps=3)
        expected = record(out)
        directory = os.open(out, os.O_RDONLY)
        fcntl.flock(directory, fcntl.LOCK_EX)  # as a run holds it
        self.expect_error(["another run", str(out)], *self.arguments(out=out, resume=True))
        self.assert_same_record(out, expected)
        os.close(directory)
        self.finish(out, steps=3)


class RepeatTest(TrainingTest):
    WIDE = {"dim": 72, "head_dim": 18, "heads": 4, "kv_heads": 2, "ffn_dim": 200, "seq_len": 50, "batch_size": 5,
            "steps": 4}

    def test_the_same_seed_gives_the_same_bytes(self):
        expected = record(self.train("first"))
        self.assert_same_record(self.train("again"), expected)
        other = record(self.train("other", seed=8))
        self.assertNotEqual(other["step_00000030/model.safetensors"], expected["step_00000030/model.safetensors"])

    def test_any_number_of_threads_gives_the_same_bytes(self):
        for changes in {}, MOD, {**DENSE, "optimizer": "adamw"}, *OTHERS.values():
            arch = changes.get("arch", "xmod")
            with self.subTest(arch):
                run = {**self.WIDE, **changes}
                expected = record(self.train(f"{arch}_1", threads=1, **run))
                for threads in 2, 3:
                    self.assert_same_record(self.train(f"{arch}_{threads}", threads=threads, **run), expected)

    def test_validation_does_not_disturb_training(self):
        often = record(self.train("often", eval_interval=1))
        never = record(self.train("never", val_data=None))
        for name in "model.safetensors", "optimizer.safetensors", "trainer.json":
            self.assertEqual(often["step_00000030/" + name], never["step_00000030/" + name])


class RunTest(TrainingTest):
    def flops_per_token(self):
        return json.loads(self.succeed("plan", *flags(MODEL), "--json"))["flops_per_token"]

    def test_metrics_and_validation(self):
        rows = read_metrics(self.train(grad_accum=2))
        self.assertEqual([int(row["step"]) for row in rows], list(range(1, 31)))
        flops = self.flops_per_token()
        for row in rows:
            tokens = int(row["step"]) * 3 * 2 * 16
            self.assertEqual(int(row["tokens"]), tokens)
            self.assertAlmostEqual(float(row["flops"]) / (3 * flops * tokens), 1, delta=1e-8)
            self.assertEqual(row["val_loss_topk"] != "", int(row["step"]) % 5 == 0)
            self.assertEqual(row["val_loss_threshold"] != "", int(row["step"]) % 5 == 0)
            self.assertGreater(float(row["tokens_per_second"]), 0)
        self.assertAlmostEqual(float(rows[0]["train_loss"]), math.log(256), delta=0.1)
        self.assertLess(float(rows[-1]["train_loss"]), float(rows[0]["train_loss"]) - 0.5)
        self.assertLess(float(rows[-1]["val_loss_topk"]), float(rows[4]["val_loss_topk"]) - 0.3)
        self.assertNotEqual(rows[-1]["val_loss_topk"], rows[-1]["val_loss_threshold"])

    def test_accumulated_batches_equal_a_large_one(self):
        """In everything: losses, the gradient's norm, weights, thresholds."""
        run = {"steps": 4, "eval_interval": 2}
        large = self.train("large", batch_size=6, **run)
        small = self.train("small", batch_size=2, grad_accum=3, **run)
        for expected, found in zip(read_metrics(large), read_metrics(small)):
            for column in set(expected) - {"tokens_per_second"}:
                if expected[column]:
                    self.assertAlmostEqual(float(found[column]) / float(expected[column]), 1, delta=1e-4, msg=column)
        expected, found = (Safetensors(out / "step_00000004" / "model.safetensors") for out in (large, small))
        for name in expected.header.keys() - {"__metadata__"}:
            for a, b in zip(found.values(name), expected.values(name)):
                self.assertAlmostEqual(a, b, delta=1e-4, msg=name)

    def test_a_dense_model_has_one_validation_loss(self):
        last = read_metrics(self.train(**DENSE, steps=3))[-1]
        self.assertEqual(last["val_loss_topk"], last["val_loss_threshold"])

    def test_without_validation_data_its_cells_are_empty(self):
        rows = read_metrics(self.train(val_data=None, steps=5))
        self.assertEqual({row["val_loss_topk"] + row["val_loss_threshold"] for row in rows}, {""})

    def test_compute_pays_for_the_steps(self):
        step = 3 * self.flops_per_token() * 3 * 16
        for compute, steps in (4 * step, 4), (4.4 * step, 4), (4.6 * step, 5), (0.01 * step, 1):
            out = self.train(f"out_{compute}", steps=None, compute=f"{compute:.6e}", checkpoint_interval=0)
            self.assertEqual(len(read_metrics(out)), steps)
            self.assertEqual(self.checkpoints(out), [f"step_{steps:08}"])

    def test_compute_is_spent_to_the_end_by_resumed_steps_of_another_size(self):
        step = 3 * self.flops_per_token() * 3 * 16  # of batch size 3
        run = {"steps": None, "compute": f"{12 * step:.6e}", "checkpoint_interval": 0}
        out = self.train(**{**run, "compute": f"{4 * step:.6e}"})
        self.succeed(*self.arguments(**run, resume=True, batch_size=6))
        self.assertEqual([int(row["tokens"]) for row in read_metrics(out)][3:], [192, 288, 384, 480, 576])

    def test_the_learning_rate_shown_is_the_one_used(self):
        out = self.train(optimizer="adamw", lr=5, adamw_lr=1e-3, lr_schedule="constant", warmup_steps=0, steps=2)
        self.assertEqual({float(row["lr"]) for row in read_metrics(out)}, {1e-3})

    def test_a_tokenizer_that_does_not_fit_is_refused_before_the_first_step(self):
        out = self.folder / "out"
        write_tokenizer(self.folder / "tokenizer.bin", [bytes([byte]) for byte in range(256)] + [b"th"])
        self.expect_error(["tokenizer.bin", "257 tokens", "vocabulary of 256"], *self.arguments())
        (self.folder / "tokenizer.bin").write_bytes(b"garbage")
        self.expect_error(["tokenizer.bin", "truncated header"], *self.arguments())
        self.assertFalse((out / "metrics.csv").exists())

    def test_learning_rate_schedules(self):
        """Warm-up over 4 steps, then down to a fifth; wsd falls over the last fifth of what follows the warm-up."""
        def expected(schedule, step):
            if step <= 4:
                return step / 5
            progress = (step - 5) / 25
            return 1 - 0.8 * {"constant": 0, "linear": progress, "cosine": (1 - math.cos(math.pi * progress)) / 2,
                              "wsd": max(0, progress - 0.8) / 0.2}[schedule]

        for schedule in "constant", "linear", "cosine", "wsd":
            out = self.train(schedule, lr_schedule=schedule, warmup_steps=4, final_lr_fraction=0.2, lr=0.01,
                             val_data=None, checkpoint_interval=0)
            for row in read_metrics(out):
                self.assertAlmostEqual(float(row["lr"]), 0.01 * expected(schedule, int(row["step"])), delta=1e-10)

    def test_what_is_printed(self):
        printed = self.succeed(*self.arguments()).decode()
        for part in ("xmod A1K2: 5 layers (3 dense, 2 sparse)", "650 tokens in 3 shards, 39 of 39 sequences used",
                     "23 tokens at shard ends fill none", "300 tokens in 1 shard", "memory", "total",
                     "30 steps of 48 tokens"):
            self.assertIn(part, printed)
        lines = [line for line in printed.splitlines() if line.startswith("step ")]
        self.assertRegex(lines[-1], r"^step 30/30 \| loss \d\.\d{4} \| val \d\.\d{4} top-k, \d\.\d{4} threshold \| "
                                    r"lr \S+ \| norm \S+ \| \S+k tok/s \| \S+ GFLOP/s \| \d+s left$")

    def test_real_gpt2_shards(self):
        """llm.c's layout as it is, both widths, up to the last of 50257 ids."""
        chance = random.Random(5)
        ids = [50256, 0, *(chance.randrange(50257) for _ in range(400)), 50256]
        for width in 2, 4:
            write_shard(self.folder / f"gpt2_{width}.bin", ids, width)
            out = self.train(f"out_{width}", train_data=self.folder / f"gpt2_{width}.bin", val_data=None,
                             vocab_size=50257, steps=2)
            self.assertAlmostEqual(float(read_metrics(out)[0]["train_loss"]), math.log(50257), delta=0.1)
        self.assert_same_record(out, record(self.folder / "out_2"))  # the width makes no difference
        self.expect_error(["token 0 has id 50256", "--vocab-size"],
                          *self.arguments(train_data=self.folder / "gpt2_2.bin", vocab_size=50256, out="none"))


class MemoryTest(TrainingTest):
    """The memory that plan promises against the peak that a run, validation and checkpoint included, really takes."""

    # A process of its own starts the run: a child's peak is never below that of the one which started it.
    PEAK = """if True:
        import resource, subprocess, sys
        subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True)
        print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"""

    def peak_bytes(self, *arguments):
        run = subprocess.run([sys.executable, "-S", "-c", self.PEAK, BINARY, *map(str, arguments)], cwd=self.folder,
                             capture_output=True, text=True, env={**os.environ, "OMP_WAIT_POLICY": "passive"})
        self.assertEqual(run.stderr, "")
        return 1024 * int(run.stdout)

    @unittest.skipUnless(sys.platform == "linux", "ru_maxrss is in kilobytes on Linux only")
    def test_plan_knows_the_peak(self):
        shape = {"dim": 192, "heads": 4, "kv_heads": 2, "head_dim": 48, "ffn_dim": 768, "vocab_size": 2048,
                 "seq_len": 512, "active_layers": 5, "batch_size": 3, "threads": 2}
        wide = {"dim": 64, "head_dim": 16, "ffn_dim": 8192, "seq_len": 64, "active_layers": 2, "batch_size": 1}
        long = {"dim": 32, "kv_heads": 4, "ffn_dim": 32, "vocab_size": 256, "seq_len": 2048, "active_layers": 2,
                "batch_size": 1, "threads": 3}
        write_shard(self.folder / "long.bin", [i * i % 256 for i in range(10000)])
        totals = {}
        for name, changes in {"dense": DENSE,
                              "dense, ffn": {**DENSE, "recompute": "ffn"},
                              "dense, block": {**DENSE, "recompute": "block"},
                              "xmod": {"token_sparsity": 4},
                              "xmod, block": {"token_sparsity": 4, "recompute": "block"},
                              "moe, block": {**MOE, "expert_bias_rate": None, "expert_dim": 192, "recompute": "block"},
                              "much for Muon": {**DENSE, **wide},
                              "no Muon": {**DENSE, **wide, "optimizer": "adamw", "threads": 1},
                              "much for attention": {**DENSE, **long}}.items():
            with self.subTest(name):
                options = {**MODEL, **shape, **changes}
                memory = json.loads(self.succeed("plan", *flags(options), "--json"))["memory"]
                totals[name] = memory["total"]
                peak = self.peak_bytes(*self.arguments(**options, train_data=self.folder / "long.bin",
                                                       val_data=self.folder / "long.bin", steps=1,
                                                       out=self.folder / name))
                self.assertAlmostEqual(memory["total"] / peak, 1, delta=0.05)
        self.assertLess(totals["dense, block"], 0.8 * totals["dense, ffn"])
        self.assertLess(totals["dense, ffn"], 0.8 * totals["dense"])


class OtherArchitecturesTest(TrainingTest):
    """routed-ffn, selected-q, moe and deco by the commands of every architecture."""
    LOADS = ["expert_load_max", "expert_load_entropy", "expert_active_ratio"]

    def test_train_eval_and_generate(self):
        for arch, changes in OTHERS.items():
            with self.subTest(arch):
                rows = read_metrics(self.train(arch, **changes))
                self.assertEqual([int(row["step"]) for row in rows], list(range(1, 31)))
                self.assertLess(float(rows[-1]["train_loss"]), float(rows[0]["train_loss"]) - 0.5)
                checkpoint = self.folder / arch / "step_00000030"
                losses = json.loads(self.succeed("eval", "--checkpoint", checkpoint, "--val-data",
                                                 self.folder / "val_0.bin", "--batch-size", 3, "--json"))
                for name in "val_loss_topk", "val_loss_threshold":
                    self.assertEqual(f"{losses[name]:.9g}", rows[-1][name])
                routed = arch in ("routed-ffn", "selected-q")
                self.assertEqual(losses["val_loss_topk"] != losses["val_loss_threshold"], routed)

                generate = ["generate", "--checkpoint", checkpoint, "--prompt", "the", "--seed", 1]
                text = self.succeed(*generate, "--max-new-tokens", 30)
                self.assertEqual((text[:3], len(text)), (b"the", 3 + 30 + 1))
                self.assertEqual(self.succeed(*generate, "--max-new-tokens", 11)[:-1], text[:3 + 11])

    def test_plan_tells_what_train_costs(self):
        for arch, changes in OTHERS.items():
            with self.subTest(arch):
                plan = json.loads(self.succeed("plan", *flags({**MODEL, **changes}), "--json"))
                self.assertEqual(plan["arch"], arch)
                self.assertEqual(plan["pattern"], "DSSDD" if "DS" in plan["pattern"] else "DDDD")
                row = read_metrics(self.train(arch, **changes, steps=1))[0]
                self.assertAlmostEqual(float(row["flops"]) / (3 * plan["flops_per_token"] * 48), 1, delta=1e-8)
                weights = Safetensors(self.folder / arch / "step_00000001" / "model.safetensors").header
                buffers = "router.threshold", "e_score_correction_bias", "entropy_weight", "__metadata__"
                self.assertEqual(plan["params_total"], sum(math.prod(entry["shape"]) for name, entry in weights.items()
                                                           if not name.endswith(buffers)))

    def test_load_columns(self):
        """Of models with experts, and of those only."""
        for arch, changes in OTHERS.items():
            rows = read_metrics(self.train(arch, **changes, grad_accum=2))
            with self.subTest(arch):
                self.assertEqual(list(rows[0])[9:], self.LOADS if "experts" in changes else [])
            for row in rows if "experts" in changes else []:
                largest, entropy, ratio = (float(row[name]) for name in self.LOADS)
                self.assertTrue(1 <= largest <= 4 and 0 <= entropy <= 1, row)
                if arch == "moe":
                    self.assertEqual(ratio, 0.5)
                else:
                    self.assertTrue(0 < ratio < 1, row)

    def test_what_training_moves_without_a_gradient(self):
        """The expert biases by the rate a step, at most; the entropy weight by the growth a step, as the ratio goes."""
        weights = Safetensors(self.train("moe", **MOE) / "step_00000030" / "model.safetensors")
        biases = [value for name in weights.header if name.endswith("e_score_correction_bias")
                  for value in weights.values(name)]
        self.assertEqual(len(biases), 4 * 4)
        self.assertGreater(max(map(abs, biases)), 0.05)
        for bias in biases:
            self.assertLessEqual(abs(bias), 30 * 0.05 * 1.0001)
            self.assertAlmostEqual(bias / 0.05, round(bias / 0.05), delta=1e-4)

        out = self.train("deco", **DECO, keep_checkpoints=100, checkpoint_interval=1)
        expected = 0.1
        for row in read_metrics(out):
            grows = float(row["expert_active_ratio"]) > 0.2
            expected = expected * 1.1 if grows else max(expected / 1.1, 0.1)
            weights = Safetensors(out / f"step_{int(row['step']):08}" / "model.safetensors")
            for name in [name for name in weights.header if name.endswith("entropy_weight")]:
                self.assertAlmostEqual(weights.values(name)[0] / expected, 1, delta=1e-5)
        self.assertGreater(expected, 0.1)

    def test_balancing_evens_the_load(self):
        """Two in eight experts for a token, so 4 is the most that the largest load can be."""
        words = [bytes(random.Random(i).choices(range(97, 123), k=2 + i % 7)) for i in range(400)]
        text = b" ".join(random.Random(1).choices(words, weights=[1 / (i + 1) for i in range(400)], k=10000))
        write_shard(self.folder / "words.bin", text)
        run = {**MOE, "experts": 8, "shared_experts": None, "active_layers": 2, "dim": 32, "seq_len": 32,
               "batch_size": 8, "steps": 200, "lr_schedule": "constant", "train_data": self.folder / "words.bin",
               "val_data": None, "checkpoint_interval": 0}

        def largest_load(rate):
            """Over the last steps."""
            rows = read_metrics(self.train(f"rate_{rate}", **{**run, "expert_bias_rate": rate}))[-20:]
            return sum(float(row["expert_load_max"]) for row in rows) / 20
        self.assertLess(largest_load(0.01), 2)
        self.assertGreater(largest_load(0), 3)


class CheckpointCommandsTest(TrainingTest):
    """eval and generate."""

    def setUp(self):
        super().setUp()
        self.out = self.train()
        self.checkpoint = self.out / "step_00000030"

    def evaluate(self, *arguments, val_data="val_0.bin"):
        return self.succeed("eval", "--checkpoint", self.checkpoint, "--val-data", val_data, "--threads", 1, *arguments)

    def generate(self, prompt=None, count=20, **options):
        options = {"checkpoint": self.checkpoint, "max_new_tokens": count, "threads": 1, "prompt": prompt, **options}
        return self.succeed("generate", *flags(options))

    def test_eval_gives_the_losses_of_the_training(self):
        last = read_metrics(self.out)[-1]
        losses = json.loads(self.evaluate("--json", "--batch-size", 3))
        self.assertEqual(losses["targets"], 18 * 16)
        self.assertEqual(losses["checkpoint"], str(self.checkpoint))
        for name in "val_loss_topk", "val_loss_threshold":
            self.assertEqual(f"{losses[name]:.9g}", last[name])
        text = self.evaluate("--batch-size", 3).decode()
        self.assertEqual(text, f"validation loss {losses['val_loss_topk']:.4f} top-k, "
                               f"{losses['val_loss_threshold']:.4f} threshold (mean over 288 targets)\n")

    def test_eval_does_not_depend_on_the_batch_size(self):
        losses = [json.loads(self.evaluate("--json", "--batch-size", size)) for size in (1, 5, 18, 2147483647)]
        for found in losses:
            self.assertEqual(found["targets"], 288)
            for name in "val_loss_topk", "val_loss_threshold":
                self.assertAlmostEqual(found[name], losses[0][name], delta=1e-6)

    def test_eval_batches_counts_from_the_beginning(self):
        few = json.loads(self.evaluate("--json", "--batch-size", 2, "--eval-batches", 2))
        self.assertEqual(few["targets"], 4 * 16)
        write_shard(self.folder / "few.bin", some_text(300, 99)[:4 * 16 + 1])
        again = json.loads(self.evaluate("--json", "--batch-size", 2, val_data="few.bin"))
        self.assertEqual(again["val_loss_topk"], few["val_loss_topk"])

    def test_eval_json_of_any_path(self):
        odd = os.fsdecode(b"odd \xff \"name\"")
        shutil.copytree(self.checkpoint, self.folder / odd)
        self.checkpoint = odd
        self.assertAlmostEqual(json.loads(self.evaluate("--json"))["val_loss_topk"], 4.4, delta=0.5)

    def test_text_begins_with_the_prompt_and_has_so_many_bytes(self):
        for prompt in "the cat", "Grüße, мир, 猫 🐈", os.fsdecode(b"not UTF-8: \xff\xc3("), "a\nb", "<|endoftext|>":
            text = self.generate(prompt)
            self.assertEqual(text[:-21], os.fsencode(prompt))
            self.assertTrue(text.endswith(b"\n"))

    def test_text_repeats_by_its_seed(self):
        texts = {seed: self.generate("the", seed=seed) for seed in (1, 2, 3)}
        self.assertEqual(len(set(texts.values())), 3)
        for seed, text in texts.items():
            self.assertEqual(self.generate("the", seed=seed), text)
        self.assertEqual(self.generate("the", seed=1, threads=2), texts[1])
        self.assertEqual(self.generate("the", count=11, seed=1)[:-1], texts[1][:3 + 11])

    def test_greedy_text_needs_no_seed(self):
        greedy = self.generate("the", temperature=0)
        for options in {"temperature": 0}, {"top_k": 1}, {"top_p": 1e-9}:
            self.assertEqual(self.generate("the", seed=5, **options), greedy)
        self.assertNotEqual(self.generate("the", seed=5), greedy)

    def test_without_a_prompt_a_line_begins(self):
        self.assertEqual(self.generate("", seed=3), self.generate(None, seed=3))
        self.assertEqual(self.generate("\n", seed=3), b"\n" + self.generate("", seed=3))
        self.assertEqual(len(self.generate()), 21)

    def test_a_prompt_beyond_the_context_and_text_beyond_it(self):
        prompt = some_text(1000, 4).decode()
        status, text, err = self.run_binary("generate", "--checkpoint", self.checkpoint, "--prompt", prompt,
                                            "--max-new-tokens", 40, "--threads", 1)
        self.assertEqual(status, 0, err)
        self.assertRegex(err, r"\Anote: prompt 1 has 1000 tokens, the context 16; the model sees its last 16\n")
        self.assertEqual(text[:-41], prompt.encode())
        self.assertEqual(text[-41:], self.generate(prompt[-16:], count=40)[-41:])

    def test_the_tokenizer_travels_and_is_used(self):
        tokens = [bytes([byte]) for byte in range(256)] + [b"", b"th", b"the", b" cat"]
        write_tokenizer(self.folder / "tokenizer.bin", tokens, eot=256)
        ids = [256, 258, 259, 10] * 30
        write_shard(self.folder / "bpe.bin", ids)
        run = {"train_data": self.folder / "bpe.bin", "val_data": None, "vocab_size": 300, "steps": 60, "lr": 0.02}
        self.checkpoint = self.train("bpe", **run) / "step_00000060"
        tokenizer = self.checkpoint / "tokenizer.bin"
        self.assertEqual(tokenizer.read_bytes(), (self.folder / "tokenizer.bin").read_bytes())
        # The prompt is one token, " cat" another; the end-of-text token ends the text unseen.
        self.assertEqual(self.generate("the", count=1, temperature=0), b"the cat\n")
        self.assertEqual(self.generate("the", count=10, temperature=0), b"the cat\n\n")
        self.assertEqual(self.generate("", count=2, temperature=0), b"the cat\n")  # goes on from the end of text

        generate = ["generate", "--checkpoint", self.checkpoint]
        write_tokenizer(tokenizer, tokens + [b"x%d" % i for i in range(41)])
        self.expect_error(["tokenizer.bin", "301 tokens", "vocabulary of 300"], *generate)
        tokenizer.write_bytes(tokenizer.read_bytes()[:-1])
        self.expect_error(["tokenizer.bin", "truncated"], *generate)
        tokenizer.unlink()
        self.expect_error(["tokenizer.bin", "not found", "vocabulary of 300"], *generate)
        self.succeed("eval", "--checkpoint", self.checkpoint, "--val-data", self.folder / "bpe.bin")  # needs none

    def test_the_tokenizer_lies_beside_the_first_shard(self):
        for name in "a", "b":
            (self.folder / name).mkdir()
            shutil.copy(self.folder / "train_0.bin", self.folder / name)
        write_tokenizer(self.folder / "a" / "tokenizer.bin", [bytes([byte]) for byte in range(256)])
        out = self.train("any", train_data=self.folder / "[ab]" / "train_*.bin", steps=1)
        self.assertTrue((out / "step_00000001" / "tokenizer.bin").exists())


class RefusedDataTest(TrainingTest):
    """Nothing is written when the data is refused: not even the directory."""

    def refused(self, parts, name, **changes):
        path = self.folder / name
        for flag in "train_data", "val_data":
            with self.subTest(name, flag=flag):
                self.expect_error(parts, *self.arguments(**{flag: path}, **changes))
                self.assertFalse((self.folder / "out").exists())

    def test_no_such_file(self):
        self.refused(["no file matches", "nothing_*.bin"], "nothing_*.bin")
        self.refused(["no file matches", "no folder/x.bin"], "no folder/x.bin")
        self.expect_error("--val-data", *self.arguments(val_data="nothing"))
        self.expect_error("two?lines", *self.arguments(train_data="two\nlines"))

    def test_files_that_are_no_shards(self):
        text = some_text(200, 1)
        good = (self.folder / "train_0.bin").read_bytes()
        for name, content, parts in [
                ("empty.bin", b"", "empty file"),
                ("header.bin", good[:500], ["truncated header", "500 bytes", "1024"]),
                ("short.bin", good[:-1], ["truncated", "1423 bytes", "1424"]),
                ("long.bin", good + b"x", ["over-long", "1425 bytes", "1424"]),
                ("text.bin", text * 10, ["magic number", "20240520"])]:
            (self.folder / name).write_bytes(content)
            self.refused([name, *([parts] if isinstance(parts, str) else parts)], name)
        (self.folder / "folder.bin").mkdir()
        self.refused(["folder.bin", "a directory"], "folder.bin")

    def test_shards_that_do_not_fit(self):
        text = list(some_text(200, 1))
        for name, options, parts in [
                ("magic.bin", {"magic": 20240521}, ["20240521", "20240520"]),
                ("version.bin", {"version": 2}, ["version 2", "expected 1"]),
                ("wide_version.bin", {"version": 1, "width": 4}, ["version 1", "expected 7"]),
                ("count.bin", {"count": 201}, ["truncated", "1426"]),
                ("negative.bin", {"count": -1}, ["-1 tokens"])]:
            write_shard(self.folder / name, text, **options)
            self.refused([name, *parts], name)
        write_shard(self.folder / "id.bin", text[:57] + [256] + text[58:])
        self.refused(["id.bin", "token 57", "id 256", "--vocab-size"], "id.bin")
        write_shard(self.folder / "wide_id.bin", text[:99] + [4000000000], width=4)
        self.refused(["wide_id.bin", "token 99", "id 4000000000"], "wide_id.bin")
        write_shard(self.folder / "sequence.bin", text[:16])
        self.refused(["sequence.bin", "16 tokens", "at least 17", "--seq-len"], "sequence.bin")
        write_shard(self.folder / "sequence.bin", text[:17])  # just enough
        self.train("enough", train_data=self.folder / "sequence.bin", val_data=self.folder / "sequence.bin", steps=1)

    def test_one_bad_shard_among_good_ones(self):
        (self.folder / "train_9.bin").write_bytes((self.folder / "train_0.bin").read_bytes()[:-2])
        self.refused(["train_9.bin", "truncated"], "train_*.bin")

    def test_eval_refuses_the_same(self):
        checkpoint = self.train(steps=1) / "step_00000001"
        write_shard(self.folder / "id.bin", [300] * 40)
        write_shard(self.folder / "small.bin", [1] * 16)
        for name, part in ("nothing.bin", "no file matches"), ("id.bin", "id 300"), ("small.bin", "16 tokens"):
            self.expect_error([name, part], "eval", "--checkpoint", checkpoint, "--val-data", self.folder / name)


class RefusedCommandLineTest(TrainingTest):
    def test_models_and_flags(self):
        for parts, changes in [
                (["--heads 3", "--kv-heads 2"], {"heads": 3, "kv_heads": 2}),
                (["--head-dim 7", "odd"], {"head_dim": 7}),
                (["--token-sparsity 17", "--seq-len 16"], {"token_sparsity": 17}),
                (["--dense-prefix 4"], {"dense_prefix": 4}),
                (["--batch-size 0", "whole number"], {"batch_size": 0}),
                (["--batch-size 3.5", "whole number"], {"batch_size": 3.5}),
                (["--batch-size x3", "whole number"], {"batch_size": "x3"}),
                (["--batch-size 2147483647", "--seq-len 16"], {"batch_size": 2147483647}),
                (["--lr nan", "number above 0"], {"lr": "nan"}),
                (["--lr 1e999", "number above 0"], {"lr": "1e999"}),
                (["--eval-batches 9223372036854775807"], {"eval_batches": 2**63 - 1}),
                (["--warmup-steps 9223372036854775807"], {"warmup_steps": 2**63 - 1}),
                (["--arch xmodd", "did you mean xmod"], {"arch": "xmodd"}),
                (["--optimizer moun", "did you mean muon"], {"optimizer": "moun"}),
                (["--instructions avx2", "no bf16 products", "portable"], {"precision": "bf16", "instructions": "avx2"}),
                (["--instructions sse", "no fp32 products", "avx2"], {"instructions": "sse"}),
                (["unknown option --stpes", "did you mean --steps"], {"stpes": 5}),
                (["--temperature", "generate"], {"temperature": 1}),
                (["--steps", "--compute", "exclude"], {"compute": 1e9}),
                (["--steps N or --compute"], {"steps": None}),
                (["--train-data"], {"train_data": None}),
                (["--out is empty"], {"out": ""})]:
            with self.subTest(changes):
                self.expect_error(parts, *self.arguments(**changes), status=2)
                self.assertFalse((self.folder / "out").exists())
        self.expect_error(["unknown command tarin", "did you mean train"], "tarin", status=2)
        self.expect_error("--checkpoint", "generate", status=2)
        self.expect_error("--val-data", "eval", "--checkpoint", "x", status=2)

    def test_experts(self):
        for parts, changes in [
                (["--experts-per-token 5", "--experts 4"], {**MOE, "experts_per_token": 5}),
                (["--arch moe needs --experts E"], {**MOE, "experts": None}),
                (["--arch moe needs --experts-per-token"], {**MOE, "experts_per_token": None}),
                (["--arch moe needs --expert-dim"], {**MOE, "expert_dim": None}),
                (["--arch deco needs --expert-dim"], {**DECO, "expert_dim": None}),
                (["--experts 0", "at least 1"], {**MOE, "experts": 0}),
                (["--expert-dim -8"], {**MOE, "expert_dim": -8}),
                (["--expert-bias-rate nan"], {**MOE, "expert_bias_rate": "nan"}),
                (["--active-ratio 0"], {**DECO, "active_ratio": 0}),
                (["--entropy-growth 0.5"], {**DECO, "entropy_growth": 0.5}),
                (["--dense-prefix 4", "layer with experts"], {**DECO, "dense_prefix": 4}),
                (["--expert-bias-rate", "does not belong to --arch deco"], {**DECO, "expert_bias_rate": 0}),
                (["--experts-per-token", "does not belong to --arch deco"], {**DECO, "experts_per_token": 2}),
                (["--entropy-weight", "does not belong to --arch moe"], {**MOE, "entropy_weight": 1}),
                (["--token-sparsity", "does not belong to --arch moe"], {**MOE, "token_sparsity": 2}),
                (["--dense-prefix", "does not belong to --arch moe"], {**MOE, "dense_prefix": 1}),
                (["--experts", "does not belong to --arch selected-q"], {"arch": "selected-q", "experts": 4}),
                (["--shared-experts", "does not belong to --arch dense"], {**DENSE, "shared_experts": 1}),
                (["--active-ratio", "does not belong to --arch routed-ffn"],
                 {"arch": "routed-ffn", "active_ratio": 0.2})]:
            with self.subTest(changes):
                self.expect_error(parts, *self.arguments(**changes), status=2)
                self.assertFalse((self.folder / "out").exists())

    def test_more_memory_than_there_is(self):
        for changes in {"batch_size": 100000000}, {"dim": 100000, "ffn_dim": 1000000, "vocab_size": 1000000}:
            self.expect_error(["out of memory", "GiB", "--batch-size"], *self.arguments(**changes),
                              before=r"memory\n(  [^\n]+\n)+  total +[^\n]+\n")
            self.assertFalse((self.folder / "out").exists())

    def test_memory_that_the_system_refuses(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        self.expect_error(["out of memory", "--batch-size"], *self.arguments(batch_size=20000), preexec_fn=limit)


class RefusedCheckpointTest(TrainingTest):
    def setUp(self):
        super().setUp()
        self.train_model()

    def train_model(self, name="out", **changes):
        """The checkpoint to damage."""
        self.out = self.train(name, **changes, steps=6)
        self.checkpoint = self.out / "step_00000006"
        self.commands = {"generate": ["generate", "--checkpoint", self.checkpoint, "--max-new-tokens", 1],
                         "eval": ["eval", "--checkpoint", self.checkpoint, "--val-data", self.folder / "val_0.bin"],
                         "resume": self.arguments(**changes, out=self.out, steps=9, resume=True)}

    def refused(self, parts, name, content, commands=("generate", "eval", "resume")):
        """With this content in a file of the checkpoint (None: without it), the commands end in an error and leave the
        run's directory as it is."""
        path = self.checkpoint / name
        good = path.read_bytes()
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
        before = {file: file.read_bytes() for file in self.out.rglob("*") if file.is_file()}
        for command in commands:
            with self.subTest(name, parts=parts, command=command):
                self.expect_error(parts, *self.commands[command])
                self.assertEqual({file: file.read_bytes() for file in self.out.rglob("*") if file.is_file()}, before)
        path.write_bytes(good)

    def test_weights_that_are_damaged_or_hostile(self):
        path = self.checkpoint / "model.safetensors"
        good = path.read_bytes()
        norm = "model.norm.weight"

        def changed(change):
            file = Safetensors(path)
            change(file)
            return file.pack()

        def set_entry(**values):
            return changed(lambda file: file.header[norm].update(values))

        def set_values(value):
            return changed(lambda file: file.set(norm, [1.0] * 15 + [value]))

        begin, end = Safetensors(path).header[norm]["data_offsets"]
        last = max(Safetensors(path).header.items(), key=lambda item: item[1].get("data_offsets", [0, 0])[1])[0]
        for parts, content in [
                ("No such file", None),
                ("0 bytes", b""),
                ("at least 8", good[:7]),
                ("reach beyond", good[:-1]),
                ("follow after the last tensor", good + b"\0"),
                ("9223372036854775807 bytes", struct.pack("<Q", 2**63 - 1) + good[8:]),
                ("18446744073709551615 bytes", struct.pack("<Q", 2**64 - 1) + good[8:]),
                ("only", struct.pack("<Q", len(good)) + good[8:]),
                ("not a JSON object", struct.pack("<Q", 0) + good[8:]),
                ("not valid JSON", good[:8] + b"{" * 40 + good[48:]),
                ("not valid JSON", changed(lambda file: None)[:-len(Safetensors(path).data) - 1] + b"," + good[-60:]),
                ("overlap", set_entry(data_offsets=[begin - 4, end - 4])),
                ("out of order", set_entry(data_offsets=[end, begin])),
                ("reach beyond", set_entry(data_offsets=[begin, 2**62])),
                ("negative", set_entry(data_offsets=[-4, end])),
                ("needs 68", set_entry(shape=[17])),
                ("shape", set_entry(shape=[4, 4])),
                ("too large", set_entry(shape=[2**40, 2**40])),
                ("unknown dtype 'F33'", set_entry(dtype="F33")),
                ("expected F32, BF16 or F16", set_entry(dtype="I32")),
                ("needs 32", set_entry(dtype="F16")),
                ("no dtype", changed(lambda file: file.header[norm].pop("dtype"))),
                ("no tensor " + norm, changed(lambda file: file.header.update({"x?": file.header.pop(norm)}))),
                ("not one of this model's", changed(lambda file: file.header.update(
                    {"more": {"dtype": "F32", "shape": [0], "data_offsets": [len(file.data)] * 2}}))),
                ("no tensor " + last, changed(lambda file: file.data.__delitem__(
                    slice(file.header.pop(last)["data_offsets"][0], None)))),
                (norm, set_values(math.nan)),
                (norm, set_values(-math.inf))]:
            self.refused(["model.safetensors", parts], "model.safetensors", content)
        self.succeed(*self.commands["generate"])

    def test_a_directory_in_place_of_weights(self):
        path = self.checkpoint / "model.safetensors"
        path.unlink()
        path.mkdir()
        for command in self.commands.values():
            self.expect_error(["model.safetensors", "a directory"], *command)

    def test_optimizer_state_that_is_damaged(self):
        path = self.checkpoint / "optimizer.safetensors"
        good = path.read_bytes()
        nan = Safetensors(path)
        nan.data[:4] = struct.pack("<f", math.nan)
        for parts, content in ("No such file", None), ("reach beyond", good[:-1]), ("", nan.pack()):
            self.refused(["optimizer.safetensors", parts], "optimizer.safetensors", content, ["resume"])

    def test_config_that_is_broken(self):
        config = json.loads((self.checkpoint / "config.json").read_text())
        deep = b'{"model_type":' + b"[" * 3000000 + b"]" * 3000000 + b"}"  # would overflow a recursive walk
        for parts, content in [
                ("No such file", None),
                ("not valid JSON", b""),
                ("not valid JSON", json.dumps(config).encode()[:-5]),
                ("not valid JSON", b"\xff\xfe\x00"),
                ("expected a JSON object", b"[]"),
                ("deep", deep)]:
            self.refused(["config.json", parts], "config.json", content)
        for key, value, part in [
                ("num_attention_heads", "two", "whole number"),
                ("num_key_value_heads", 3, "multiple of"), ("head_dim", 7, "odd"), ("token_sparsity", 17, "larger"),
                ("hidden_size", -1, "whole number"), ("hidden_size", 2**70, "whole number"),
                ("vocab_size", None, "whole number"), ("model_type", "llama", "model_type"),
                ("tie_word_embeddings", 0, "true or false"), ("layer_pattern", "DDDDD", "layer_pattern"),
                ("num_hidden_layers", 6, "num_hidden_layers")]:
            self.refused(["config.json", part], "config.json", json.dumps({**config, key: value}).encode())
        larger = json.dumps({**config, "hidden_size": 18}).encode()
        self.refused(["model.safetensors", "shape"], "config.json", larger, ["generate", "eval"])
        untied = json.dumps({**config, "tie_word_embeddings": False}).encode()
        self.refused(["model.safetensors", "no tensor lm_head.weight"], "config.json", untied, ["generate", "eval"])
        huge = json.dumps({**config, "vocab_size": 2147483647, "hidden_size": 100000}).encode()
        self.refused("out of memory", "config.json", huge, ["eval"])

    def test_trainer_state_that_is_broken(self):
        state = json.loads((self.checkpoint / "trainer.json").read_text())
        loader = state["data_loader"]
        for parts, content in [
                ("No such file", None),
                ("not valid JSON", b"{"),
                ("step is missing", {key: value for key, value in state.items() if key != "step"}),
                ("step is \"6\"", {**state, "step": "6"}),
                ("step is -6", {**state, "step": -6}),
                (["step 5", "step_00000006"], {**state, "step": 5}),
                ("data_loader", {**state, "data_loader": []}),
                ("expected a whole number", {**state, "data_loader": {**loader, "position": -1}})]:
            content = json.dumps(content).encode() if isinstance(content, dict) else content
            parts = [parts] if isinstance(parts, str) else parts
            self.refused(["trainer.json", *parts], "trainer.json", content, ["resume"])
        for key, value, part in ("position", 39, "data position 39"), ("num_sequences", 40, "trained on 40"):
            content = json.dumps({**state, "data_loader": {**loader, key: value}}).encode()
            self.refused(part, "trainer.json", content, ["resume"])

    def test_an_entropy_weight_that_is_damaged(self):
        self.train_model("deco", **DECO)
        name = "model.layers.1.mlp.entropy_weight"
        for part, change in [
                (name, lambda file: file.set(name, [math.nan])),
                ("no tensor " + name, lambda file: file.header.update({"x": file.header.pop(name)}))]:
            file = Safetensors(self.checkpoint / "model.safetensors")
            change(file)
            self.refused(["model.safetensors", part], "model.safetensors", file.pack())
        self.succeed(*self.commands["resume"])

    def test_an_output_that_is_an_input(self):
        weights, shard = self.checkpoint / "model.safetensors", self.folder / "val_0.bin"
        before = weights.read_bytes(), shard.read_bytes()
        command = ["routing", "--checkpoint", self.checkpoint, "--val-data", shard]
        for flag, path in ("--map", weights), ("--csv", shard), ("--csv", self.checkpoint / "." / "config.json"):
            self.expect_error([f"{flag} {path}", "reads this file"], *command, flag, path)
        self.assertEqual((weights.read_bytes(), shard.read_bytes()), before)
        self.succeed(*command, "--csv", self.folder / "layers.csv")

    def test_expert_biases_that_are_damaged(self):
        self.train_model("moe", **MOE)
        path = self.checkpoint / "model.safetensors"
        bias = "model.layers.1.mlp.gate.e_score_correction_bias"
        for part, change in [
                (bias, lambda file: file.set(bias, [0.0, math.nan, 0.0, 0.0])),
                (bias, lambda file: file.set(bias, [math.inf, 0.0, 0.0, 0.0])),
                ("no tensor " + bias, lambda file: file.header.update({"x": file.header.pop(bias)})),
                ("shape", lambda file: file.header[bias].update(shape=[2, 2]))]:
            file = Safetensors(path)
            change(file)
            self.refused(["model.safetensors", part], "model.safetensors", file.pack())
        self.succeed(*self.commands["resume"])

    def test_metrics_of_a_model_without_experts(self):
        without = (self.out / "metrics.csv").read_bytes()
        self.train_model("moe", **MOE)
        self.refused("metrics.csv", "../metrics.csv", without, ["resume"])
        self.succeed(*self.commands["resume"])

    def test_another_model_or_optimizer(self):
        for parts, changes in [
                ("--arch mod against xmod", MOD),
                ("--dim 18 against 16", {"dim": 18}),
                ("--seq-len 15 against 16", {"seq_len": 15}),
                ("--token-bias-strength 0 against 1", {"no_token_bias": True}),
                ("residual_gate false against true", {"no_residual_gate": True}),
                ("another --optimizer", {"optimizer": "adamw"})]:
            with self.subTest(changes):
                before = record(self.out)
                self.expect_error(["--resume", "step_00000006", parts],
                                  *self.arguments(steps=9, resume=True, **changes))
                self.assert_same_record(self.out, before)

    def test_other_data(self):
        self.expect_error(["--train-data", "trained on 39"],
                          *self.arguments(steps=9, resume=True, train_data=self.folder / "train_0.bin"))

    def test_metrics_of_another_program(self):
        (self.out / "metrics.csv").write_text("name,age\nAda,36\n")
        self.expect_error("metrics.csv", *self.commands["resume"])
        self.assertEqual((self.out / "metrics.csv").read_text(), "name,age\nAda,36\n")

    def test_no_checkpoint_there(self):
        for command in ["generate"], ["eval", "--val-data", "val_0.bin"]:
            for name, part in ("none", "no such directory"), ("val_0.bin", "no such directory"), ("out", "config.json"):
                self.expect_error([name, part], *command, "--checkpoint", name)


class OutputTest(TrainingTest):
    """The place for results is full, closed, or not to be written to."""

    def test_the_output_is_no_directory(self):
        (self.folder / "out").write_text("mine")
        for out in self.folder / "out", self.folder / "out" / "below":
            self.expect_error(["cannot create directory", str(out)], *self.arguments(out=out))
        self.assertEqual((self.folder / "out").read_text(), "mine")

    def test_a_directory_without_permission(self):
        def drop_rights():
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        options = {"preexec_fn": drop_rights} if os.geteuid() == 0 else {}
        self.folder.chmod(0o755)
        (self.folder / "locked").mkdir(mode=0o555)
        try:
            self.succeed("--help", **options)
        except (AssertionError, subprocess.SubprocessError, PermissionError):
            self.skipTest("the program lies where another user cannot run it")
        self.expect_error(["locked/out", "Permission denied"], *self.arguments(out="locked/out"), **options)
        self.expect_error(["locked/metrics.csv", "Permission denied"], *self.arguments(out="locked"), **options)
        self.assertEqual(list((self.folder / "locked").iterdir()), [])

    def check_full(self, run_into_it, parts):
        """run_into_it(changes, parts) expects the error; the checkpoint before it stays and resumes."""
        out = self.folder / "out"
        steady = {"lr_schedule": "constant", "eval_interval": 3}
        expected = record(self.train("undisturbed", steps=12, **steady))
        self.train(steps=6, **steady)
        run_into_it(self.arguments(steps=12, resume=True, **steady), parts)
        self.assertEqual(self.checkpoints(out), ["step_00000003", "step_00000006"])
        self.succeed(*self.arguments(steps=12, resume=True, **steady))
        self.assert_same_record(out, expected)

    def test_file_size_limit(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))  # metrics.csv fits, model.safetensors does not

        def run_into_it(arguments, parts):
            self.expect_error(parts, *arguments, preexec_fn=limit)
        self.check_full(run_into_it, ["cannot write", "step_00000009", "model.safetensors", "file size limit"])

    def test_full_disk(self):
        out = self.mount_small_disk()

        def run_into_it(arguments, parts):
            filler = self.fill_disk(out)
            self.expect_error(parts, *arguments)
            filler.unlink()
        self.check_full(run_into_it, ["cannot write", "step_00000009", "No space left"])

    def test_standard_output_is_full_or_closed(self):
        """The work is done all the same; the exit status tells."""
        checkpoint = self.train("good", steps=3) / "step_00000003"
        commands = [["generate", "--checkpoint", checkpoint],
                    ["eval", "--checkpoint", checkpoint, "--val-data", self.folder / "val_0.bin"],
                    ["eval", "--checkpoint", checkpoint, "--val-data", self.folder / "val_0.bin", "--json"],
                    ["plan"], ["--help"]]
        expected = record(self.folder / "good")
        for name, options in ("closed", {"preexec_fn": lambda: os.close(1)}), ("full", {"stdout": "/dev/full"}):
            with self.subTest(name):
                if "stdout" in options:
                    if not os.path.exists("/dev/full"):
                        self.skipTest("no /dev/full on this system")
                    full = open("/dev/full", "w")
                    self.addCleanup(full.close)
                    options["stdout"] = full
                for command in commands:
                    self.expect_error("standard output", *command, **options)
                self.expect_error("standard output", *self.arguments(out=self.folder / name, steps=3), **options)
                self.assert_same_record(self.folder / name, expected)


class DivergedTest(TrainingTest):
    """A learning rate beyond all bounds."""
    WILD = {"lr": 1e30, "grad_clip": 0, "warmup_steps": 0, "checkpoint_interval": 1, "keep_checkpoints": 1}

    def test_stops_before_the_update(self):
        out = self.folder / "out"
        self.expect_error(["step 2", "the loss is", "stopped before the update", "step_00000001", "--lr"],
                          *self.arguments(val_data=None, **self.WILD))
        self.assertEqual(self.checkpoints(out), ["step_00000001"])
        self.assertEqual([row["step"] for row in read_metrics(out)], ["1"])

    def test_no_checkpoint_yet(self):
        self.expect_error(["step 2", "last checkpoint: none"],
                          *self.arguments(val_data=None, **{**self.WILD, "checkpoint_interval": 0}))
        self.assertEqual(self.checkpoints(self.folder / "out"), [])

    def check_good_checkpoint_stays(self, parts, **changes):
        once = {"checkpoint_interval": 1, "keep_checkpoints": 1, "lr_schedule": "constant", "eval_interval": 3}
        expected = record(self.train("undisturbed", steps=9, **once))
        out = self.train(steps=6, **once)
        self.expect_error(parts, *self.arguments(steps=9, resume=True, **{**self.WILD, **changes}))
        self.assertEqual(self.checkpoints(out), ["step_00000006"])
        self.succeed(*self.arguments(steps=9, resume=True, **once))
        self.assert_same_record(out, expected)

    def test_validation_sees_it_before_the_good_checkpoint_goes(self):
        self.check_good_checkpoint_stays(["step 7", "validation loss", "stopped before saving", "step_00000006"],
                                         eval_interval=1)

    def test_infinite_weights_are_not_saved(self):
        self.check_good_checkpoint_stays(["step_00000007", "infinite or NaN", "checkpoint before it stays"],
                                         lr=1e20, weight_decay=1e30)

    def test_infinite_gradient(self):
        """Weights that give a finite loss whose gradient overflows: layers that do nothing, tiny embeddings for the
        bytes of the text and huge ones for the others, a huge last norm."""
        out = self.train(steps=3)
        path = out / "step_00000003" / "model.safetensors"
        file = Safetensors(path)
        for name, entry in file.header.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                file.set(name, [0.0] * math.prod(entry["shape"]))
        file.set("model.embed_tokens.weight", [1e-25] * 16 * 128 + [1e20] * 16 * 128)
        file.set("model.norm.weight", [1e20] * 16)
        path.write_bytes(file.pack())
        self.expect_error(["step 4", "gradient norm", "stopped before the update", "step_00000003"],
                          *self.arguments(steps=6, resume=True))
        self.assertEqual(self.checkpoints(out), ["step_00000003"])

    def test_generate_with_infinite_logits(self):
        path = self.train(steps=3) / "step_00000003" / "model.safetensors"
        file = Safetensors(path)
        file.set("model.norm.weight", [3e38] * 16)
        path.write_bytes(file.pack())
        self.expect_error("not finite", "generate", "--checkpoint", path.parent, "--prompt", "a")


if __name__ == "__main__":
    unittest.main()
