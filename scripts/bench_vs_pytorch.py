#!/usr/bin/env python3
"""Race the C++ trainer against the same training step in PyTorch (scripts/xmod_reference.py), in turn.

    scripts/bench_vs_pytorch.py --threads 2                       tiny X-MoD, random bytes
    scripts/bench_vs_pytorch.py --arch dense --batch-size 16 --require 2
    scripts/bench_vs_pytorch.py --options "--active-layers 6 --token-sparsity 8"

Both train the same model (PyTorch reads the config.json that the C++ trainer wrote), in fp32, with the same
batch, threads and optimizer (Muon and AdamW), and tell loss and gradient norm at every step. A run is the
median speed of its steps after the warm-up; the runs alternate, C++ PyTorch C++ PyTorch ..., so that whatever
else the machine does meets both. The result is the median over the pairs of neighbours.
"""

import argparse
import csv
import glob
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time


def name_processor_to_openblas():
    """An OpenBLAS older than the processor takes it for an ancient one, and is five times as slow."""
    with open("/proc/cpuinfo") as file:
        features = file.read().split()
    for feature, core in (("avx512bw", "SkylakeX"), ("avx2", "Haswell")):
        if feature in features:
            os.environ.setdefault("OPENBLAS_CORETYPE", core)


name_processor_to_openblas()  # before NumPy or PyTorch load it

import numpy as np

import xmod_reference  # says how to get PyTorch where it is missing
from xmod_reference import Config, Trainer, XMod, torch

TOKEN_WIDTHS = {(20240520, 1): np.uint16, (20240801, 7): np.uint32}  # by (magic, version) of a shard


def fail(message):
    sys.exit("bench_vs_pytorch.py: " + message)


# ---------------------------------------------------------------------------------------------------------
# Data


def write_random_shard(path, count=1 << 20):
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, count
    tokens = np.random.RandomState(0).randint(0, 256, count).astype(np.uint16)
    with open(path, "wb") as file:
        file.write(header.tobytes() + tokens.tobytes())


def read_shard(path):
    header = np.fromfile(path, np.int32, 256)
    if len(header) < 256 or tuple(header[:2]) not in TOKEN_WIDTHS:
        fail(f"{path} is no token shard; write one with scripts/prepare_data.py")
    return np.memmap(path, TOKEN_WIDTHS[tuple(header[:2])], mode="r", offset=1024, shape=(header[2],))


def random_batch(tokens, B, T, rng):
    rows = np.stack([tokens[start : start + T + 1] for start in rng.randint(0, len(tokens) - T, B)])
    rows = torch.from_numpy(rows.astype(np.int64))
    return rows[:, :-1], rows[:, 1:]


# ---------------------------------------------------------------------------------------------------------
# The reference is written to be read. The same arithmetic, with what this PyTorch has that is quicker:


def newton_schulz(U):
    if U.size(-2) > U.size(-1):
        return newton_schulz(U.mT).mT
    X = U / (torch.linalg.matrix_norm(U, keepdim=True) + 1e-7)
    for _ in range(5):
        A = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=-4.7750, alpha=2.0315), X, beta=3.4445)
    return X


def quicken():
    F = torch.nn.functional

    def attention(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def norm(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    xmod_reference.newton_schulz = newton_schulz
    if hasattr(F, "scaled_dot_product_attention"):  # PyTorch 2.0
        xmod_reference.causal_attention = attention
    if hasattr(F, "rms_norm"):  # PyTorch 2.4
        xmod_reference.RMSNorm.forward = norm


def quick_trainer(config):
    trainer = Trainer(XMod(config))
    keys = ("params", "lr", "betas", "eps", "weight_decay")
    groups = [{key: group[key] for key in keys} for group in trainer.adamw.param_groups]
    for option in (dict(fused=True), dict(foreach=True)):
        try:
            trainer.adamw = torch.optim.AdamW(groups, **option)
            break
        except (TypeError, RuntimeError):  # fused on the CPU came with PyTorch 2.4
            continue
    return trainer


# ---------------------------------------------------------------------------------------------------------
# The two runners: each returns the tokens per second of its steps, and the last loss


def run_cpp(args, data, out):
    command = [args.binary, "train", "--preset", args.preset, "--arch", args.arch, "--eval-interval", "0"]
    command += ["--train-data", data, "--out", out, "--steps", str(args.steps)]
    command += ["--batch-size", str(args.batch_size), "--threads", str(args.threads)]
    command += shlex.split(args.options)
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        fail(f"cannot run {args.binary} ({error.strerror}): build it with make, or name it with --binary")
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        fail(f"{shlex.join(command)} ended with status {done.returncode}: {last}")
    with open(os.path.join(out, "metrics.csv"), newline="") as file:
        rows = list(csv.DictReader(file))
    if len(rows) <= args.warmup:
        fail(f"{out}/metrics.csv has {len(rows)} rows, expected one for each of {args.steps} steps")
    return [float(row["tokens_per_second"]) for row in rows], float(rows[-1]["train_loss"])


class PyTorchRunner:
    def __init__(self, args, config, tokens):
        torch.set_num_threads(args.threads)
        torch.manual_seed(0)
        quicken()
        self.trainer = quick_trainer(config)
        self.args, self.tokens, self.T = args, tokens, config.max_position_embeddings
        self.rng = np.random.RandomState(0)

    def run(self):
        speeds = []
        for _ in range(self.args.steps):
            start = time.perf_counter()
            inputs, targets = random_batch(self.tokens, self.args.batch_size, self.T, self.rng)
            output, grad_norm = self.trainer.step(inputs, targets)
            loss, _ = output.loss.item(), grad_norm.item()
            speeds.append(inputs.numel() / (time.perf_counter() - start))
        return speeds, loss


def read_config(out):
    """Of the model that the C++ trainer just trained."""
    found = sorted(glob.glob(os.path.join(out, "*", "config.json")))
    if not found:
        fail(f"the trainer left no checkpoint with a config.json in {out}")
    with open(found[-1]) as file:
        return Config.from_json(file.read())


# ---------------------------------------------------------------------------------------------------------
# Is PyTorch at its best here?


def blas_of_pytorch():
    """The library that multiplies PyTorch's matrices, as far as the process shows."""
    if torch.backends.mkl.is_available():
        return "MKL"
    with open("/proc/self/maps") as file:
        mapped = {os.path.basename(line.split()[-1]) for line in file if "/" in line}
    for name in ("openblas", "blis", "atlas"):
        if any(name in library for library in mapped):
            return name
    return "reference BLAS"


def matmul_gflops(n=512):
    a = torch.randn(n, n)
    a @ a
    times = []
    for _ in range(5):
        start = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - start)
    return 2e-9 * n**3 / min(times)


def require_fast_blas(args):
    torch.set_num_threads(args.threads)
    speed, blas = matmul_gflops(), blas_of_pytorch()
    print(f"PyTorch {torch.__version__}, {blas}, {speed:.0f} GFLOP/s in a matmul with {args.threads} threads")
    if blas == "reference BLAS" and not args.any_blas:
        fail(
            "this PyTorch multiplies with the slow reference BLAS, which makes the race unfair: "
            "apt install libopenblas0-pthread, or pip install torch (or race anyway with --any-blas)"
        )


# ---------------------------------------------------------------------------------------------------------


def report(args, speeds, losses):
    model = " ".join([args.arch, args.preset, args.options]).strip()
    print(f"\n{model}, fp32, batch {args.batch_size}, {args.threads} threads")
    print(f"{args.repeats} runs each of {args.steps} steps, {args.warmup} of them to warm up\n")
    print(f"| {'':8} | tokens/s | slowest | fastest | last loss |")
    print(f"|{'-' * 10}|---------:|--------:|--------:|----------:|")
    for name, values in speeds.items():
        median, loss = statistics.median(values), losses[name]
        print(f"| {name:8} | {median:8.0f} | {min(values):7.0f} | {max(values):7.0f} | {loss:9.4f} |")
    ratios = [cpp / pytorch for cpp, pytorch in zip(speeds["C++"], speeds["PyTorch"])]
    ratio = statistics.median(ratios)
    print(f"\nC++ is {ratio:.2f} times as fast as PyTorch ({min(ratios):.2f} to {max(ratios):.2f} by pair).")
    return ratio


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--binary", default="./train_xmod", help="the C++ trainer (default %(default)s)")
    parser.add_argument("--preset", default="tiny", help="model size (default %(default)s)")
    parser.add_argument("--arch", default="xmod", help="dense, mod or xmod (default %(default)s)")
    parser.add_argument("--options", default="", help="further options of the trainer, in one string")
    parser.add_argument("--train-data", metavar="GLOB", help="token shards (default: random bytes)")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences a step (default %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of both (default %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps a run (default %(default)s)")
    parser.add_argument(
        "--warmup", type=int, default=2, help="steps of a run not counted (default %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=5, help="runs of each (default %(default)s)")
    parser.add_argument(
        "--require", type=float, metavar="RATIO", help="exit with 1 if C++ is not that much faster"
    )
    parser.add_argument("--any-blas", action="store_true", help="race even a PyTorch with a slow BLAS")
    args = parser.parse_args()
    for name in ("batch_size", "threads", "repeats"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}, expected at least 1")
    if not 0 <= args.warmup < args.steps:
        parser.error(f"--warmup is {args.warmup}, expected at least 0 and less than --steps {args.steps}")
    require_fast_blas(args)

    speeds, losses = {"C++": [], "PyTorch": []}, {}
    with tempfile.TemporaryDirectory() as folder:
        data = args.train_data
        if data is None:
            data = os.path.join(folder, "random_train.bin")
            write_random_shard(data)
        shards = sorted(glob.glob(data)) or fail(f"--train-data {data} matches no file")
        opponent = None
        for repeat in range(args.repeats):
            out = os.path.join(folder, f"run{repeat}")
            results = {"C++": run_cpp(args, data, out)}
            opponent = opponent or PyTorchRunner(args, read_config(out), read_shard(shards[0]))
            results["PyTorch"] = opponent.run()
            for name, (steps, loss) in results.items():
                speeds[name].append(statistics.median(steps[args.warmup :]))
                losses[name] = loss
            pair = ", ".join(f"{name} {values[-1]:.0f}" for name, values in speeds.items())
            print(f"run {repeat + 1}/{args.repeats}: {pair} tokens/s", flush=True)
    ratio = report(args, speeds, losses)
    if args.require and ratio < args.require:
        fail(f"C++ is {ratio:.2f} times as fast as PyTorch, --require asks for {args.require}")


if __name__ == "__main__":
    main()
