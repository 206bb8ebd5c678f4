"""Training runs: what compare.py and sweep.py share. A run lies in OUT/NAME/seed-S with its metrics.csv, checkpoints,
log.txt and command.txt; what is finished stays, what was interrupted goes on from its last checkpoint."""

import glob
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

from compare_lists import (UserError, as_number, complaint, count, difference, read_flags, split_words, words_of,
                           write_whole)
from compare_tables import ROUTINGS

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# ----------------------------------------------------------------------------------------- command line


def add_run_arguments(parser):
    parser.add_argument("--train-data", required=True, metavar="GLOB", help="token shards to train on, in quotes")
    parser.add_argument("--val-data", required=True, metavar="GLOB", help="token shards to validate on")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for runs and tables; made if missing")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (default 1)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of a run (default: cores / jobs)")
    parser.add_argument("--binary", default=os.path.join(ROOT, "train_xmod"), metavar="FILE",
                        help="the trainer (default: train_xmod of this repository)")


def check_run_arguments(options, parser, data_needed):
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: expected 1 or more")
    if options.threads is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        options.threads = max(1, cores // options.jobs)
    if options.threads < 1:
        parser.error(f"--threads {options.threads}: expected 1 or more")
    for flag, pattern in (("--train-data", options.train_data), ("--val-data", options.val_data)):
        if data_needed and not glob.glob(pattern):
            raise UserError(f"{flag} {pattern}: no such file; give token shards that scripts/prepare_data.py wrote")


def reporting_errors(main, program):
    """Runs main(); its exit status, after one line where something went wrong."""
    try:
        return main()
    except UserError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{program}: {error.filename or 'cannot write'}: {error.strerror}; check the path, its permissions and "
              "the space on the disk", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{program}: stopped; the same command goes on from the last checkpoints", file=sys.stderr)
        return 130


# ----------------------------------------------------------------------------------------------- runs


class Run:
    """A training run, and what is known of it from its directory."""

    def __init__(self, name, seed, flags, options):
        """`flags` are those of the model and of the training; where the data lie, and the machine, options say."""
        self.name, self.seed, self.flops = name, seed, float(flags["--compute"])
        self.label = f"{name} seed {seed}"
        self.directory = os.path.join(options.out, name, f"seed-{seed}")
        self.flags = {**flags, "--train-data": os.path.abspath(options.train_data),
                      "--val-data": os.path.abspath(options.val_data), "--seed": str(seed),
                      "--threads": str(options.threads), "--out": self.directory, "--resume": None}
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

    def has_ended(self):
        """Nothing is left to train."""
        return self.result() is not None

    def newest_checkpoint(self):
        names = os.listdir(self.directory) if os.path.isdir(self.directory) else []
        return max((int(name[5:]) for name in names if re.fullmatch(r"step_\d{8}", name)), default=None)


def check_record(run):
    """A run that is there must have been made with the same flags."""
    if not os.path.exists(run.path("metrics.csv")) and not run.has_ended():
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


def train(runs, options, ended=lambda run: None):
    """Trains what has not ended, and calls ended(run) after each. Exit status: 0, 1 when a run failed."""
    waiting = [run for run in runs if not run.has_ended()]
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
            for run in collect(running, progress):
                ended(run)
            progress.show(running)
    finally:
        stop_processes(running.values())
        progress.clear()
        stop.restore()
    if stop.received:
        raise KeyboardInterrupt
    return 1 if progress.failures else 0


def collect(running, progress):
    """Takes the runs out whose trainers have ended; those that finished or diverged."""
    ended = []
    for run, process in list(running.items()):
        if process.poll() is None:
            continue
        del running[run]
        if process.returncode == 0 and run.result():
            progress.finished(run)
        else:
            progress.failed(run, why_failed(run, process.returncode))
        if run.has_ended():
            ended.append(run)
    return ended


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
        self.flops, self.flops_before = sum(run.flops for run in runs), self.flops_done()
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
        self.flops_before += (1 - self.shares[run]) * run.flops  # nothing more to wait for, nor done
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

    def flops_done(self):
        return sum(share * run.flops for run, share in self.shares.items())

    def time_left(self):
        """At the pace since the start, compute being the measure."""
        done = self.flops_done()
        if done >= self.flops or done - self.flops_before < 1e-3 * self.flops / self.total:
            return ""
        seconds = (self.flops - done) * (time.monotonic() - self.start) / (done - self.flops_before)
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
