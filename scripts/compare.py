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
import csv
import difflib
import glob
import io
import json
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ROUTINGS = {"topk": "top-k", "threshold": "threshold"}  # as in metrics.csv and as in the tables
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")

# Flags of the trainer that no list may hold, and what to do instead.
SET_HERE = {flag: f"give compare.py {flag}" for flag in
            ("--train-data", "--val-data", "--compute", "--threads", "--out")}
SET_HERE |= {"--seed": "give compare.py --seeds", "--steps": "give compare.py --compute",
             "--resume": "runs are resumed by giving the same command again", "--help": "use train_xmod --help"}
WITHOUT_EFFECT = ["--out", "--threads", "--resume", "--checkpoint-interval", "--keep-checkpoints"]  # on the result
FILES = ["--train-data", "--val-data"]


class UserError(Exception):
    """One line: what is wrong, what was expected, what to do."""


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


def stem(path):
    return os.path.splitext(os.path.basename(path))[0]


# ---------------------------------------------------------------------------------------------- flags
# A dictionary of flag -> value as text, None for a flag without one.


def read_flags(words):
    flags = {}
    for word in words:
        if word.startswith("--") and len(word) > 2:
            flag, equals, value = word.partition("=")
            flags[flag] = value if equals else None
        elif flags and flags[flag] is None:
            flags[flag] = word
        else:
            raise UserError(f"found {word!r}, expected a flag such as --seq-len")
    return flags


def words_of(flags):
    return [word for flag, value in flags.items() for word in ([flag] if value is None else [flag, value])]


def known_flags(words, known):
    """The flags, each of which a user may give."""
    flags = read_flags(words)
    for flag in flags:
        if flag in SET_HERE:
            raise UserError(f"{flag} is the same for all runs; {SET_HERE[flag]}")
        if flag not in known:
            close = difflib.get_close_matches(flag, known, n=1)
            raise UserError(f"unknown flag {flag}" + (f", did you mean {close[0]}?" if close else
                                                      " (train_xmod --help lists them)"))
    return flags


def behind_dashes(words, known):
    try:
        return known_flags(words, known)
    except UserError as error:
        raise UserError(f"behind --: {error}")


def same(flag, a, b):
    if flag in FILES and a and b:
        return os.path.abspath(a) == os.path.abspath(b)
    return as_number(a) == as_number(b)


def as_number(text):
    try:
        return float(text)
    except (TypeError, ValueError):
        return text


def difference(found, expected):
    """Of two sets of flags the first that is not the same in both, in words; None if there is none."""
    def show(flags):
        return " ".join(words_of({flag: flags[flag]})) if flag in flags else f"no {flag}"

    for flag in list(expected) + list(found):
        if flag in WITHOUT_EFFECT or flag in found and flag in expected and same(flag, found[flag], expected[flag]):
            continue
        return f"{show(found)}, not {show(expected)}"
    return None


# ---------------------------------------------------------------------------------------- the trainer


def run_binary(binary, *words):
    """stdout; or a UserError with its complaint."""
    try:
        result = subprocess.run([binary, *words], capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise UserError(f"--binary {binary}: {error.strerror}; build it with make, or give another")
    if result.returncode != 0:
        raise UserError(complaint(result.stderr, result.returncode))
    return result.stdout


def complaint(text, status):
    """Why a run ended: its last line, and what happened to it."""
    lines = text.strip().splitlines()
    if status < 0:
        return f"killed by signal {-status}"
    return re.sub("^error: ", "", lines[-1]) if lines else f"exit status {status}"


def flags_of_help(binary, command):
    flags = re.findall(r"^  (--[a-z0-9-]+)", run_binary(binary, command, "--help"), re.MULTILINE)
    if not flags:
        raise UserError(f"--binary {binary}: its {command} --help lists no flags; give a train_xmod")
    return flags


def make_plan(options, configuration, known):
    """Layers, parameters and FLOPs: `train_xmod plan` with those of the flags that it takes."""
    flags = {flag: value for flag, value in configuration.flags.items() if flag in known}
    try:
        text = run_binary(options.binary, "plan", *words_of(flags), "--compute", options.compute, "--json")
    except UserError as error:
        raise UserError(f"{configuration.where}: {configuration.name}: {error}")
    return json.loads(text)


# ---------------------------------------------------------------------------------------------- lists


@dataclass
class Configuration:
    name: str
    own: dict  # flags, as in its line
    where: str  # file and line
    flags: dict = None  # all
    plan: dict = None


@dataclass
class Comparison:
    """What a list file says."""
    path: str
    title: str
    notes: list
    common: dict
    baseline: str  # or None
    configurations: list


def read_list(path, known, extra):
    comparison = Comparison(path, stem(path), [], {}, None, [])
    baseline_line = None
    for number, line in numbered_lines(path):
        try:
            key, text = split_line(line)
            if key == "baseline":
                baseline_line = number
            read_line(comparison, key, text, known, f"{path}:{number}")
        except UserError as error:
            raise UserError(f"{path}:{number}: {error}")
    names = [configuration.name for configuration in comparison.configurations]
    if not names:
        raise UserError(f"{path}: no configuration in it; expected lines such as `dense: --arch dense`")
    if comparison.baseline and comparison.baseline not in names:
        raise UserError(f"{path}:{baseline_line}: baseline {comparison.baseline} is not in the list; expected one of "
                        f"{', '.join(names)}")
    for configuration in comparison.configurations:
        configuration.flags = {**comparison.common, **configuration.own, **extra}
    return comparison


def numbered_lines(path):
    """(number, line) without comments and empty lines."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a list of configurations such as scripts/compare/table1.txt")
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text file; give a list of configurations")
    stripped = [re.sub(r"(^|\s)#.*", "", line).strip() for line in lines]
    return [(number, line) for number, line in enumerate(stripped, 1) if line]


def split_line(line):
    key, colon, text = line.partition(":")
    key = key.strip()
    if not colon or not NAME.fullmatch(key):
        raise UserError(f"found {line[:60]!r}, expected `name: flags` with a name of letters, digits and . _ + -")
    return key, text.strip()


def read_line(comparison, key, text, known, where):
    if key in ("title", "note", "common", "baseline"):
        if comparison.configurations:
            raise UserError(f"{key}: stands behind a configuration; move it before the first one")
        if key == "title":
            comparison.title = text
        elif key == "note":
            comparison.notes.append(text)
        elif key == "baseline":
            comparison.baseline = text
        else:
            comparison.common.update(known_flags(split_words(text), known))
        return
    for other in comparison.configurations:
        if other.name == key:
            raise UserError(f"{key} is already the name of the configuration at {other.where}; give it another name")
    comparison.configurations.append(Configuration(key, known_flags(split_words(text), known), where))


def split_words(text):
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{error} in {text[:60]!r}")


def distinct_configurations(comparisons):
    """Of all lists, each name once; it must mean the same everywhere."""
    by_name = {}
    for comparison in comparisons:
        for configuration in comparison.configurations:
            first = by_name.setdefault(configuration.name, configuration)
            unlike = difference(configuration.flags, first.flags)
            if unlike:
                raise UserError(f"{configuration.where}: {configuration.name} has {unlike} as at {first.where}; give "
                                "one of them another name")
    return list(by_name.values())


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


def count(number, noun):
    return f"{number} {noun}" + ("" if number == 1 else "s")


# --------------------------------------------------------------------------------------------- tables


class Losses:
    """Validation losses of a configuration under one routing: {seed: loss}, and those of the baseline."""

    def __init__(self, losses, baseline):
        self.losses = losses
        self.mean, self.spread = mean_and_spread(losses.values())
        common = [seed for seed in losses if seed in (baseline or {})]  # a difference compares the same seeds
        self.difference, self.difference_spread = mean_and_spread(losses[seed] - baseline[seed] for seed in common)


def mean_and_spread(values):
    """The mean and the sample standard deviation; None where there are too few values."""
    values = list(values)
    return (statistics.fmean(values) if values else None, statistics.stdev(values) if len(values) > 1 else None)


@dataclass
class Row:
    """A configuration's line in a table."""
    configuration: Configuration
    results: dict  # seed -> last row of metrics.csv, finished runs only
    losses: dict  # "topk", "threshold" -> Losses

    def tokens(self):
        """Trained on; before the first run is finished, what the compute pays for."""
        return int(next(iter(self.results.values()))["tokens"]) if self.results else self.configuration.plan["tokens"]


def make_rows(comparison, runs):
    results = {configuration.name: {} for configuration in comparison.configurations}
    for run in runs:
        if run.name in results and run.result():
            results[run.name][run.seed] = run.result()

    def losses(name, key):
        return {seed: row["val_loss_" + key] for seed, row in results.get(name, {}).items()}

    return [Row(configuration, results[configuration.name],
                {key: Losses(losses(configuration.name, key), losses(comparison.baseline, key)) for key in ROUTINGS})
            for configuration in comparison.configurations]


def write_tables(comparison, rows, options):
    base = os.path.join(options.out, stem(comparison.path))
    os.makedirs(options.out, exist_ok=True)
    write_whole(base + ".md", markdown(comparison, rows, options))
    write_whole(base + ".csv", comma_separated(rows, options.seeds))
    missing = missing_runs(rows, options.seeds)
    print(f"wrote {base}.md and .csv" + (f" ({count(len(missing), 'run')} missing)" if missing else ""))


def missing_runs(rows, seeds):
    return [f"{row.configuration.name} seed {seed}" for row in rows for seed in seeds if seed not in row.results]


def markdown(comparison, rows, options):
    baseline, seeds = comparison.baseline, options.seeds
    lines = [f"# {comparison.title}", ""]
    for note in comparison.notes:
        lines += [note, ""]
    missing = missing_runs(rows, seeds)
    if missing:
        lines += [f"**Incomplete:** {len(missing)} of {count(len(rows) * len(seeds), 'run')} missing: "
                  f"{', '.join(missing)}.", ""]
    header = ["configuration", "layers", "parameters", "FLOPs/token", "ratio to dense", "tokens"]
    for routing in ROUTINGS.values():
        header += [f"loss, {routing}"] + ([f"minus {baseline}"] if baseline else [])
    lines += [table_line(header), table_line(["---"] + ["---:"] * (len(header) - 1))]
    lines += [table_line(cells(row, baseline)) for row in rows]
    many = len(seeds) > 1
    lines += ["", f"Validation loss after {options.compute} training FLOPs, "
              + (f"mean ± sample standard deviation over the seeds {', '.join(map(str, seeds))}" if many
                 else f"seed {seeds[0]}")
              + ("; the difference is that of runs with the same seed" if many and baseline else "") + ".", ""]
    if comparison.common:
        lines += [f"Flags of all: `{shlex.join(words_of(comparison.common))}`"
                  + (f", then `{shlex.join(options.extra)}`" if options.extra else "") + ".", ""]
    own = [(row.configuration.name, shlex.join(words_of(row.configuration.own))) for row in rows]
    lines += [table_line(["configuration", "flags"]), table_line(["---", "---"])]
    lines += [table_line([name, f"`{flags}`" if flags else ""]) for name, flags in own]
    return "\n".join(lines) + "\n"


def table_line(cells):
    return "| " + " | ".join(cells) + " |"


def cells(row, baseline):
    plan = row.configuration.plan
    found = [row.configuration.name, str(plan["layers"]), show_count(plan["params_total"]),
             show_scientific(plan["flops_per_token"]), f"{plan['flops_ratio_to_dense']:.2f}", show_count(row.tokens())]
    for losses in row.losses.values():
        found.append(show_mean(losses.mean, losses.spread, ""))
        if baseline == row.configuration.name:
            found.append("0")
        elif baseline:
            found.append(show_mean(losses.difference, losses.difference_spread, "+"))
    return found


def show_mean(mean, spread, sign):
    if mean is None:
        return "–"
    return f"{mean:{sign}.4f}" + (f" ± {spread:.4f}" if spread is not None else "")


def show_count(number):
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.2f}{letter}"
    return str(number)


def show_scientific(number):
    """5.24e6"""
    return re.sub(r"e\+?(-?)0*", r"e\1", f"{number:.2e}")


def comma_separated(rows, seeds):
    plan_columns = ["layers", "dense_layers", "sparse_layers", "params_total", "flops_per_token",
                    "flops_ratio_to_dense"]
    header = ["configuration", "flags", *plan_columns, "tokens", "runs"]
    for key in ROUTINGS:
        header += [f"val_loss_{key}_{part}" for part in ("mean", "spread", "difference", "difference_spread")]
        header += [f"val_loss_{key}_seed_{seed}" for seed in seeds]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    for row in rows:
        found = [row.configuration.name, shlex.join(words_of(row.configuration.flags)),
                 *(row.configuration.plan[name] for name in plan_columns), row.tokens(), len(row.results)]
        for losses in row.losses.values():
            values = [losses.mean, losses.spread, losses.difference, losses.difference_spread]
            found += ["" if value is None else f"{value:.9g}" for value in values]
            found += [losses.losses.get(seed, "") for seed in seeds]
        writer.writerow(found)
    return text.getvalue()


def write_whole(path, text):
    with open(path + ".tmp", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(path + ".tmp", path)


# --------------------------------------------------------------------------------------------- picture


def draw(comparison, rows, runs, options):
    """Left the final losses, each seed a point, in the order of the list; right how the loss fell, in the same
    colours."""
    import plot_metrics as plot  # beside this script

    path = os.path.join(options.out, stem(comparison.path) + ".png")
    try:
        figure, (left, right) = plot.new_figure(1, 2, figsize=(13, 1.9 + 0.42 * max(7, len(rows))),
                                                gridspec_kw={"width_ratios": [1.25, 1]})
    except ImportError as error:
        raise UserError(f"{path}: a picture needs {error.name}; run scripts/install_deps.sh plot, or pip install "
                        "matplotlib, then this with --table-only; or give --no-picture")
    draw_final_losses(plot, left, comparison, rows, len(options.seeds))
    draw_curves(plot, right, rows, runs)
    figure.suptitle(comparison.title, x=0.02, ha="left", fontweight="bold")
    figure.tight_layout(w_pad=3)
    plot.save(figure, path)
    print(f"wrote {path}")


def draw_final_losses(plot, panel, comparison, rows, seeds):
    for i, row in enumerate(rows):
        colour = plot.COLOURS[i % len(plot.COLOURS)]
        topk, threshold = row.losses.values()
        parts = [(topk, 0, colour)] if topk.losses == threshold.losses else [(topk, -0.14, colour),
                                                                             (threshold, 0.14, "white")]
        for losses, offset, fill in parts if row.results else []:
            panel.plot([losses.mean] * 2, [i + offset - 0.13, i + offset + 0.13], color=colour, linewidth=2)
            values = list(losses.losses.values())
            panel.plot(values, [i + offset] * len(values), linestyle="", marker="o", markersize=6, color=colour,
                       markerfacecolor=fill)
        text = f"{topk.mean:.4f}" if row.results else ""
        if len(row.results) < seeds:
            text += f" ({len(row.results)} of {count(seeds, 'seed')})"
        panel.annotate(text.strip(), (1.01, i), xycoords=("axes fraction", "data"), color=colour, fontweight="bold",
                       va="center")
    for row in rows:
        if row.configuration.name == comparison.baseline and row.results:
            panel.axvline(row.losses["topk"].mean, color=plot.INK, linewidth=0.8, linestyle=plot.DASHES, zorder=0)
    panel.set_yticks(range(len(rows)), [row.configuration.name for row in rows])
    for i, label in enumerate(panel.get_yticklabels()):
        label.set_color(plot.COLOURS[i % len(plot.COLOURS)])
    panel.set_ylim(len(rows) - 0.5, -0.5)
    plot.style_panel(panel, "validation loss (nats per token), and its mean under top-k routing")
    explain_points(panel, plot)


def explain_points(panel, plot):
    from matplotlib.lines import Line2D

    point = {"color": plot.INK, "linestyle": "", "markersize": 6}
    panel.legend(handles=[Line2D([], [], marker="o", label="top-k routing", **point),
                          Line2D([], [], marker="o", markerfacecolor="white", label="threshold routing", **point),
                          Line2D([], [], marker="|", markeredgewidth=2, label="mean", **point)],
                 loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncol=3, frameon=False, handletextpad=0.2)


def draw_curves(plot, panel, rows, runs):
    """How the loss fell, the mean of the seeds."""
    curves = {}
    for i, row in enumerate(rows):
        seeds = [plot.read_run(run.directory) for run in runs
                 if run.name == row.configuration.name and run.seed in row.results]
        if seeds:
            curves[i] = mean_run(seeds)
            plot.draw_run(panel, curves[i], "flops", i, None, raw=False)
    panel.set_ylim(*plot.loss_limits(list(curves.values()), None, 0.08))
    panel.set_title("lines: training loss, points: validation loss; mean of the seeds", fontsize=10, loc="left")
    panel.set_ylabel("loss (nats per token)")
    plot.style_panel(panel, "training FLOPs", plot.format_flops)


def mean_run(seeds):
    """One run's columns, each value the mean over the seeds; they have the same steps."""
    def mean(values):
        return None if None in values else statistics.fmean(values)

    return {name: [mean(values) for values in zip(*(run[name] for run in seeds))] for name in seeds[0]}


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
