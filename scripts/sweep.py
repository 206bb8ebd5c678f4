#!/usr/bin/env python3
"""Trains a grid of models at matched compute for the scaling law: X-MoDs of several K and A, and the dense models of the
same backbones and contexts that they are compared with.

    scripts/sweep.py scripts/sweeps/tiny.toml --train-data 'data/train_*.bin' --val-data 'data/val_*.bin' --out sweep

writes OUT/runs.csv, a row a run, for scripts/scaling_law.py, and OUT/held_out.csv with the runs that the law is not to be
fitted to. Each run lies in OUT/NAME/seed-S with its metrics.csv, checkpoints, log.txt and command.txt. The same command
goes on where an earlier one was stopped: finished runs stay as they are, interrupted ones are resumed from their last
checkpoint. When a run fails the others go on; one whose loss becomes NaN gets a row that says so, and is not repeated.

A grid is a TOML file:

    compute = 1e13            # training FLOPs of a run; a list for several
    seeds = [1, 2]
    tokens_per_step = 2048    # the same at all contexts: sequences of a batch = tokens_per_step / context
    val_tokens = 65536        # of the validation text, evaluated at the end of each run
    flags = "--lr 0.003"      # of train_xmod train, for every run

    [backbones.tiny]          # all of: active_layers dense_prefix dim heads kv_heads head_dim ffn_dim vocab_size
    active_layers = 8
    ...

    [[points]]                # every combination; a dense model of each backbone, context, compute and seed is added
    backbones = ["tiny"]
    contexts = [128, 256]
    K = [2, 4, 8]
    A = [1]

    [[points]]                # any number of parts, trained in this order
    backbones = ["tiny"]
    contexts = [512]
    K = [4]
    A = [2]
    seeds = [1]               # in place of the seeds above; compute as well
    held_out = true           # into held_out.csv
"""

import argparse
import csv
import io
import os
import re
import shlex
import sys

from compare_lists import Configuration, UserError, count, flags_of_help, make_plan, words_of, write_whole
from runs import Run, add_run_arguments, check_record, check_run_arguments, reporting_errors, train
from sweep_grid import read_grid, show

COLUMNS = """name arch backbone seed L K A prefix N_act N params_matrix layers dense_layers sparse_layers active_layers dim
heads kv_heads head_dim ffn_dim vocab_size compute tokens flops_per_token flops_ratio_to_dense steps val_loss_topk
val_loss_threshold train_loss seconds dataset command""".split()

# ----------------------------------------------------------------------------------------------- main


def main():
    options = parse_arguments()
    known = {command: flags_of_help(options.binary, command) for command in ("train", "plan")}
    grid = read_grid(options.grid, known["train"])
    plans = {}
    for setting, _ in grid.order:
        if setting not in plans:
            plans[setting] = plan_of(setting, grid, options, known["plan"])
    runs = [SweepRun(setting, seed, grid, plans[setting], options) for setting, seed in grid.order]
    for run in runs:
        check_record(run)
    tables = {path: Table(os.path.join(options.out, path), pairs, runs, options) for path, pairs in
              (("runs.csv", grid.fitted), ("held_out.csv", grid.held_out)) if pairs}
    if options.list:
        return list_runs(runs)

    def write_tables(_=None):
        for table in tables.values():
            table.write()

    os.makedirs(options.out, exist_ok=True)
    write_tables()
    status = 0 if options.table_only else train(runs, options, write_tables)
    for table in tables.values():
        print(table.summary())
    return status


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: sys.exit(usage_error(message))
    parser.add_argument("grid", metavar="GRID", help="TOML file such as scripts/sweeps/tiny.toml")
    add_run_arguments(parser)
    parser.add_argument("--dataset", metavar="NAME", help="what the rows call the data (default: --train-data)")
    parser.add_argument("--list", action="store_true", help="train nothing, show the runs and what is done of them")
    parser.add_argument("--table-only", action="store_true", help="train nothing, write the rows of what is there")
    options = parser.parse_args()
    check_run_arguments(options, parser, data_needed=not (options.list or options.table_only))
    options.dataset = options.dataset or options.train_data
    return options


def usage_error(message):
    print(f"sweep.py: {message}; see --help", file=sys.stderr)
    return 2


def plan_of(setting, grid, options, known):
    options.compute = show(setting.compute)  # as make_plan reads it
    return make_plan(options, Configuration(setting.name(), {}, grid.path, grid.flags_of(setting)), known)


def list_runs(runs):
    for run in runs:
        state = "diverged" if run.diverged() else "finished" if run.result() else f"{100 * run.share_done():.0f}%"
        print(f"{state:>8}  {run.label}: {run.plan['layers']} layers, {run.plan['params_total'] / 1e6:.2f}M parameters, "
              f"{run.plan['tokens'] / 1e6:.2f}M tokens")
    print(f"{sum(run.has_ended() for run in runs)} of {count(len(runs), 'run')} done")
    return 0


# ----------------------------------------------------------------------------------------------- rows


class SweepRun(Run):
    def __init__(self, setting, seed, grid, plan, options):
        super().__init__(setting.name(), seed, grid.flags_of(setting), options)
        self.setting, self.plan, self.shape = setting, plan, grid.backbones[setting.backbone]

    def has_ended(self):
        return self.result() is not None or self.diverged()

    def diverged(self):
        """The trainer stops at a loss or a gradient that is no number, and says so in its last line."""
        try:
            with open(self.path("log.txt"), encoding="utf-8", errors="replace") as log:
                last = log.read().rstrip().rpartition("\n")[2]
        except OSError:
            return False
        return re.search(r"\bstep \d+: the [a-z ]+ is (NaN|infinite), stopped before", last) is not None

    def row(self, options):
        """As COLUMNS; None before the end."""
        if not self.has_ended():
            return None
        setting, plan, steps = self.setting, self.plan, self.metrics()
        last = self.result() or {"val_loss_topk": "nan", "val_loss_threshold": "nan"}
        late = steps[-max(1, len(steps) // 10):] if self.result() else []  # one batch says little
        return {
            "name": self.name, "arch": "dense" if setting.a is None else "xmod", "backbone": setting.backbone,
            "seed": self.seed, "L": setting.context, "K": setting.k, "A": "" if setting.a is None else setting.a,
            "prefix": self.shape["dense_prefix"], "N_act": plan["params_active"], "N": plan["params_total"],
            **{key: plan[key] for key in ("params_matrix", "layers", "dense_layers", "sparse_layers",
                                          "flops_per_token", "flops_ratio_to_dense")},
            **{key: value for key, value in self.shape.items() if key != "dense_prefix"},
            "compute": show(setting.compute), "tokens": int(steps[-1]["tokens"]) if steps else 0,
            "steps": int(steps[-1]["step"]) if steps else 0, "val_loss_topk": last["val_loss_topk"],
            "val_loss_threshold": last["val_loss_threshold"],
            "train_loss": f"{sum(float(step['train_loss']) for step in late) / len(late):.6f}" if late else "nan",
            "seconds": f"{seconds_of(steps):.1f}", "dataset": options.dataset, "command": self.command_for_others(options)}

    def metrics(self):
        """The rows of metrics.csv, without one that is cut off."""
        try:
            with open(self.path("metrics.csv"), encoding="utf-8", newline="") as file:
                text = file.read()
        except OSError:
            return []
        return list(csv.DictReader(text[:text.rfind("\n") + 1].splitlines()))

    def command_for_others(self, options):
        """Paths as they were given, and none of this machine's."""
        flags = {**self.flags, "--train-data": options.train_data, "--val-data": options.val_data}
        return shlex.join([os.path.basename(options.binary), "train", *words_of(flags)])


def seconds_of(steps):
    """Of training, over all interruptions, without evaluations."""
    total, before = 0, 0
    for step in steps:
        tokens = int(step["tokens"])
        total += (tokens - before) / float(step["tokens_per_second"])
        before = tokens
    return total


class Table:
    """A CSV file with a row for each run that has ended. It is written anew, and appears whole. Rows of runs that are
    not in this grid stay where they are: several grids may share a folder."""

    def __init__(self, path, pairs, runs, options):
        self.path, self.options = path, options
        self.runs = [run for run in runs if (run.setting, run.seed) in pairs]
        self.others = self.rows_of_others()

    def rows_of_others(self):
        try:
            with open(self.path, encoding="utf-8", newline="") as file:
                text = file.read()
        except FileNotFoundError:
            return []
        except UnicodeDecodeError:
            raise UserError(f"{self.path}: not a text file; move it away, or give another --out")
        whole = text[:text.rfind("\n") + 1]  # a row without its end was being written when the machine stopped
        rows = list(csv.reader(whole.splitlines()))
        if rows and rows[0] != COLUMNS:
            raise UserError(f"{self.path}:1: the columns of another kind of table; move it away, or give another --out")
        ours = {(run.name, str(run.seed)) for run in self.runs}
        rows = [dict(zip(COLUMNS, row)) for row in rows[1:] if len(row) == len(COLUMNS)]
        return [row for row in rows if (row["name"], row["seed"]) not in ours]

    def write(self):
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.others)
        writer.writerows(row for row in (run.row(self.options) for run in self.runs) if row)
        write_whole(self.path, text.getvalue())

    def summary(self):
        diverged = [run.label for run in self.runs if run.diverged()]
        done = sum(run.has_ended() for run in self.runs)
        return (f"{self.path}: {done} of {count(len(self.runs), 'run')}"
                + (f", {count(len(self.others), 'row')} of other grids" if self.others else "")
                + (f"; the loss became NaN in {', '.join(diverged)}" if diverged else ""))


if __name__ == "__main__":
    sys.exit(reporting_errors(main, "sweep.py"))
