"""scripts/gpu_check.sh without a GPU: what it says here, and how it goes about its stages where commands of the same
names stand in for a GPU's."""

import os
import re
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAGES = ["build", "tests", "compare", "memcheck", "racecheck", "benchmark"]

MAKE = """
case "$*" in
  *device-test-programs*)
    mkdir -p build
    cp /dev/null build/test_device_passes.d
    printf '#!/bin/sh\\necho "[  PASSED  ] 3 tests."\\n' >build/test_device_passes
    printf '#!/bin/sh\\necho "[  PASSED  ] 4 tests."\\n' >build/test_device_experts
    printf '#!/bin/sh\\nprintf "# p\\\\n\\\\n## dense, T 4096: dense, 28 layers\\\\n\\\\n| a | b |\\\\n"\\n' >build/bench_xmodcu
    printf '#!/bin/sh\\necho trained "$@"\\n' >train_xmodcu
    chmod +x build/test_device_passes build/test_device_experts build/bench_xmodcu train_xmodcu ;;
  compare) echo "largest difference 1e-6" ;;
esac
"""
STANDINS = {
    "nvidia-smi": 'case "$1" in -L) echo "GPU 0: NVIDIA H200" ;; *) echo "NVIDIA H200, 580.1, 143771 MiB" ;; esac',
    "nvcc": 'echo "Cuda compilation tools, release 13.0, V13.0.1"',
    "make": MAKE,
    "compute-sanitizer": 'while [ "$1" != ./train_xmodcu ]; do shift; done; "$@"',
    "python3": "exit 0",
}


class GpuCheck(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        (self.root / "scripts").mkdir()
        shutil.copy(ROOT / "scripts" / "gpu_check.sh", self.root / "scripts")
        self.bin = self.root / "bin"
        self.bin.mkdir()
        for name, body in STANDINS.items():
            self.stand_in(name, body)

    def stand_in(self, name, body):
        path = self.bin / name
        path.write_text("#!/bin/bash\n" + body + "\n")
        path.chmod(0o755)

    def check(self, *arguments):
        return subprocess.run([self.root / "scripts" / "gpu_check.sh", *arguments], capture_output=True, text=True, timeout=60,
                              env={**os.environ, "PATH": f"{self.bin}:{os.environ['PATH']}"})

    def results(self):
        """The result of each stage, and its last line, as the report has them."""
        report = (self.root / "build" / "gpu_check" / "report.md").read_text()
        rows = re.findall(r"(?m)^\| (\w+) \| ([\w ]+) \| \d+ \| \d+ \| (.*) \|$", report)
        return {stage: (result, note) for stage, result, note in rows}

    def test_all_stages(self):
        done = self.check()
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        results = self.results()
        self.assertEqual(list(results), STAGES)
        self.assertEqual({result for result, _ in results.values()}, {"ok"})
        self.assertEqual(results["build"][1], "2 test programs")
        self.assertEqual(results["tests"][1], "7 passed")
        self.assertEqual(results["compare"][1], "largest difference 1e-6")
        self.assertEqual(results["benchmark"][1], "1 models")
        report = (self.root / "build" / "gpu_check" / "report.md").read_text()
        self.assertIn("NVIDIA H200, 580.1, 143771 MiB, CUDA 13.0", report)
        self.assertIn("| a | b |", report)
        log = (self.root / "build" / "gpu_check" / "memcheck.log").read_text()
        self.assertIn("--arch moe", log)
        for stage in STAGES:
            self.assertRegex(done.stdout, rf"(?m)^ok +{stage} +\d+ s of")

    def test_a_stage_that_fails_does_not_stop_the_others(self):
        self.stand_in("make", MAKE.replace('echo "largest difference 1e-6"', "echo 'too far apart'; exit 2")
                      .replace('echo "[  PASSED  ] 4 tests."', 'echo "[  FAILED  ] one"; exit 1'))
        self.stand_in("compute-sanitizer", 'if [ "$2" = racecheck ]; then echo "1 hazard"; exit 9; fi')
        done = self.check()
        self.assertEqual(done.returncode, 1)
        self.assertEqual(done.stderr, "gpu_check.sh: 3 of 6 stages failed\n")
        self.assertEqual({stage: result for stage, (result, _) in self.results().items()},
                         {"build": "ok", "tests": "FAILED", "compare": "FAILED", "memcheck": "ok", "racecheck": "FAILED",
                          "benchmark": "ok"})
        self.assertEqual(self.results()["tests"][1], "failed: test_device_experts")
        self.assertEqual(self.results()["racecheck"][1], "1 hazard")
        self.assertIn("[  FAILED  ] one", (self.root / "build" / "gpu_check" / "tests.log").read_text())

    def test_nothing_built(self):
        self.stand_in("make", "echo 'error: no such thing'; exit 2")
        done = self.check("--only", "build,tests,benchmark")
        self.assertEqual(done.returncode, 1)
        self.assertEqual({stage: result for stage, (result, _) in self.results().items()},
                         {"build": "FAILED", "tests": "FAILED", "benchmark": "FAILED"})
        self.assertEqual(self.results()["tests"][1], "no test ran")

    def test_a_stage_has_its_time(self):
        script = self.root / "scripts" / "gpu_check.sh"
        script.write_text(script.read_text().replace("compare) echo 40", "compare) echo 1"))
        self.stand_in("make", "echo begun; sleep 30")
        done = self.check("--only", "compare")
        self.assertEqual(done.returncode, 1)
        self.assertEqual(self.results(), {"compare": ("out of time", "begun")})

    def test_no_sanitizer(self):
        (self.bin / "compute-sanitizer").unlink()
        if shutil.which("compute-sanitizer"):
            self.skipTest("it is installed here")
        self.assertEqual(self.check("--only", "memcheck").returncode, 1)
        self.assertEqual(self.results()["memcheck"], ("FAILED", "compute-sanitizer is not installed"))

    def test_no_gpu(self):
        for body in ("echo 'no devices'; exit 6", "exit 0"):
            self.stand_in("nvidia-smi", body)
            done = self.check()
            self.assertEqual((done.returncode, done.stdout), (1, ""))
            self.assertRegex(done.stderr, r"\Agpu_check.sh: no GPU found here .*\n\Z")

    def test_dry_run(self):
        self.stand_in("nvidia-smi", "exit 6")
        done = self.check("--dry-run")
        self.assertEqual(done.returncode, 0, done.stderr)
        budgets = {name: int(seconds) for name, seconds in re.findall(r"(?m)^(\w+) +(\d+) s", done.stdout)}
        together = budgets.pop("together")
        self.assertEqual(list(budgets), STAGES)
        self.assertEqual(sum(budgets.values()), together)
        self.assertLess(together, 480)
        self.assertFalse((self.root / "build").exists())

    def test_help_and_bad_options(self):
        self.assertIn("--only LIST", self.check("--help").stdout)
        for options, part in [(["--only", "built"], "no stage 'built'"), (["--dryrun"], "unknown option --dryrun")]:
            done = self.check(*options)
            self.assertEqual(done.returncode, 2)
            self.assertIn(part, done.stderr)


if __name__ == "__main__":
    unittest.main()
