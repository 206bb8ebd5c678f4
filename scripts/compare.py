#!/usr/bin/env python3
"""Trains a list of configurations on the same data with the same compute and seeds, and compares them.

    scripts/compare.py scripts/compare/table1.txt --train-data 'data/train_*.bin' --val-data 'data/val_*.bin' \\
        --compute 2e13 --seeds 1 2 --out compared --jobs 2 --threads 1

writes OUT/table1.md, OUT/table1.csv and OUT/table1.png; each run lies in OUT/NAME/seed-S with its metrics.csv,
checkpoints, log.txt and command.txt. The same command goes on where an earlier one was stopped: finished runs stay
as they are, interrupted ones are resumed from their last checkpoint. When a run fails the others go on. Several
lists may be given: a configuration that stands in more than one is trained once.

A list is a text file, one configuration a line; # begins a comment. Lines before the first configuration say what
holds for all:

    title: Dense and X-MoD                      above the table
    note: K is half of the paper's.             below the title; any number of them
    common: --preset tiny --seq-len 512         flags of every configuration; any number of such lines
    baseline: dense                             the configuration that the difference columns refer to

    dense: --arch dense
    xmod-A1K4: --arch xmod --token-sparsity 4

Flags are those of `train_xmod train`. Of a repeated flag the last one counts: common, the configuration's, those
behind -- on the command line.
"""

import argparse
import glob
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

from compare_lists import (UserError, as_number, behind_dashes, complaint, count, difference, distinct_configurations,
                           flags_of_help, make_plan, read_flags, read_list, split_words, stem, words_of, write_whole)
from compare_tables import ROUTINGS, draw, make_rows, write_tables

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# ----------------------------------------------------------------------------------------------- main


def main():
    options = parse_arguments()
    known = {command: flags_of_help(options.binary, command) for command in ("train", "plan")}
    extra = behind_dashes(options.extra, known["train"])
    comparisons = [read_list(path, known["train"], extra) for path in options.lists]
    configurations = distinct_configurations(comparisons)
    for comparison in comparisons:
        for configuration in comparison.configurations:
            configuration.plan = make_plan(options, configuration, known["plan"])
    runs = [Run(configuration, seed, options) for seed in options.seeds for configuration in configurations]
    for run in runs:
        check_record(run)
    status = 0 if options.table_only else train(runs, options)
    tables = [(comparison, make_rows(comparison, runs)) for comparison in comparisons]
    for comparison, rows in tables:
        write_tables(comparison, rows, options)
    for comparison, rows in tables:
        if any(row.results for row in rows) and not options.no_picture:
            draw(comparison, rows, runs, options)
    return status


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage="compare.py LIST [LIST ...] --train-data GLOB --val-data GLOB --compute "
                                           "FLOPS --seeds N [N ...] --out DIR [options] [-- FLAGS]")
    parser.error = lambda message: sys.exit(usage_error(message))
    parser.add_argument("lists", nargs="+", metavar="LIST", help="text file with configurations")
    parser.add_argument("--train-data", required=True, metavar="GLOB", help="token shards to train on, in quotes")
    parser.add_argument("--val-data", required=True, metavar="GLOB", help="token shards to validate on")
    parser.add_argument("--compute", required=True, metavar="FLOPS", help="training FLOPs of each run, such as 2e13")
    parser.add_argument("--seeds", required=True, nargs="+", type=int, metavar="N", help="one run for each")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for runs and tables; made if missing")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (default 1)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of a run (default: cores / jobs)")
    parser.add_argument("--table-only", action="store_true", help="train nothing, make the tables of what is there")
    parser.add_argument("--no-picture", action="store_true", help="write the tables only; needs no matplotlib")
    parser.add_argument("--binary", default=os.path.join(ROOT, "train_xmod"), metavar="FILE",
                        help="the trainer (default: train_xmod of this repository)")
    words = sys.argv[1:]
    dashes = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:dashes])
    options.extra = words[dashes + 1:]
    check_arguments(options, parser)
    return options


def check_arguments(options, parser):
    options.flops = as_number(options.compute)
    if not isinstance(options.flops, float) or not 0 < options.flops < math.inf:
        parser.error(f"--compute {options.compute}: expected a number of FLOPs above 0, such as 2e13")
    for seed in options.seeds:
        if seed < 0 or options.seeds.count(seed) > 1:
            parser.error(f"--seeds {seed}: expected numbers of 0 or more, each once")
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: expected 1 or more")
    if options.threads is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        options.threads = max(1, cores // options.jobs)
    if options.threads < 1:
        parser.error(f"--threads {options.threads}: expected 1 or more")
    for flag, pattern in (("--train-data", options.train_data), ("--val-data", options.val_data)):
        if not options.table_only and not glob.glob(pattern):
            raise UserError(f"{flag} {pattern}: no such file; give token shards that scripts/prepare_data.py wrote")
    for i, path in enumerate(options.lists):
        if stem(path) in map(stem, options.lists[:i]):
            parser.error(f"{path}: another list has the name {stem(path)} too, and tables are named after their "
                         "lists; rename one")


def usage_error(message):
    print(f"compare.py: {message}; see --help", file=sys.stderr)
    return 2


# ----------------------------------------------------------------------------------------------- runs


class Run:
    """A configuration with a seed, and what is known of it from its directory."""

    def __init__(self, configuration, seed, options):
        self.name, self.seed, self.flops = configuration.name, seed, options.flops
        self.label = f"{self.name} seed {seed}"
        self.directory = os.path.join(options.out, self.name, f"seed-{seed}")
        self.flags = {**configuration.flags, "--train-data": os.path.abspath(options.train_data),
                      "--val-data": os.path.abspath(options.val_data), "--compute": options.compute,
                      "--seed": str(seed), "--threads": str(options.threads), "--out": self.directory, "--resume": None}
        self.command = [options.binary, "train", *words_of(self.flags)]

    def path(self, name):
        return os.path.join(self.directory, name)

    def last_row(self):
        """Of metrics.csv, as numbers; None before the first step. What follows the last newline is incomplete."""
        try:
            with open(self.path("metrics.csv"), "rb") as file:
                header = file.readline()
                file.seek(max(len(header), file.seek(0, os.SEEK_END) - 4096))
                lines = file.read().split(b"\n")[:-1]
        except OSError:
            return None
        if not lines:
            return None
        names, cells = header.decode(errors="replace").strip().split(","), lines[-1].decode(errors="replace").split(",")
        row = {name: as_number(cell) for name, cell in zip(names, cells)}
        return row if isinstance(row.get("step"), float) and isinstance(row.get("flops"), float) else None

    def share_done(self):
        row = self.last_row()
        return min(1, row["flops"] / self.flops) if row else 0

    def result(self):
        """The last row of a finished run; None otherwise."""
        row = self.last_row()
        if not row or not isinstance(row.get("val_loss_topk"), float):
            return None
        steps = self.flops / (row["flops"] / row["step"])  # the trainer goes to the nearest whole number
        saved = self.newest_checkpoint()  # none: they were removed to save space
        return row if row["step"] > steps - 0.5001 and saved in (None, row["step"]) else None

    def newest_checkpoint(self):
        names = os.listdir(self.directory) if os.path.isdir(self.directory) else []
        return max((int(name[5:]) for name in names if re.fullmatch(r"step_\d{8}", name)), default=None)


def check_record(run):
    """A run that is there must have been made with the same flags."""
    if not os.path.exists(run.path("metrics.csv")):
        return  # it did not come to its first step
    remedy = f"give another --out, or remove {run.directory} to train it anew"
    try:
        with open(run.path("command.txt"), encoding="utf-8") as file:
            words = split_words(file.read())
        unlike = difference(read_flags(words[words.index("train") + 1:]), run.flags)
    except FileNotFoundError:
        raise UserError(f"{run.directory}: holds a run without a command.txt that tells its flags; {remedy}")
    except (UserError, ValueError):
        raise UserError(f"{run.path('command.txt')}: not a command of train_xmod train; {remedy}")
    if unlike:
        raise UserError(f"{run.label} was trained with {unlike} ({run.path('command.txt')}); {remedy}")


# ------------------------------------------------------------------------------------------- training


def train(runs, options):
    """Trains what is not finished. Exit status: 0, 1 when a run failed."""
    waiting = [run for run in runs if not run.result()]
    progress = Progress(runs, waiting)
    running = {}  # run -> process
    stop = StopSignals()
    try:
        while (waiting or running) and not stop.received:
            if waiting and len(running) < options.jobs:
                run = waiting.pop(0)
                running[run] = start(run)
                progress.started(run)
                continue
            time.sleep(0.05)
            collect(running, progress)
            progress.show(running)
    finally:
        stop_processes(running.values())
        progress.clear()
        stop.restore()
    if stop.received:
        raise KeyboardInterrupt
    return 1 if progress.failures else 0


def collect(running, progress):
    """Takes the runs out that have ended."""
    for run, process in list(running.items()):
        if process.poll() is None:
            continue
        del running[run]
        if process.returncode == 0 and run.result():
            progress.finished(run)
        else:
            progress.failed(run, why_failed(run, process.returncode))


def start(run):
    """The trainer in a session of its own, so that Ctrl-C reaches it through us only."""
    os.makedirs(run.directory, exist_ok=True)
    write_whole(run.path("command.txt"), shlex.join(run.command) + "\n")
    with open(run.path("log.txt"), "ab") as log:
        return subprocess.Popen(run.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


def why_failed(run, status):
    if status == 0:
        return "it ended before its last step"
    with open(run.path("log.txt"), encoding="utf-8", errors="replace") as log:
        return complaint(log.read(), status)


def stop_processes(processes):
    """A trainer may end at any moment: its files are whole, and --resume goes on from the last checkpoint."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class StopSignals:
    """Notes Ctrl-C, kill and a closed terminal instead of breaking off in the middle of something."""

    def __init__(self):
        self.received = False
        self.former = {number: signal.signal(number, self.note)
                       for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def note(self, *_):
        self.received = True

    def restore(self):
        for number, handler in self.former.items():
            signal.signal(number, handler)


class Progress:
    """A line for each run that starts or ends. Between them the state of all: on a terminal in a line that is
    rewritten, else in a line each minute."""

    def __init__(self, runs, waiting):
        self.runs, self.total = runs, len(runs)
        self.done, self.failures = self.total - len(waiting), 0
        self.terminal = sys.stdout.isatty()
        self.start = self.shown = time.monotonic()
        self.start_of = {}  # run -> time
        self.shares = {run: 1 if run not in waiting else run.share_done() for run in runs}
        self.shares_before = sum(self.shares.values())
        if self.done:
            self.line(f"{self.done} of {count(self.total, 'run')} finished already")

    def started(self, run):
        self.start_of[run] = time.monotonic()
        share = self.shares[run]
        self.line(f"{run.label}: " + (f"going on from {100 * share:.0f}%" if share else "started"))

    def finished(self, run):
        self.done += 1
        self.shares[run] = 1
        row = run.result()
        losses = " ".join(f"{row['val_loss_' + key]:.4f} {routing}" for key, routing in ROUTINGS.items())
        seconds = time.monotonic() - self.start_of[run]
        self.line(f"{run.label}: finished in {show_duration(seconds)}, validation loss {losses}; {self.state()}")

    def failed(self, run, why):
        self.failures += 1
        self.shares_before += 1 - self.shares[run]  # nothing more to wait for, nor done
        self.shares[run] = 1
        self.line(f"{run.label}: FAILED: {why} ({run.path('log.txt')}); {self.state()}")

    def show(self, running):
        now = time.monotonic()
        if now - self.shown < (0.5 if self.terminal else 60) or not running:
            return
        self.shown = now
        for run in running:
            self.shares[run] = run.share_done()
        parts = [f"{run.name} {run.seed}: {100 * self.shares[run]:.0f}%" for run in running]
        text = " | ".join([self.state(), *parts])
        if self.terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r{text[:width]:<{width}}", end="", flush=True)
        else:
            print(text, flush=True)

    def state(self):
        failed = f", {self.failures} failed" if self.failures else ""
        return f"{self.done} of {count(self.total, 'run')} done{failed}{self.time_left()}"

    def time_left(self):
        """At the pace since the start, a run's share of its compute being the measure."""
        done = sum(self.shares.values())
        if done >= self.total or done - self.shares_before < 1e-3:
            return ""
        seconds = (self.total - done) * (time.monotonic() - self.start) / (done - self.shares_before)
        return f", {show_duration(seconds)} left"

    def line(self, text):
        self.clear()
        print(text, flush=True)

    def clear(self):
        if self.terminal:
            print(f"\r{'':{shutil.get_terminal_size().columns - 1}}\r", end="", flush=True)


def show_duration(seconds):
    """1h02m, 3m05s, 12s"""
    s = round(seconds)
    return f"{s // 3600}h{s // 60 % 60:02}m" if s >= 3600 else f"{s // 60}m{s % 60:02}s" if s >= 60 else f"{s}s"


# ---------------------------------------------------------------------------------------------- errors


def run():
    try:
        return main()
    except UserError as error:
        return f"compare.py: {error}"
    except OSError as error:
        return (f"compare.py: {error.filename or 'cannot write'}: {error.strerror}; check the path, its permissions "
                "and the space on the disk")
    except KeyboardInterrupt:
        print("compare.py: stopped; the same command goes on from the last checkpoints", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(run())
