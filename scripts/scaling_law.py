#!/usr/bin/env python3
"""The scaling law of X-MoD: how far its loss lies from that of the dense model with the same active parameters,
context and training FLOPs, as a law in N, Nact, L, K and A.

    scripts/scaling_law.py fit sweep/runs.csv --out law.json
    scripts/scaling_law.py crossval sweep/runs.csv
    scripts/scaling_law.py plot sweep/runs.csv --out law
    scripts/scaling_law.py check sweep/held_out.csv sweep/runs.csv --law law.json
    scripts/scaling_law.py predict --law law.json --active 165M --context 2048 --compute 1e18 --sparsities 4 8
    scripts/scaling_law.py recommend --law law.json --active 165M --context 2048 --compute 1e18 --memory 24

fit finds the constants by robust least squares within bounds from many starts, their intervals by bootstrap, and tells
which of them the data determine. crossval leaves out one value of L, A, Nact or K at a time and predicts its runs from
the rest; then the largest value of each from the smaller ones. plot draws both. check compares the predictions of a
fitted law with runs. recommend finds the K and A of least predicted loss whose training fits the memory, by the counts
of `train_xmod plan`; predict gives the same for K and A of your choice.
"""

import argparse
import json
import math
import os
import sys

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy comes: the matrices are too small for threads

try:
    import law_crossval
    import law_fit
    import law_recommend
    import law_report
    from law_runs import fail, read_runs
except ImportError as error:
    sys.exit(f"scaling_law.py: needs {error.name}: run scripts/install_deps.sh plot, or pip install {error.name}")


def log(text):
    """Progress, where somebody watches."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def settings_of(options):
    fixed = dict(options.fix)
    for name, exponents in law_fit.EXPONENTS.items():
        if name in fixed:  # at 0: without the term its exponents mean nothing
            fixed = {**dict.fromkeys(exponents, 1.0), **fixed}
    settings = law_fit.Settings(options.starts, options.bootstrap, options.seed, fixed=fixed,
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
    if options.out:
        write_whole(options.out, json.dumps(law_report.law_json(found, runs, options.routing), indent=1) + "\n")
    print(law_report.describe(runs) + "\n")
    print(law_report.fit_text(found, runs))
    if options.out:
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
    predictions = {factor: law_crossval.leave_one_out(runs, settings, factor, log)
                   for factor in ("L", "A", "N_act", "K")}
    beyond = law_crossval.out_of_range(runs, settings, log)
    log("")
    for name, figure in (("regularities", law_plots.regularities(runs, found, options.absolute)),
                         ("predictions", law_plots.predictions(runs, found, predictions, beyond))):
        path = f"{options.out}_{name}.{options.format}"
        plot_metrics.save(figure, path)
        print(f"wrote {path}")


def run_check(options):
    law = law_recommend.Law(options.law)
    print(law_recommend.check_text(law, read_runs(options.runs, options.routing)))


def run_predict(options):
    law = law_recommend.Law(options.law)
    found = law_recommend.candidates(law, options)
    if options.json:
        return print_json(law_recommend.candidates_json(law, options, found, found))
    print(law_recommend.table(law_recommend.HEADER, [law_recommend.row_of(law, options, c, wins=False) for c in found]))


def run_recommend(options):
    law = law_recommend.Law(options.law)
    found = law_recommend.candidates(law, options)
    text = law_recommend.recommendation_text(law, options, found)
    if options.json:
        ranked = law_recommend.choose(found, options.memory * 2**30)
        return print_json(law_recommend.candidates_json(law, options, found, ranked))
    print(text)


def print_json(value):
    print(json.dumps(value, indent=1))


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
    name, _, number = text.partition("=")
    try:
        value = float(number)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=VALUE, as rho_A=1") from None
    if name not in law_fit.NAMES or name in law_fit.EFFECTS and value != 0 or not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r}: expected e or an exponent, as rho_A=1, or u, w or z at 0")
    return name, value


def constant_bounds(text):
    name, _, value = text.partition("=")
    try:
        low, high = map(float, value.split(":"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=LOW:HIGH, as eta_N=-1:2") from None
    if name not in law_fit.NAMES or name in law_fit.EFFECTS or not -math.inf < low < high < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=LOW:HIGH with e or an exponent, LOW below HIGH")
    return name, (low, high)


def count(least):
    def parse(text):
        if not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, {least} or more")
        return int(text)
    return parse


def positive(text):
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0")
    return value


def add_runs(parser):
    parser.add_argument("runs", nargs="+", metavar="RUNS", help="runs.csv of a sweep; of several, all rows")
    parser.add_argument("--routing", choices=("topk", "threshold"), default="topk", help="whose validation loss "
                        "(default: topk)")


def add_law(parser):
    parser.add_argument("--law", required=True, metavar="FILE", help="what fit --out wrote")


def add_model_options(parser):
    parser.add_argument("--active", required=True, metavar="N", help="the backbone: a name or a size in the sweep of "
                        "the law, or a preset of train_xmod")
    parser.add_argument("--context", required=True, type=count(1), metavar="L", help="tokens of a sequence")
    parser.add_argument("--compute", required=True, type=positive, metavar="C", help="training FLOPs, as 1e18")
    parser.add_argument("--sparsities", type=count(1), nargs="+", default=law_recommend.SPARSITIES, metavar="K",
                        help="default: " + " ".join(map(str, law_recommend.SPARSITIES)))
    parser.add_argument("--strides", type=count(1), nargs="+", default=law_recommend.STRIDES, metavar="A",
                        help="default: " + " ".join(map(str, law_recommend.STRIDES)))
    parser.add_argument("--batch-size", type=count(1), default=1, metavar="N", help="sequences of a micro-batch, for "
                        "the memory (default: 1)")
    parser.add_argument("--binary", default=os.path.join(os.path.dirname(sys.path[0]), "train_xmod"), metavar="FILE",
                        help="the trainer whose plan counts (default: train_xmod of this repository)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.epilog = "What follows -- goes to `train_xmod plan` as it is: --precision bf16, --dim 640, ..."


def add_fit_options(parser):
    add_runs(parser)
    parser.add_argument("--prior", metavar="FILE", help="constants that pull the fit towards them, such as "
                        "scripts/paper_law.json; off by default")
    parser.add_argument("--prior-width", type=positive, default=0.1, metavar="X", help="relative standard deviation of "
                        "the prior (default: 0.1)")
    parser.add_argument("--fix", type=constant_value, action="append", default=[], metavar="NAME=VALUE",
                        help="hold e or an exponent at a value, as rho_A=1, or leave out a term, as z=0; may be "
                        "repeated")
    parser.add_argument("--bounds", type=constant_bounds, action="append", default=[], metavar="NAME=LOW:HIGH",
                        help="other bounds for e or an exponent; may be repeated")
    parser.add_argument("--signed", action="store_true", help="let u, w and z be negative")
    parser.add_argument("--starts", type=count(1), default=64, metavar="N", help="descents from random constants "
                        "(default: 64)")
    parser.add_argument("--bootstrap", type=count(20), default=400, metavar="N", help="samples for the intervals "
                        "(default: 400)")
    parser.add_argument("--seed", type=count(0), default=1, metavar="N", help="of starts and samples (default: 1)")


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"scaling_law.py: {message}; see {self.prog} --help\n")


def parse_options():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name, run, text):
        part = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        part.set_defaults(run=run)
        return part

    fit = command("fit", run_fit, "fit the law to the runs of a sweep")
    add_fit_options(fit)
    fit.add_argument("--out", metavar="FILE", help="write the law for the commands below and `train_xmod plan --law`")
    add_fit_options(command("crossval", run_crossval, "predict runs that the law was not fitted to"))
    plot = command("plot", run_plot, "draw the runs, the law and its predictions")
    add_fit_options(plot)
    plot.add_argument("--out", required=True, metavar="PREFIX", help="writes PREFIX_regularities, PREFIX_predictions")
    plot.add_argument("--format", choices=("png", "svg", "pdf"), default="png")
    plot.add_argument("--absolute", action="store_true", help="losses instead of differences to dense")
    check = command("check", run_check, "compare runs with what a fitted law predicts")
    add_runs(check)
    add_law(check)
    predict = command("predict", run_predict, "predict the difference to dense of models not trained")
    add_law(predict)
    add_model_options(predict)
    recommend = command("recommend", run_recommend, "choose K and A by a fitted law, within a memory")
    add_law(recommend)
    add_model_options(recommend)
    recommend.add_argument("--memory", required=True, type=positive, metavar="GB", help="GiB that training may take")
    recommend.add_argument("--top", type=count(1), default=8, metavar="N", help="how many to show (default: 8)")

    words, flags = sys.argv[1:], []
    if "--" in words:
        words, flags = words[:words.index("--")], words[words.index("--") + 1:]
    options = parser.parse_args(words)
    options.flags = flags
    if flags and options.command not in ("predict", "recommend"):
        parser.error(f"{options.command} takes nothing after --")
    return options


def main():
    options = parse_options()
    try:
        options.run(options)
    except ImportError as error:
        fail(f"needs {error.name}: run scripts/install_deps.sh plot, or pip install {error.name}")


if __name__ == "__main__":
    main()
