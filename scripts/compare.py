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
import math
import sys

from compare_lists import (UserError, as_number, behind_dashes, distinct_configurations, flags_of_help, make_plan,
                           read_list, stem)
from compare_tables import draw, make_rows, write_tables
from runs import Run, add_run_arguments, check_record, check_run_arguments, reporting_errors, train

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
    runs = [Run(configuration.name, seed, {**configuration.flags, "--compute": options.compute}, options)
            for seed in options.seeds for configuration in configurations]
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
    parser.add_argument("--compute", required=True, metavar="FLOPS", help="training FLOPs of each run, such as 2e13")
    parser.add_argument("--seeds", required=True, nargs="+", type=int, metavar="N", help="one run for each")
    add_run_arguments(parser)
    parser.add_argument("--table-only", action="store_true", help="train nothing, make the tables of what is there")
    parser.add_argument("--no-picture", action="store_true", help="write the tables only; needs no matplotlib")
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
    check_run_arguments(options, parser, data_needed=not options.table_only)
    for i, path in enumerate(options.lists):
        if stem(path) in map(stem, options.lists[:i]):
            parser.error(f"{path}: another list has the name {stem(path)} too, and tables are named after their "
                         "lists; rename one")


def usage_error(message):
    print(f"compare.py: {message}; see --help", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(reporting_errors(main, "compare.py"))
