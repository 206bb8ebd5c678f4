#!/usr/bin/env python3
"""The scaling law of X-MoD: how far its loss lies from that of the dense model with the same active parameters,
context and training FLOPs, as a law in N, Nact, L, K and A.

    scripts/scaling_law.py fit sweep/runs.csv --out law.json
    scripts/scaling_law.py crossval sweep/runs.csv
    scripts/scaling_law.py plot sweep/runs.csv --law law.json --out law

fit finds the constants by robust least squares within bounds from many starts, their intervals by bootstrap, and tells
which of them the data determine. crossval leaves out one value of L, A, Nact or K at a time and predicts its runs from
the rest; then the largest value of each from the smaller ones. `COMMAND --help` tells the rest.
"""

import argparse
import json
import os
import sys

import law_crossval
import law_fit
import law_report
from law_runs import fail, read_runs


def log(text):
    """Progress, where somebody watches."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def settings_of(options):
    settings = law_fit.Settings(options.starts, options.bootstrap, options.seed, fixed=dict(options.fix),
                                bounds=dict(options.bounds), signed=options.signed)
    if options.prior:
        constants = law_report.read_law(options.prior, complete=False)["constants"]
        settings.priors = {name: (value, options.prior_width) for name, value in constants.items()
                           if value is not None and name not in settings.fixed}
    return settings


def read(options, settings):
    runs = read_runs(options.runs, options.routing)
    law_report.require_identified(runs, settings)
    return runs


def fit(runs, settings):
    log(f"fitting from {settings.starts} starts")
    found = law_fit.fit(runs, settings)
    log(f"fitting {settings.bootstrap} samples")
    law_fit.bootstrap(found, runs)
    log("")
    return found


def run_fit(options):
    settings = settings_of(options)
    runs = read(options, settings)
    found = fit(runs, settings)
    print(law_report.describe(runs) + "\n")
    print(law_report.fit_text(found, runs))
    if options.out:
        write_whole(options.out, json.dumps(law_report.law_json(found, runs, options.routing), indent=1) + "\n")
        print(f"\nwrote {options.out}")


def run_crossval(options):
    settings = settings_of(options)
    runs = read(options, settings)
    found = law_fit.fit(runs, settings)
    print(law_report.describe(runs) + "\n\nAll runs\n" + law_report.error_text(found, runs) + "\n")
    left_out = [p for factor in law_crossval.FACTORS for p in law_crossval.leave_one_out(runs, settings, factor, log)]
    log("")
    print(law_crossval.crossval_text(left_out, "Leaving one group out") + "\n")
    beyond = law_crossval.out_of_range(runs, settings, log)
    log("")
    print(law_crossval.crossval_text(beyond, "Beyond the range of the fit"))


def run_plot(options):
    settings = settings_of(options)
    runs = read(options, settings)
    try:
        import law_plots
        import plot_metrics
    except ImportError as error:
        fail(f"needs {error.name}: run scripts/install_deps.sh plot, or pip install {error.name}")
    found = law_fit.fit(runs, settings)
    predictions = {factor: law_crossval.leave_one_out(runs, settings, factor, log) for factor in ("L", "A", "N_act", "K")}
    beyond = law_crossval.out_of_range(runs, settings, log)
    log("")
    for name, figure in (("regularities", law_plots.regularities(runs, found, options.absolute)),
                         ("predictions", law_plots.predictions(runs, found, predictions, beyond))):
        path = f"{options.out}_{name}.{options.format}"
        plot_metrics.save(figure, path)
        print(f"wrote {path}")


def write_whole(path, text):
    temporary = path + ".tmp"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError as error:
        if os.path.isfile(temporary):
            os.remove(temporary)
        fail(f"cannot write {path}: {error.strerror}")


# ---------------------------------------------------------------------------------------------------------------


def constant_value(text):
    name, _, value = text.partition("=")
    if name not in law_fit.NAMES or name in law_fit.EFFECTS:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=VALUE with e or an exponent, as rho_A=1")
    try:
        return name, float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: {value!r} is not a number") from None


def constant_bounds(text):
    name, _, value = text.partition("=")
    try:
        low, high = map(float, value.split(":"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=LOW:HIGH, as eta_N=-1:2") from None
    if name not in law_fit.NAMES or name in law_fit.EFFECTS or low >= high:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=LOW:HIGH with e or an exponent, LOW below HIGH")
    return name, (low, high)


def count(least):
    def parse(text):
        if not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, {least} or more")
        return int(text)
    return parse


def add_fit_options(parser):
    parser.add_argument("runs", metavar="RUNS", help="the runs.csv of a sweep")
    parser.add_argument("--routing", choices=("topk", "threshold"), default="topk", help="whose validation loss "
                        "(default: topk)")
    parser.add_argument("--prior", metavar="FILE", help="constants that pull the fit towards them, such as "
                        "scripts/paper_law.json; off by default")
    parser.add_argument("--prior-width", type=float, default=0.1, metavar="X", help="relative standard deviation of the "
                        "prior (default: 0.1)")
    parser.add_argument("--fix", type=constant_value, action="append", default=[], metavar="NAME=VALUE",
                        help="hold e or an exponent at a value, as rho_A=1; may be repeated")
    parser.add_argument("--bounds", type=constant_bounds, action="append", default=[], metavar="NAME=LOW:HIGH",
                        help="other bounds for e or an exponent; may be repeated")
    parser.add_argument("--signed", action="store_true", help="let u, w and z be negative")
    parser.add_argument("--starts", type=count(1), default=64, metavar="N", help="descents from random constants "
                        "(default: 64)")
    parser.add_argument("--bootstrap", type=count(20), default=400, metavar="N", help="samples for the intervals "
                        "(default: 400)")
    parser.add_argument("--seed", type=count(0), default=1, metavar="N", help="of starts and samples (default: 1)")


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, run, text in (("fit", run_fit, "fit the law to the runs of a sweep"),
                            ("crossval", run_crossval, "predict runs that the law was not fitted to"),
                            ("plot", run_plot, "draw the runs, the law and its predictions")):
        command = commands.add_parser(name, help=text, description=text)
        add_fit_options(command)
        command.set_defaults(run=run)
        if name == "fit":
            command.add_argument("--out", metavar="FILE", help="write the law for predict, recommend and "
                                 "`train_xmod plan --law`")
        if name == "plot":
            command.add_argument("--out", required=True, metavar="PREFIX", help="writes PREFIX_regularities and "
                                 "PREFIX_predictions")
            command.add_argument("--format", choices=("png", "svg", "pdf"), default="png")
            command.add_argument("--absolute", action="store_true", help="losses instead of differences to dense")
    options = parser.parse_args()
    if getattr(options, "prior_width", 1) <= 0:
        parser.error(f"--prior-width {options.prior_width}: expected more than 0")
    return options


def main():
    options = parse_options()
    try:
        options.run(options)
    except ImportError as error:
        fail(f"needs {error.name}: run scripts/install_deps.sh plot, or pip install {error.name}")


if __name__ == "__main__":
    main()
