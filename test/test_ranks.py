"""Several ranks of ./train_xmod under mpirun: the same training whatever their number. Skipped, with a line that says
why, where the program was built without MPI."""

import json
import math
import re
import shutil
import subprocess
import sys
import unittest

from ranks import EMULATED, RanksTest
from test_training import (DECO, DENSE, MOD, MODEL, MOE, Safetensors, flags, read_metrics, record, some_text,
                           write_shard)

SEQUENCES = 24  # of a step
ARCHITECTURES = {"dense": DENSE, "xmod": {}, "moe": MOE}
OTHERS = {"mod": {**MOD, "optimizer": "adamw"}, "deco": DECO, "routed-ffn": {"arch": "routed-ffn"},
          "selected-q": {"arch": "selected-q"}}


def tensors(checkpoint, name):
    file = Safetensors(checkpoint / (name + ".safetensors"))
    return {tensor: file.values(tensor) for tensor in file.header if tensor != "__metadata__"}


def normalised_error(found, expected):
    gap = math.sqrt(sum((a - b) ** 2 for a, b in zip(found, expected)))
    size = math.sqrt(sum(b ** 2 for b in expected))
    return gap / size if size else gap


def bound_of_moment(tensor):
    """Of the normalised error of a first moment, which is the gradient but for a factor, and of its square, which errs
    twice as much."""
    return 2e-6 if tensor.endswith("exp_avg_sq") else 1e-6


class SameTrainingTest(RanksTest):
    """The same sequences in every step, so the same gradients but for the order in which they are added."""

    def setUp(self):
        super().setUp()
        write_shard(self.folder / "train_3.bin", some_text(9000, 5))

    def run_ranks(self, ranks, accumulation, name, **changes):
        out = f"{name}_{ranks}x{accumulation}"
        self.finish_alike(ranks, out=out, batch_size=SEQUENCES // ranks // accumulation, grad_accum=accumulation,
                          total_batch_tokens=None, eval_batches=0, **changes)
        return self.folder / out

    def test_gradients(self):
        """The first moments of the first step are the gradients, but for a factor."""
        for name, architecture in {**ARCHITECTURES, **OTHERS}.items():
            expected = None
            for accumulation in (1, 2) if name in ARCHITECTURES else (1,):
                for ranks in (1, 2, 3, 4):
                    out = self.run_ranks(ranks, accumulation, name, steps=1, grad_clip=0, **architecture)
                    found = tensors(out / "step_00000001", "optimizer")
                    expected = expected or found
                    self.assertEqual(found.keys(), expected.keys())
                    for tensor in expected:
                        with self.subTest(name, accumulation=accumulation, ranks=ranks, tensor=tensor):
                            self.assertTrue(any(found[tensor]) or "router" in tensor or "gate" in tensor or
                                            "experts" in tensor)
                            self.assertLessEqual(normalised_error(found[tensor], expected[tensor]),
                                                 bound_of_moment(tensor))

    def test_what_moves_without_a_gradient(self):
        """Thresholds, expert biases and the weight of deco's entropy."""
        for name, architecture in {"xmod": {}, "moe": MOE, "deco": DECO}.items():
            buffers = []
            for ranks in (1, 2, 3):
                out = self.run_ranks(ranks, 1, name, steps=1, **architecture)
                buffers.append({tensor: values for tensor, values in tensors(out / "step_00000001", "model").items()
                                if tensor.endswith(("router.threshold", "correction_bias", "entropy_weight"))})
            self.assertTrue(buffers[0])
            for found in buffers[1:]:
                self.assertEqual(found.keys(), buffers[0].keys())
                for tensor, values in found.items():
                    self.assertLessEqual(normalised_error(values, buffers[0][tensor]), 1e-6, (name, tensor))

    def test_losses(self):
        for name, architecture in ARCHITECTURES.items():
            expected = None
            for accumulation in (1, 2):
                for ranks in (1, 2, 3, 4):
                    with self.subTest(name, accumulation=accumulation, ranks=ranks):
                        out = self.run_ranks(ranks, accumulation, name, steps=50, eval_interval=25,
                                             checkpoint_interval=0, zero=ranks % 2, **architecture)
                        rows = read_metrics(out)
                        expected = expected or rows
                        for found, reference in zip(rows, expected, strict=True):
                            self.assertEqual(found["tokens"], reference["tokens"])
                            for column in found.keys() & {"train_loss", "val_loss_topk", "val_loss_threshold"}:
                                if reference[column]:
                                    self.assertAlmostEqual(float(found[column]), float(reference[column]), delta=1e-4)
                            self.assertAlmostEqual(float(found["grad_norm"]), float(reference["grad_norm"]), delta=1e-3)

    def test_one_rank_is_one_process(self):
        out = self.run_ranks(1, 2, "started_by_mpirun")
        self.train("alone", batch_size=SEQUENCES // 2, eval_batches=0)
        self.assert_same_record(out, record(self.folder / "alone"))


class SameBytesTest(RanksTest):
    def run_ranks(self, ranks, out, **changes):
        self.finish_alike(ranks, **{"out": out, "steps": 12, **changes})
        return self.folder / out

    def test_twice(self):
        for name, architecture in ARCHITECTURES.items():
            with self.subTest(name):
                first = self.run_ranks(2, name, **architecture)
                self.assert_same_record(self.run_ranks(2, name + "_again", **architecture), record(first))

    def test_shared_optimizer_state(self):
        """--zero 1 computes what --zero 0 does, and writes the same files."""
        for name, architecture in {**ARCHITECTURES, **OTHERS}.items():
            for ranks in (2, 3):
                with self.subTest(name, ranks=ranks):
                    whole = self.run_ranks(ranks, f"{name}_{ranks}_0", zero=0, **architecture)
                    shared = self.run_ranks(ranks, f"{name}_{ranks}_1", zero=1, **architecture)
                    self.assert_same_record(shared, record(whole))

    def test_resumed(self):
        """By as many ranks: the same bytes as without an interruption, whichever way the state is kept."""
        constant = {"lr_schedule": "constant", "warmup_steps": 0, "eval_interval": 6}
        expected = record(self.run_ranks(3, "whole", **constant))
        for before, after in (1, 1), (0, 1), (1, 0):
            with self.subTest(before=before, after=after):
                out = f"resumed_{before}{after}"
                self.run_ranks(3, out, steps=6, zero=before, **constant)
                self.run_ranks(3, out, zero=after, resume=True, **constant)
                self.assert_same_record(self.folder / out, expected)

    def test_resumed_by_others(self):
        constant = {"lr_schedule": "constant", "warmup_steps": 0, "zero": 1}
        losses = {}
        for after in (1, 2, 4):
            out = f"then_{after}"
            self.run_ranks(3, out, steps=6, **constant)
            self.run_ranks(after, out, resume=True, **constant)
            rows = read_metrics(self.folder / out)
            self.assertEqual([int(row["step"]) for row in rows], list(range(1, 13)))
            losses[after] = [float(row["train_loss"]) for row in rows]
        for other in losses.values():
            for a, b in zip(other, losses[1]):
                self.assertAlmostEqual(a, b, delta=1e-5)

    def test_the_log(self):
        """One rank prints, and says how long it waited."""
        log = self.finish_alike(3, steps=2)
        self.assertEqual(log.count("2 steps of 384 tokens"), 1)
        self.assertRegex(log, r"step 2/2 \|.* \d+% waiting \| ")


@unittest.skipUnless(EMULATED.exists(), "build/emulated_train is not built (make test-programs)")
class CudaTest(RanksTest):
    """The CUDA backend, whose kernels run on the CPU: gradients go through host memory beside the running step. From
    the second step on the step is a graph."""
    binary = EMULATED
    RUN = {"steps": 3, "eval_interval": 3, "eval_batches": 0, "checkpoint_interval": 0, "total_batch_tokens": None}

    def run_ranks(self, ranks, out, **changes):
        self.log = self.finish_alike(ranks, **{**self.RUN, "out": out, "batch_size": 4 // ranks, **changes})
        return self.folder / out

    def weights_memory(self):
        """MiB of the last run's fp32 weights, on the rank that has most."""
        return float(re.search(r"parameters +([\d.]+) MiB", self.log).group(1))

    def plan(self, **options):
        command = [EMULATED, "plan", "--json", *flags({**MODEL, "ranks": 2, "precision": "bf16", **options})]
        return json.loads(subprocess.run([*map(str, command)], check=True, capture_output=True).stdout)

    def test_two_ranks_are_one(self):
        one, two = (self.run_ranks(ranks, f"{ranks}", zero=0) for ranks in (1, 2))
        for found, expected in zip(read_metrics(two), read_metrics(one), strict=True):
            for column in ("train_loss", "val_loss_topk", "val_loss_threshold"):
                if expected[column]:
                    self.assertAlmostEqual(float(found[column]), float(expected[column]), delta=1e-5)
        shared = self.run_ranks(2, "shared", zero=1)
        self.assert_same_record(shared, record(two))

    def test_gradients(self):
        for name, architecture in {"xmod": {}, "moe": MOE}.items():
            one, two = (self.run_ranks(ranks, f"{name}_{ranks}", steps=1, grad_clip=0, **architecture)
                        for ranks in (1, 2))
            expected = tensors(one / "step_00000001", "optimizer")
            for tensor, values in tensors(two / "step_00000001", "optimizer").items():
                self.assertLessEqual(normalised_error(values, expected[tensor]), bound_of_moment(tensor), tensor)


    def test_shared_fp32_weights(self):
        """In bf16, --zero 1 shares out the fp32 weights, too: the same losses and files."""
        for name, architecture in {"xmod": {"dim": 32, "ffn_dim": 96, "untied_head": True}, "moe": MOE,
                                   "deco": {**DECO, "optimizer": "adamw"}}.items():
            with self.subTest(name):
                whole = self.run_ranks(2, f"{name}_0", zero=0, precision="bf16", **architecture)
                memory = self.weights_memory()
                shared = self.run_ranks(2, f"{name}_1", zero=1, precision="bf16", **architecture)
                self.assert_same_record(shared, record(whole))
                plan = self.plan(zero=1, **architecture)
                self.assertAlmostEqual(self.weights_memory(), plan["memory"]["parameters"] / 2**20, delta=0.006)
                if name == "xmod":  # the others' are less than some pages of the emulated device
                    self.assertLess(self.weights_memory(), 0.8 * memory)
                in_fp32 = self.plan(zero=1, precision="fp32", **architecture)
                self.assertLess(plan["parallel"]["weight_bytes"], 0.9 * in_fp32["parallel"]["weight_bytes"])
                self.assertEqual(plan["parallel"]["gradient_bytes"], in_fp32["parallel"]["gradient_bytes"])
                one = self.run_ranks(1, name, precision="bf16", **architecture)
                for found, expected in zip(read_metrics(shared), read_metrics(one), strict=True):
                    self.assertAlmostEqual(float(found["train_loss"]), float(expected["train_loss"]), delta=1e-3)

    def test_shared_fp32_weights_of_a_checkpoint(self):
        """They are gathered, and go to other ranks, as the optimizer's state does; and --init-from hands them out."""
        run = {"steps": 4, "precision": "bf16", "lr_schedule": "constant", "warmup_steps": 0, "eval_interval": 2,
               "checkpoint_interval": 2}
        expected = record(self.run_ranks(2, "whole", zero=0, **run))
        for before, after in (1, 1), (0, 1), (1, 0):
            with self.subTest(before=before, after=after):
                out = f"resumed_{before}{after}"
                self.run_ranks(2, out, zero=before, **{**run, "steps": 2})
                self.run_ranks(2, out, zero=after, resume=True, **run)
                self.assert_same_record(self.folder / out, expected)
        losses = {}
        for ranks in (1, 4):
            self.run_ranks(2, f"then_{ranks}", zero=1, **{**run, "steps": 2})
            self.run_ranks(ranks, f"then_{ranks}", zero=1, resume=True, **run)
            losses[ranks] = [float(row["train_loss"]) for row in read_metrics(self.folder / f"then_{ranks}")]
        for found, expected in zip(losses[4], losses[1], strict=True):
            self.assertAlmostEqual(found, expected, delta=1e-3)
        first = self.folder / "whole" / "step_00000004"
        whole, shared = (self.run_ranks(2, f"from_{zero}", zero=zero, init_from=first, **run) for zero in (0, 1))
        self.assert_same_record(shared, record(whole))

    def test_another_start(self):
        """It shows, although the ranks then send each other the weights that they share out."""
        run = {"steps": 1, "precision": "bf16"}
        first, other = (self.run_ranks(1, f"seed_{seed}", seed=seed, **run) / "step_00000001" for seed in (1, 2))
        changed = shutil.copytree(first, self.folder / "changed")
        config = json.loads((changed / "config.json").read_text())
        (changed / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
        for start, message in ((None, "--init-from: rank 1 has nothing"), (changed, "the model: rank 1 has"),
                               (other, "the weights at step 0: rank 1 has")):
            with self.subTest(message):
                process = self.start_ranks(*[[self.binary, *self.arguments(2, **{
                    **self.RUN, **run, "batch_size": 2, "out": "never", "init_from": path})] for path in (first, start)])
                _, err = process.communicate(timeout=60)
                self.assertNotEqual(process.returncode, 0)
                self.assertIn(message, err)


class RefusalTest(RanksTest):
    def expect_usage_error(self, ranks, parts, **changes):
        process = self.start_alike(ranks, **changes)
        _, err = process.communicate(timeout=60)
        self.assertNotEqual(process.returncode, 0)
        for part in parts:
            self.assertIn(part, err)
        self.assertEqual(err.count("error: "), 1, err)

    def test_batches_that_do_not_divide(self):
        self.expect_usage_error(3, ["--total-batch-tokens 100", "multiple of 192", "192 and 384"], total_batch_tokens=100)

    def test_other_commands(self):
        process = self.start_ranks(*[[self.binary, "plan"]] * 2)
        _, err = process.communicate(timeout=60)
        self.assertNotEqual(process.returncode, 0)
        self.assertIn("plan runs in one process, 2 were started", err)


class MemoryTest(RanksTest):
    PEAK = """import os, resource, subprocess, sys
status = subprocess.run(sys.argv[1:]).returncode
name = "peak_" + (os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK"))
open(name, "w").write(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
sys.exit(status)"""

    def test_plan_knows_the_peak_of_a_rank(self):
        shape = {**MODEL, **DENSE, "dim": 192, "heads": 4, "kv_heads": 2, "head_dim": 48, "ffn_dim": 768,
                 "vocab_size": 2048, "seq_len": 512, "active_layers": 5, "batch_size": 3, "threads": 1}
        write_shard(self.folder / "long.bin", [i * i % 256 for i in range(10000)])
        for ranks, zero in (2, 0), (2, 1), (3, 1):
            with self.subTest(ranks=ranks, zero=zero):
                plan = json.loads(self.succeed("plan", *flags(shape), "--json", "--ranks", ranks, "--zero", zero))
                command = [sys.executable, "-c", self.PEAK, self.binary,
                           *self.arguments(ranks, **shape, total_batch_tokens=None, train_data=self.folder / "long.bin",
                                           val_data=self.folder / "long.bin", steps=1, zero=zero,
                                           out=self.folder / f"out_{ranks}_{zero}")]
                process = self.start_ranks(*[command] * ranks)
                _, err = process.communicate(timeout=120)
                self.assertEqual(process.returncode, 0, err)
                for rank in range(ranks):
                    peak = 1024 * int((self.folder / f"peak_{rank}").read_text())
                    self.assertAlmostEqual(plan["memory"]["total"] / peak, 1, delta=0.05)


if __name__ == "__main__":
    sys.exit(unittest.main())
