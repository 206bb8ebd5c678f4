#!/usr/bin/env python3
"""Measures training steps on several ranks beside what `plan --ranks` predicts for them, in one table.

Each case is R ranks x threads, and --zero after a colon; all take the same global batch. They run in turns, --rounds
times; a case's time is the median of all its steps but the first of each run. The speed F of a rank is taken from the
first case, so its prediction is exact by construction; ranks that have fewer processors than threads get less.

    scripts/bench_ranks.py --cases 1x2 2x1:1 2x1:0 4x1:1 --rounds 2
"""

import argparse
import json
import os
import random
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
               "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_hwloc_base_binding_policy": "none"}


def fail(message):
    sys.exit(f"error: {message}")


class Case:
    def __init__(self, text):
        try:
            size, _, zero = text.partition(":")
            self.ranks, self.threads = map(int, size.split("x"))
            self.zero = int(zero or 1)
            if self.ranks < 1 or self.threads < 1 or self.zero not in (0, 1):
                raise ValueError
        except ValueError:
            fail(f"--cases {text}: expected ranks x threads, and :0 or :1 for --zero, such as 2x1:1")
        self.text, self.seconds = text, []

    def cores(self):
        """That a rank really has."""
        return min(self.threads, os.cpu_count() / self.ranks)


def read_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["1x2", "2x1:1", "2x1:0", "4x1:1"], metavar="RxT:Z")
    parser.add_argument("--model", default="--arch dense --dim 512 --heads 8 --kv-heads 4 --head-dim 64 --ffn-dim 1536 "
                        "--vocab-size 8192 --active-layers 8 --seq-len 512", help="flags of the model")
    parser.add_argument("--sequences", type=int, default=4, help="of the global batch")
    parser.add_argument("--steps", type=int, default=3, help="of a run, the first of which does not count")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--bandwidth", type=float, default=5, help="GB/s between two ranks (default: 5, of memory)")
    arguments = parser.parse_args()
    if arguments.steps < 2 or arguments.rounds < 1:
        fail("--steps must be 2 at least, --rounds 1")
    if arguments.sequences < 1 or not 0 < arguments.bandwidth < float("inf"):
        fail("--sequences must be 1 at least, --bandwidth above 0")
    if not (ROOT / "train_xmod").exists():
        fail("no train_xmod here: run make")
    if shutil.which("mpirun") is None:
        fail("no mpirun here: run scripts/install_deps.sh mpi")
    return arguments


def model_flag(arguments, name, default):
    words = arguments.model.split()
    return int(words[words.index(name) + 1]) if name in words else default


def batch_flags(arguments, case):
    if arguments.sequences % case.ranks:
        fail(f"--cases {case.text}: {arguments.sequences} sequences cannot be shared out among {case.ranks} ranks")
    return ["--batch-size", str(arguments.sequences // case.ranks), "--grad-accum", "1", "--zero", str(case.zero)]


def measure(arguments, case, folder):
    """Seconds of each step but the first."""
    command = ["mpirun", "-np", str(case.ranks), str(ROOT / "train_xmod"), "train", *arguments.model.split(),
               *batch_flags(arguments, case), "--threads", str(case.threads), "--steps", str(arguments.steps),
               "--train-data", "train.bin", "--checkpoint-interval", "0", "--out", "out"]
    shutil.rmtree(folder / "out", ignore_errors=True)
    run = subprocess.run(command, cwd=folder, env={**ENVIRONMENT, **os.environ}, capture_output=True, text=True)
    if run.returncode:
        fail(run.stderr.strip())
    rows = [line.split(",") for line in (folder / "out" / "metrics.csv").read_text().splitlines()]
    rate, tokens = rows[0].index("tokens_per_second"), int(rows[1][rows[0].index("tokens")])
    return [tokens / float(row[rate]) for row in rows[2:]]


def predict(arguments, case, flops):
    command = [ROOT / "train_xmod", "plan", *arguments.model.split(), *batch_flags(arguments, case), "--ranks",
               str(case.ranks), "--device-flops", repr(flops), "--bandwidth", str(arguments.bandwidth), "--json"]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        fail(run.stderr.strip())
    return json.loads(run.stdout)["parallel"]


def write_data(path, arguments):
    vocabulary, rng = model_flag(arguments, "--vocab-size", 256), random.Random(1)
    ids = [min(vocabulary - 1, int(rng.paretovariate(0.6))) for _ in range(400000)]
    path.write_bytes(struct.pack("<256i", 20240520, 1, len(ids), *[0] * 253) + struct.pack(f"<{len(ids)}H", *ids))


def main():
    arguments = read_arguments()
    cases = [Case(text) for text in arguments.cases]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder / "train.bin", arguments)
        for turn in range(arguments.rounds):
            for case in cases:
                case.seconds += measure(arguments, case, folder)
                print(f"round {turn + 1}, {case.text}: {case.seconds[-1]:.2f} s a step", file=sys.stderr, flush=True)
    first = cases[0]
    # Of a processor: what makes the first case's prediction its measured time.
    flops = 1e11 * predict(arguments, first, 1e11)["step_seconds"] / statistics.median(first.seconds) / first.cores()
    print(f"F of a processor: {flops:.3g} FLOP/s, from {first.text}\n")
    print("| ranks x threads | zero | measured s | from - to | predicted s | measured / predicted | tokens/s | of the first |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for case in cases:
        plan = predict(arguments, case, flops * case.cores())
        seconds = statistics.median(case.seconds)
        print(f"| {case.ranks} x {case.threads} | {case.zero} | {seconds:.3f} | {min(case.seconds):.3f} - "
              f"{max(case.seconds):.3f} | {plan['step_seconds']:.3f} | {seconds / plan['step_seconds']:.2f} | "
              f"{plan['step_tokens'] / seconds:.0f} | {statistics.median(first.seconds) / seconds:.2f} |")


if __name__ == "__main__":
    main()
