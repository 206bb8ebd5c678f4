#!/usr/bin/env python3
"""Tokens per second of generated text: the program with its key/value cache, without it, and the PyTorch module of
scripts/xmod_hf.py, both ways, in turn.

    scripts/bench_generate.py out/step_00000500 another/step_00000500 --max-new-tokens 200 --threads 1

All continue one line break with the same number of tokens, the most probable ones, and must write the same text. The
figure of a runner is the median over the repeats; starting a program and loading weights do not count.
"""

import argparse
import re
import statistics
import subprocess
import sys
import time

from bench_vs_pytorch import name_processor_to_openblas

name_processor_to_openblas()  # before PyTorch loads it

from prepare_data import UserError
from xmod_hf import load, tokenizer_of, torch

RUNNERS = ["C++", "C++ without cache", "PyTorch", "PyTorch without cache"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help="directory, such as out/step_00000500")
    parser.add_argument("--max-new-tokens", type=int, default=200, metavar="N", help="default %(default)s")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of each (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of each (default %(default)s)")
    parser.add_argument("--binary", default="./train_xmod", metavar="FILE", help="the program (default %(default)s)")
    arguments = parser.parse_args()
    for name in ("max_new_tokens", "threads", "repeats"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(arguments, name)}, expected at least 1")
    torch.set_num_threads(arguments.threads)
    print(f"{arguments.max_new_tokens} tokens, {arguments.threads} thread(s), median of {arguments.repeats}; "
          f"PyTorch {torch.__version__}\n")
    print("| model | " + " | ".join(f"{runner}, tokens/s" for runner in RUNNERS) + " | cache | of a dense model |")
    print("|---|" + "---|" * (len(RUNNERS) + 2))
    for checkpoint in arguments.checkpoints:
        measure(arguments, checkpoint)


def measure(arguments, checkpoint):
    model = load(checkpoint)
    tokenizer = tokenizer_of(checkpoint, model.config)
    if arguments.max_new_tokens >= model.config.max_position_embeddings:
        raise UserError(f"--max-new-tokens {arguments.max_new_tokens} does not fit the context of "
                        f"{model.config.max_position_embeddings} of {checkpoint}; give less")
    speeds, texts, report = {runner: [] for runner in RUNNERS}, set(), ""
    for _ in range(arguments.repeats):
        for flags in [], ["--no-cache"]:
            text, report_now = run_program(arguments, checkpoint, flags)
            report = report or report_now
            speeds[RUNNERS[len(flags)]].append(float(re.search(r"tokens, (\S+) a second", report_now)[1]))
            texts.add(text)
        for runner, cached in ("PyTorch", True), ("PyTorch without cache", False):
            begin = time.perf_counter()
            ids = run_module(model, tokenizer.encode("\n"), arguments.max_new_tokens, cached)
            speeds[runner].append(len(ids) / (time.perf_counter() - begin))
            texts.add(b"\n" + b"".join(tokenizer.tokens[id] for id in ids) + b"\n")
    config = model.config
    name = config.arch + (f" A{config.anchor_stride}K{config.token_sparsity}" if config.arch == "xmod" else "")
    medians = [statistics.median(speeds[runner]) for runner in RUNNERS]
    cache, dense = re.search(r"cache (\S+ MiB), of a dense model with \d+ layers (\S+ MiB)", report).groups()
    print(f"| {name} | " + " | ".join(f"{median:.0f}" for median in medians) + f" | {cache} | {dense} |", flush=True)
    if len(texts) != 1:
        raise UserError(f"{checkpoint}: the runners wrote {len(texts)} different texts, expected one")


def run_program(arguments, checkpoint, flags):
    command = [arguments.binary, "generate", "--checkpoint", checkpoint, "--prompt", "\n", "--temperature", "0",
               "--max-new-tokens", str(arguments.max_new_tokens), "--threads", str(arguments.threads), *flags]
    try:
        result = subprocess.run(command, capture_output=True)
    except OSError as error:
        raise UserError(f"cannot run {arguments.binary} ({error.strerror}): build it with make, or name it with --binary")
    message = result.stderr.decode(errors="replace").strip()
    if result.returncode:
        raise UserError(f"{arguments.binary} ended with status {result.returncode}: {message}")
    return result.stdout, message


def run_module(model, prompt, count, cached):
    """The most probable continuation; without the cache by a run over the whole text for each token."""
    if cached:
        return list(model.stream(prompt, count, temperature=0))
    text = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            text.append(int(model(torch.tensor([text]), routing="threshold").logits[0, -1].argmax()))
    return text[len(prompt):]


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"bench_generate.py: {error}")
