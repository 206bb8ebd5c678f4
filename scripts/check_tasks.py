#!/usr/bin/env python3
"""Checks the scores of `train_xmod eval --tasks` against an independent scoring with the PyTorch reference.

    check_tasks.py --checkpoint out/step_00000500 --tasks tasks/*.bin --max-items 200

runs the program and scripts/xmod_reference.py over the first items of each file, the latter one choice at a time, and
compares item by item: which choice each takes, by log-likelihood and by log-likelihood per byte (or token, in files
without byte lengths); whether greedy decoding writes LAMBADA's word; and the log-likelihoods themselves. The exit status
is 1 if any item differs.
"""

import argparse
import json
import math
import os
import struct
import subprocess
import sys
import tempfile
import time
from array import array

from prepare_data import UserError
from xmod_hf import load
from xmod_reference import torch

TASKS = [None, "hellaswag", "arc-easy", "arc-challenge", "piqa", "lambada", "boolq"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="checkpoint, such as out/step_00000500")
    parser.add_argument("--tasks", required=True, nargs="+", metavar="FILE", help="files of scripts/prepare_eval.py")
    parser.add_argument("--max-items", type=int, default=200, metavar="N", help="items of each file (default 200; 0: all)")
    parser.add_argument("--binary", default="./train_xmod", metavar="FILE", help="the program (default ./train_xmod)")
    parser.add_argument("--double", action="store_true", help="let PyTorch compute in double precision")
    arguments = parser.parse_args()
    try:
        model = load(arguments.checkpoint, torch.float64 if arguments.double else torch.float32)
        same = True
        for path in arguments.tasks:
            theirs = program_scores(arguments, path)
            same = compare(path, theirs, reference_scores(model, path, len(theirs))) and same
    except (OSError, KeyError, ValueError, struct.error, UserError) as error:
        sys.exit(f"check_tasks.py: {' '.join(str(error).split())}; give a checkpoint and files that eval --tasks takes")
    sys.exit(0 if same else 1)


# ------------------------------------------------------------------------------------------------ scores


def program_scores(arguments, path):
    """The items as the program scores them, in the words of its --per-item file."""
    with tempfile.TemporaryDirectory() as folder:
        items = os.path.join(folder, "items.jsonl")
        run = subprocess.run([arguments.binary, "eval", "--checkpoint", arguments.checkpoint, "--tasks", path,
                              "--max-items", str(arguments.max_items), "--per-item", items], stdout=subprocess.DEVNULL)
        if run.returncode != 0:
            sys.exit(f"check_tasks.py: {arguments.binary} eval ended with status {run.returncode}")
        with open(items) as file:
            return [json.loads(line) for line in file]


def reference_scores(model, path, number):
    """The same by the PyTorch reference."""
    task, items = read_task_file(path)
    scores, start, shown = [], time.monotonic(), time.monotonic()
    for index, (gold, context, choices, lengths) in enumerate(items[:number]):
        results = [score_choice(model, context, choice) for choice in choices]
        likelihoods = [likelihood for likelihood, _ in results]
        score = {"gold": gold, "loglikelihoods": likelihoods}
        if task == "lambada":
            score["greedy"] = results[0][1]
        else:
            score["choice"] = first_largest(likelihoods)
        if task not in ("lambada", "boolq"):
            score["choice_norm"] = first_largest([l / length for l, length in zip(likelihoods, lengths)])
        scores.append(score)
        if time.monotonic() - shown > 10:
            shown = time.monotonic()
            left = (shown - start) / (index + 1) * (number - index - 1)
            print(f"{path}: item {index + 1} of {number} in PyTorch, {left:.0f} s left", file=sys.stderr)
    return scores


def first_largest(values):
    return max(range(len(values)), key=values.__getitem__)


def score_choice(model, context, choice):
    """(log-likelihood of the choice behind the context, whether each of its tokens is the most probable one)"""
    T = model.config.max_position_embeddings
    tokens = context + choice
    likelihood, greedy = 0.0, True
    for begin in range(len(context), len(tokens), T):  # once, unless the choice alone is longer than T
        end = min(begin + T, len(tokens))
        inputs = tokens[max(0, end - 1 - T):end - 1]
        with torch.no_grad():
            logits = model(torch.tensor([inputs]), routing="threshold").logits[0, begin - end:].double()
        targets = torch.tensor(tokens[begin:end])
        likelihood += logits.log_softmax(-1).gather(1, targets[:, None]).sum().item()
        greedy = greedy and bool((logits.argmax(-1) == targets).all())
    return likelihood, greedy


def compare(path, theirs, ours):
    keys = [key for key in ("choice", "choice_norm", "greedy") if key in ours[0]]
    different = {key: [i for i, (a, b) in enumerate(zip(theirs, ours)) if a[key] != b[key]] for key in keys}
    gaps = [abs(x - y) for a, b in zip(theirs, ours) for x, y in zip(a["loglikelihoods"], b["loglikelihoods"])]
    parts = [f"{key} equal in {len(ours) - len(items)}" for key, items in different.items()]
    parts += [f"item {items[0]} differs in {key}" for key, items in different.items() if items]
    print(f"{path}: {len(ours)} items, {', '.join(parts)}; log-likelihoods differ by {max(gaps):.2g} at most, "
          f"{math.fsum(gaps) / len(gaps):.2g} on average", flush=True)
    return not any(different.values()) and all(a["gold"] == b["gold"] for a, b in zip(theirs, ours))


# ------------------------------------------------------------------------------------------------- files


def read_task_file(path):
    """(task, items); an item is (right choice, context, choices, lengths by which to normalise)."""
    with open(path, "rb") as file:
        data = file.read()
    magic, version, number, _, task, _, _, has_lengths = struct.unpack("<8i", data[:32])
    if magic != 20240522 or version not in (1, 2):
        raise ValueError(f"{path}: not an evaluation file")
    numbers = array("H" if version == 1 else "I", data[1024:])
    if sys.byteorder == "big":
        numbers.byteswap()
    items, place = [], 0
    for _ in range(number):
        _, _, _, gold, choices = numbers[place:place + 5]
        place, parts = place + 5, []
        for _ in range(1 + choices):
            parts.append(list(numbers[place + 1:place + 1 + numbers[place]]))
            place += 1 + numbers[place]
        items.append((gold, parts[0], parts[1:], [len(part) for part in parts[1:]]))
    if has_lengths:
        lengths = iter(numbers[place:])
        items = [(gold, context, choices, [next(lengths) for _ in choices]) for gold, context, choices, _ in items]
    return TASKS[task], items


if __name__ == "__main__":
    main()
