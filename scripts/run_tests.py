#!/usr/bin/env python3
"""Runs the test programs (GoogleTest) that are named and those that compare backends, test/test_*.py (unittest) and,
where PyTorch is installed, the comparison of fresh reference dumps with those of test/data/. The last line is `N passed, N failed`; the exit
status is 1 when a test failed or a program broke off."""

import glob
import json
import os
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Totals:
    def __init__(self):
        self.passed, self.failed, self.skipped, self.names = 0, 0, 0, []

    def add(self, name, passed, failed, skipped, seconds):
        self.passed += passed
        self.failed += failed
        self.skipped += skipped
        if failed:
            self.names.append(name)
        note = f", {skipped} skipped" if skipped else ""
        print(f"{'FAIL' if failed else 'ok  '} {name}: {passed} passed, {failed} failed{note} ({seconds:.1f} s)", flush=True)


def run_gtest(program, totals):
    """One GoogleTest program; a crash counts as a failure."""
    name, start = os.path.basename(program), time.time()
    with tempfile.TemporaryDirectory() as folder:
        report = os.path.join(folder, "report.json")
        run = subprocess.run([program, f"--gtest_output=json:{report}"], cwd=ROOT, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, text=True, errors="replace")
        try:
            with open(report) as file:
                suites = json.load(file)["testsuites"]
        except (OSError, ValueError):
            suites = []
    tests = [test for suite in suites for test in suite["testsuite"]]
    failed = sum("failures" in test for test in tests)
    skipped = sum(test.get("result") == "SKIPPED" for test in tests)
    if run.returncode != 0 and failed == 0 or not tests:
        failed += 1  # broke off, or ran no test
    if failed:
        print(run.stdout)
    totals.add(name, len(tests) - skipped - sum("failures" in test for test in tests), failed, skipped, time.time() - start)


def run_comparison(program, totals):
    """A program that is one test, which its exit status tells."""
    start = time.time()
    run = subprocess.run([program, "--worst"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if run.returncode != 0:
        print(run.stdout)
    totals.add(os.path.basename(program), int(run.returncode == 0), int(run.returncode != 0), 0, time.time() - start)


def run_unittest(path, totals):
    start = time.time()
    suite = unittest.TestLoader().discover(os.path.dirname(path), pattern=os.path.basename(path))
    result = unittest.TextTestRunner(stream=sys.stdout, verbosity=0).run(suite)
    failed, skipped = len(result.failures) + len(result.errors), len(result.skipped)
    totals.add(os.path.basename(path), result.testsRun - failed - skipped, failed, skipped, time.time() - start)


def python_with(module):
    """The first Python that can import it."""
    for python in (sys.executable, "/usr/bin/python3"):
        command = [python, "-c", f"import {module}"]
        if os.path.exists(python) and subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0:
            return python
    return None


def check_dumps(totals):
    """The stored dumps against ones made afresh by the PyTorch reference."""
    name, start = "reference dumps made afresh", time.time()
    python = python_with("torch")
    if python is None:
        print("skip " + name + ": PyTorch is not installed (scripts/install_deps.sh reference)")
        totals.skipped += 1
        return
    run = subprocess.run([python, "scripts/dump_reference.py", "--check", "test/data"], cwd=ROOT, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, text=True)
    if run.returncode != 0:
        print(run.stdout)
    totals.add(name, int(run.returncode == 0), int(run.returncode != 0), 0, time.time() - start)


def main():
    os.chdir(ROOT)
    # Threads that spin while they wait take the processor from each other when the machine is busy.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    totals = Totals()
    for program in sorted(sys.argv[1:]):
        run = run_comparison if os.path.basename(program).startswith("compare_") else run_gtest
        run(os.path.join(ROOT, program), totals)
    for path in sorted(glob.glob(os.path.join(ROOT, "test", "test_*.py"))):
        run_unittest(path, totals)
    check_dumps(totals)
    for name in totals.names:
        print(f"failed: {name}")
    if totals.skipped:
        print(f"{totals.skipped} skipped")
    print(f"{totals.passed} passed, {totals.failed} failed")
    return 1 if totals.failed else 0


if __name__ == "__main__":
    sys.exit(main())
