"""Runs build/bench_xmod as a user does, for as short as it goes, and scripts/bench_vs_pytorch.py without PyTorch."""

import json
import os
import subprocess
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BINARY = ROOT / "build" / "bench_xmod"
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
