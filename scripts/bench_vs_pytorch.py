#!/usr/bin/env python3
"""Race the C++ trainer against the same training step in PyTorch (scripts/quick_pytorch.py), in turn.

    scripts/bench_vs_pytorch.py                                   tiny, dense and X-MoD, fp32
    scripts/bench_vs_pytorch.py --size tiny 512 1024 --precision fp32 bf16
    scripts/bench_vs_pytorch.py --size 512 --arch dense --pytorch compiled --repeats 2 --require 1.5

Sizes: tiny (dim 128, T 256, batches of 8), 512 (T 1024, batches of 4) and 1024 (4 active layers, T 2048,
batches of 2), 8 active layers and a vocabulary of 8192 where nothing else is said; X-MoD is A1K4 at tiny, else
A1K8. Both train the same model (PyTorch reads the config.json that the C++ trainer wrote) on random tokens,
with the same batch, threads and optimizer (Muon and AdamW), and tell loss and gradient norm at every step. In
bf16 PyTorch runs under autocast, ours with --precision bf16.

A run is the median speed of its steps after the warm-up. The runs take turns, C++ PyTorch C++ PyTorch ..., so
that whatever else the machine does meets both; a ratio is of neighbours, and the result their median.
"""

import argparse
import array
import csv
import glob
import itertools
import os
import random
import shlex
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace

SIZES = {  # flags of the trainer, sequences a step, steps of a run
    "tiny": ("--preset tiny", 8, 8),
    "512": (
        "--vocab-size 8192 --dim 512 --active-layers 8 --heads 8 --kv-heads 4 --head-dim 64 --ffn-dim 1536 "
        "--seq-len 1024",
        4,
        3,
    ),
    "1024": (
        "--vocab-size 8192 --dim 1024 --active-layers 4 --heads 16 --kv-heads 8 --head-dim 128 --ffn-dim 3072 "
        "--seq-len 2048",
        2,
        2,
    ),
}
OURS = "C++"
OPPONENTS = {"eager": "PyTorch", "compiled": "PyTorch compiled"}


def fail(message):
    sys.exit("bench_vs_pytorch.py: " + message)


def say(message):
    print(message, flush=True)


@dataclass
class Race:
    size: str
    arch: str
    precision: str
    batch_size: int
    steps: int

    def __str__(self):
        return f"{self.size} {self.arch} {self.precision}"

    def model_flags(self):
        sparsity = "4" if self.size == "tiny" else "8"
        routing = ["--anchor-stride", "1", "--token-sparsity", sparsity] if self.arch == "xmod" else []
        return [*shlex.split(SIZES[self.size][0]), "--arch", self.arch, *routing]


# ---------------------------------------------------------------------------------------------------------
# The C++ trainer


class CannotRunFast(Exception):
    """This processor has no instructions for the precision."""


def write_random_shard(path, vocab_size, count=1 << 18):
    tokens = array.array("H", (token % vocab_size for token in random.Random(0).choices(range(65536), k=count)))
    with open(path, "wb") as file:
        file.write(struct.pack("<256i", 20240520, 1, count, *[0] * 253) + tokens.tobytes())


def run_cpp(race, args, folder):
    """The tokens per second of each step, and the last loss."""
    out = os.path.join(folder, "cpp")
    command = [args.binary, "train", *race.model_flags(), "--precision", race.precision]
    command += ["--train-data", os.path.join(folder, "random.bin"), "--out", out, "--eval-interval", "0"]
    command += ["--steps", str(race.steps), "--batch-size", str(race.batch_size), "--threads", str(args.threads)]
    command += shlex.split(args.options)
    shutil.rmtree(out, ignore_errors=True)
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        fail(f"cannot run {args.binary} ({error.strerror}): build it with make, or name it with --binary")
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        if "no fast instructions" in last:
            raise CannotRunFast(last.removeprefix("error: "))
        fail(f"{shlex.join(command)} ended with status {done.returncode}: {last}")
    with open(os.path.join(out, "metrics.csv"), newline="") as file:
        rows = list(csv.DictReader(file))
    return [float(row["tokens_per_second"]) for row in rows], float(rows[-1]["train_loss"])


def written_config(folder):
    """The text of the config.json of the model that the C++ trainer just trained."""
    found = glob.glob(os.path.join(folder, "cpp", "*", "config.json"))
    if not found:
        fail("the C++ trainer left no checkpoint with a config.json")
    with open(found[0]) as file:
        return file.read()


# ---------------------------------------------------------------------------------------------------------
# PyTorch; imported late, so that a mistyped option needs no packages to be found out


def name_processor_to_openblas():
    """An OpenBLAS older than the processor takes it for an ancient one, and is five times as slow."""
    try:
        with open("/proc/cpuinfo") as file:
            features = file.read().split()
    except OSError:
        return
    for feature, core in (("avx512bw", "SkylakeX"), ("avx2", "Haswell")):
        if feature in features:
            os.environ.setdefault("OPENBLAS_CORETYPE", core)


def require_fast_blas(args):
    name_processor_to_openblas()  # before PyTorch loads it
    from quick_pytorch import blas_name, matmul_gflops, torch

    speed, blas = matmul_gflops(args.threads), blas_name()
    say(f"PyTorch {torch.__version__}, {blas}, {speed:.0f} GFLOP/s in a matmul with {args.threads} threads")
    if blas == "reference BLAS" and not args.any_blas:
        fail(
            "this PyTorch multiplies with the slow reference BLAS, which makes the race unfair: "
            "apt install libopenblas0-pthread, or pip install torch (or race anyway with --any-blas)"
        )


def make_opponents(race, args, config_json):
    """Those of --pytorch that work here, by name, after a first step."""
    from quick_pytorch import Opponent
    from xmod_reference import Config

    config, opponents = Config.from_json(config_json), {}
    for kind in args.pytorch:
        say(f"{race}: first step of {OPPONENTS[kind]}")
        try:
            opponent = Opponent(config, race.precision, kind == "compiled", race.batch_size, args.threads)
            opponent.run(1)
            opponents[OPPONENTS[kind]] = opponent
        except Exception as error:  # torch.compile fails in many ways: no compiler, an old Python, an operation
            if kind == "eager":
                raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            say(f"{race}: torch.compile does not work here: {reason}")
    return opponents


# ---------------------------------------------------------------------------------------------------------
# The race


class OtherPrograms:
    """The share of the machine's processors that others took, since this object was made; None if not known."""

    def __init__(self):
        self.start = self.used()

    @staticmethod
    def used():
        """Seconds of all processors in use, of all processors, and those that we and our children used."""
        try:
            with open("/proc/stat") as file:
                ticks = [int(word) for word in file.readline().split()[1:9]]
        except (OSError, ValueError):
            return None
        hertz, idle = os.sysconf("SC_CLK_TCK"), ticks[3] + ticks[4]
        return (sum(ticks) - idle) / hertz, sum(ticks) / hertz, sum(os.times()[:4])

    def share(self):
        if self.start is None:
            return None
        busy, all_time, own = (now - then for now, then in zip(self.used(), self.start))
        return max(0.0, (busy - own) / all_time) if all_time > 0 else None


def run_race(race, args, races_left):
    """The speeds of every contestant, one for each repeat; their last losses; what other programs took."""
    speeds, losses = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        write_random_shard(os.path.join(folder, "random.bin"), 256 if race.size == "tiny" else 8192)
        say(f"{race}: first step of {OURS}")
        run_cpp(replace(race, steps=1), args, folder)
        opponents = make_opponents(race, args, written_config(folder))
        contestants = {OURS: lambda: run_cpp(race, args, folder)}
        for name, opponent in opponents.items():
            contestants[name] = lambda opponent=opponent: opponent.run(race.steps)
        others, start = OtherPrograms(), time.time()
        for repeat in range(args.repeats):
            for name, run in contestants.items():
                steps, losses[name] = run()
                speeds.setdefault(name, []).append(statistics.median(steps[args.warmup :]))
            left = (time.time() - start) / (repeat + 1) * (args.repeats - repeat - 1)
            told = ", ".join(f"{name} {values[-1]:.0f}" for name, values in speeds.items())
            say(
                f"{race}: run {repeat + 1} of {args.repeats}: {told} tokens/s; "
                f"{left:.0f} s left, then {races_left} more models"
            )
    return speeds, losses, others.share()


# ---------------------------------------------------------------------------------------------------------
# The report


@dataclass
class Result:
    race: Race
    opponent: str
    ours: list  # tokens per second, one for each run
    theirs: list
    losses: dict
    others: float  # share of the processors that other programs took, or None

    def ratios(self):
        return [ours / theirs for ours, theirs in zip(self.ours, self.theirs)]

    def ratio(self):
        return statistics.median(self.ratios())

    def cells(self):
        race, ratios = self.race, self.ratios()
        return [
            race.size,
            race.arch,
            race.precision,
            str(race.batch_size),
            self.opponent,
            f"{statistics.median(self.ours):.0f}",
            f"{statistics.median(self.theirs):.0f}",
            f"{self.ratio():.2f} ({min(ratios):.2f} to {max(ratios):.2f}), {len(ratios)} pairs",
            f"{self.losses[OURS]:.3f} / {self.losses[self.opponent]:.3f}",
            "-" if self.others is None else f"{self.others:.0%}",
        ]


def print_table(results):
    head = ["size", "arch", "precision", "batch", "opponent", "C++ tokens/s", "its tokens/s", "ratio (by pair)"]
    rows = [head + ["last losses", "other programs"], *(result.cells() for result in results)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    rows.insert(1, ["-" * width for width in widths])
    say("")
    for row in rows:
        say("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |")


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--binary", default="./train_xmod", help="the C++ trainer (default %(default)s)")
    add("--size", nargs="+", default=["tiny"], choices=SIZES, help="(default tiny)")
    add("--arch", nargs="+", default=["dense", "xmod"], choices=["dense", "xmod"], help="(default both)")
    add("--precision", nargs="+", default=["fp32"], choices=["fp32", "bf16"], help="(default fp32)")
    add("--pytorch", nargs="+", default=list(OPPONENTS), choices=OPPONENTS, help="(default both)")
    add("--options", default="", help="further options of the C++ trainer, in one string")
    add("--threads", type=int, default=os.cpu_count(), help="of all (default %(default)s)")
    add("--batch-size", type=int, help="sequences a step (default: by size)")
    add("--steps", type=int, help="optimizer steps a run (default: 8 at tiny, 3 at 512, 2 at 1024)")
    add("--warmup", type=int, default=1, help="steps of a run not counted (default %(default)s)")
    add("--repeats", type=int, default=5, help="runs of each (default %(default)s)")
    add("--require", type=float, metavar="RATIO", help="exit with 1 if C++ is not that much faster in each row")
    add("--any-blas", action="store_true", help="race even a PyTorch with a slow BLAS")
    args = parser.parse_args()
    for name, least in (("batch_size", 1), ("threads", 1), ("repeats", 1), ("warmup", 0), ("steps", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} is {value}, expected at least {least}")
    for size in args.size:
        if args.warmup >= (args.steps or SIZES[size][2]):
            parser.error(f"--warmup is {args.warmup}, expected less than the --steps of a run")
    return args


def main():
    args = parse_arguments()
    require_fast_blas(args)
    races = [
        Race(size, arch, precision, args.batch_size or SIZES[size][1], args.steps or SIZES[size][2])
        for size, arch, precision in itertools.product(args.size, args.arch, args.precision)
    ]
    results = []
    for number, race in enumerate(races):
        try:
            speeds, losses, others = run_race(race, args, len(races) - number - 1)
        except CannotRunFast as error:
            say(f"{race}: left out, since {OURS} cannot run it fast here: {error}")
            continue
        ours = speeds.pop(OURS)
        for opponent, theirs in speeds.items():
            results.append(Result(race, opponent, ours, theirs, losses, others))
    if not results:
        fail("nothing was raced; the lines above say why")
    print_table(results)
    slow = [result for result in results if args.require and result.ratio() < args.require]
    if slow:
        worst = min(slow, key=Result.ratio)
        fail(
            f"{worst.race}: C++ is {worst.ratio():.2f} times as fast as {worst.opponent}, "
            f"--require asks for {args.require}"
        )


if __name__ == "__main__":
    main()
