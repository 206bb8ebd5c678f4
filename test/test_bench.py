"""Runs build/bench_xmod as a user does, for as short as it goes, the GPU's benchmark on the CPU, and
scripts/bench_vs_pytorch.py without PyTorch."""

import json
import os
import subprocess
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BINARY = ROOT / "build" / "bench_xmod"
EMULATED = ROOT / "build" / "bench_emulated"
RACE = ROOT / "scripts" / "bench_vs_pytorch.py"


def run(*arguments):
    # Waiting threads sleep: others may need the processor.
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    return subprocess.run(list(map(str, arguments)), capture_output=True, text=True, timeout=600, cwd=ROOT, env=environment)


def python_with_torch():
    for python in (sys.executable, "/usr/bin/python3"):
        if os.path.exists(python) and run(python, "-c", "import torch").returncode == 0:
            return python
    return None


class BenchTest(unittest.TestCase):
    def measure(self, *arguments):
        done = run(BINARY, "--size", "tiny", "--seconds", 0, "--batch-size", 1, "--threads", 2, "--json", *arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def test_every_figure_stands_beside_a_peak(self):
        report = self.measure()
        peak = report["peaks"]["arithmetic"][0]["2 threads, GFLOP/s"]
        self.assertGreater(peak, 0.1)
        self.assertIn("dense, dim 128, 8 layers, B 1, T 256", report["tiny"]["heading"])
        passes = report["tiny"]["passes"]
        names = [row["pass"] for row in passes]
        for name in ("matmul_forward", "matmul_dinp", "matmul_dweight", "attention_backward", "muon_update"):
            self.assertIn(name, names)
        self.assertAlmostEqual(sum(row["of step"] for row in passes), 1, delta=0.01)
        for row in passes:
            if row["GFLOP/s"]:
                self.assertAlmostEqual(row["of peak"], row["GFLOP/s"] / peak, msg=row)
        step = report["tiny"]["step"][0]
        self.assertEqual(step["tokens a step"], 256)
        self.assertAlmostEqual(step["tokens/s"] * step["ms a step"], 256e3, delta=1)

    def test_a_pass_on_its_own(self):
        rows = self.measure("--arch", "xmod", "--only", "route_topk")["tiny"]["alone"]
        self.assertEqual([(row["pass"], row["shape"]) for row in rows], [("route_topk", "256x128")])

    def test_bf16_products(self):
        report = self.measure("--precision", "bf16", "--instructions", "portable", "--only", "matmul_forward")
        self.assertIn("bf16 products on portable", report["peaks"]["heading"])
        self.assertGreater(report["tiny"]["alone"][0]["GFLOP/s"], 0.1)

    def test_help_and_bad_options(self):
        self.assertIn("usage: bench_xmod", run(BINARY, "--help").stdout)
        for options, part in [(["--sise", "tiny"], "--sise"), (["--size", "huge"], "--size huge"),
                              (["--threads", "0"], "--threads 0"), (["--seconds"], "--seconds"),
                              (["--arch", "mod"], "--arch mod"), (["--only", "nothing", "--size", "tiny", "--seconds", "0"],
                                                                  "--only nothing"),
                              (["--precision", "fp8"], "--precision fp8"), (["tiny"], "tiny"),
                              (["--json=3"], "--json=3"), (["-x"], "-x"),
                              (["--blas", "libnone.so", "--precision", "bf16"], "--blas")]:
            with self.subTest(options):
                done = run(BINARY, *options)
                self.assertEqual(done.returncode, 2, done.stderr)
                message = done.stderr.splitlines()[-1]
                self.assertRegex(message, r"\Aerror: ")
                self.assertIn(part, message)
                if "nothing" not in options:  # --only is checked behind the first step, and that tells its progress
                    self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)


class GpuBenchTest(unittest.TestCase):
    """Its times mean nothing here, but all of it runs."""

    def measure(self, *arguments):
        done = run(EMULATED, "--json", *arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def test_passes_steps_and_memory(self):
        report = self.measure("--size", "tiny", "--model", "T 32", "--seconds", 0, "--step-tokens", 640)
        self.assertEqual([row["cuBLAS"][:4] for row in report["peaks"]["products"]], ["bf16", "tf32", "fp32"])
        peak = report["peaks"]["products"][0]["TFLOP/s"]
        names = ["dense, T 32", "moe 2:8, T 32", "xmod A4K8, T 32", "xmod A3K16, T 32"]
        self.assertEqual([row["model"] for row in report["steps"]["steps"]], names)
        products = []
        for row in report["steps"]["steps"]:
            passes = report[row["model"]]["passes"]
            # Passes below a thousandth of the step have no line of their own; emulated kernels never are.
            for name in ("attention_forward", "attention_backward", "muon_update", "outside the passes"):
                self.assertIn(name, [line["pass"] for line in passes], row)
            self.assertAlmostEqual(sum(line["of step"] for line in passes), 1, delta=1e-6)
            # bf16; others have peaks of their own
            products += [line for line in passes if line["pass"] in ("matmul_forward", "matmul_dweight")]
            # 10 micro-batches of 2 x 32 tokens and one update
            seconds = 1e-3 * (10 * row["ms a micro-batch"] + row["ms of the optimizer"])
            self.assertAlmostEqual(row["tokens/s"] * seconds, 640, delta=1)
            self.assertAlmostEqual(row["of plan"], 1, delta=0.05)
        self.assertTrue(products)
        for line in products:
            self.assertAlmostEqual(line["of peak"], line["TFLOP/s"] / peak, delta=1e-3 * line["of peak"], msg=line)
        self.assertEqual(report["steps"]["steps"][0]["times dense"], 1)
        self.assertIn("route_topk", [line["pass"] for line in report["xmod A4K8, T 32"]["passes"]])
        self.assertIn("moe_route_forward", [line["pass"] for line in report["moe 2:8, T 32"]["passes"]])

    def test_a_pass_on_its_own(self):
        report = self.measure("--size", "tiny", "--model", "A4K8, T 32", "--only", "route_topk", "--seconds", 0)
        self.assertEqual([(row["pass"], row["shape"]) for row in report["xmod A4K8, T 32"]["alone"]],
                         [("route_topk", "64x128")])

    def test_floors_are_counted(self):
        report = self.measure("--floors", "--model", "dense, T 4096")["dense, T 4096"]
        lines = {(line["pass"], line["shape"]): line for line in report["passes"]}
        down = lines["matmul_add_forward", "32768x3072x1024"]
        self.assertEqual(down["calls"], 28)
        self.assertAlmostEqual(down["GFLOP"], 2 * 32768 * 3072 * 1024 / 1e9)
        self.assertAlmostEqual(down["floor, us"], down["GFLOP"] / 989e3 * 1e6)
        self.assertEqual(down["bound by"], "arithmetic")
        swiglu = lines["swiglu_forward", "32768x3072"]  # bf16: reads two tensors, writes one
        self.assertAlmostEqual(swiglu["MB"], 3 * 2 * 32768 * 3072 / 1e6)
        self.assertAlmostEqual(swiglu["floor, us"], swiglu["MB"] / 4.8e6 * 1e6)
        attention = lines["attention_forward", "32768x8x2048"]  # pairs of a sequence: T (T + 1) / 2
        self.assertAlmostEqual(attention["GFLOP"], 4 * 128 * 16 * 8 * 4096 * 4097 / 2 / 1e9)
        step = report["step"][0]
        self.assertGreater(step["tokens/s at most"], 1e5)
        self.assertLess(step["memory, plan, GiB"], 139)

    def test_help_and_bad_options(self):
        self.assertIn("usage: bench_xmodcu", run(EMULATED, "--help").stdout)
        for options, part in [(["--size", "huge"], "--size huge"), (["--model", "mod, T"], "--model mod, T"),
                              (["--seconds", "x"], "--seconds x"), (["--precision", "fp8"], "--precision fp8"),
                              (["--threads", "2"], "--threads"), (["tiny"], "tiny"), (["--step-tokens"], "--step-tokens")]:
            with self.subTest(options):
                done = run(EMULATED, *options)
                self.assertEqual(done.returncode, 2, done.stderr)
                self.assertRegex(done.stderr, r"\Aerror: [^\n]*\n\Z")
                self.assertIn(part, done.stderr)


class RaceTest(unittest.TestCase):
    def test_help_and_bad_options_without_packages(self):
        for options, status, part in [(["--help"], 0, "--precision"), (["--size", "3"], 2, "invalid choice: '3'"),
                                      (["--warmup", "9"], 2, "--warmup is 9"), (["--threads", "0"], 2, "--threads is 0"),
                                      ([], 1, "pip install torch")]:
            with self.subTest(options):
                done = run(sys.executable, "-S", RACE, *options)  # -S: none but Python's own packages
                self.assertEqual(done.returncode, status, done.stderr)
                self.assertIn(part, done.stdout + done.stderr)
                self.assertNotIn("Traceback", done.stderr)

    def test_race(self):
        python = python_with_torch()
        if python is None:
            self.skipTest("PyTorch is not installed")
        done = run(python, RACE, "--arch", "dense", "--precision", "fp32", "bf16", "--pytorch", "eager", "--any-blas", "--steps",
                   2, "--repeats", 1, "--batch-size", 1, "--threads", 1)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertRegex(done.stdout, r"(?m)^\| tiny \| dense \| fp32 .*\d+\.\d\d \(.*\), 1 pairs")
        self.assertRegex(done.stdout, r"tiny dense bf16: (run 1 of 1|left out, since C\+\+ cannot run it fast here: .*instructions)")


if __name__ == "__main__":
    unittest.main()
