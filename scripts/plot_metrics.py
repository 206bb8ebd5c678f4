#!/usr/bin/env python3
"""Draws the loss of one or several runs against steps, tokens and training FLOPs.

    scripts/plot_metrics.py quickstart/out --out loss.png
    scripts/plot_metrics.py out/dense out/xmod --labels dense "X-MoD A1K4" --log-x --out compare.svg

A run is its directory or its metrics.csv. The pale line is the training loss (a moving average; a single run shows
every step as well). The line with markers is the validation loss: solid under top-k routing, dashed under threshold
routing where that differs; its last value stands beside the name of the run. The FLOPs panel is the fair comparison:
runs started with the same --compute end at the same place there.
"""

import argparse
import io
import math
import os
import sys

COLUMNS = ["step", "tokens", "flops", "train_loss", "val_loss_topk", "val_loss_threshold"]
PANELS = [("step", "steps"), ("tokens", "training tokens"), ("flops", "training FLOPs")]

# Okabe and Ito's colours, told apart with every kind of colour blindness; markers differ as well.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
MARKERS = ["o", "s", "^", "D", "v", "P"]  # one fewer, so that the eighth run differs from the first
INK, FAINT = "#333333", "#DDDDDD"
DASHES = (0, (4, 2))


def fail(message):
    sys.exit(f"{os.path.basename(sys.argv[0])}: {message}")  # other scripts draw with this one


# ---------------------------------------------------------------------------------------------------------------
# reading


def read_run(path):
    """The columns of a run's metrics.csv as lists of floats; None where a row has no value."""
    if os.path.isdir(path):
        path = os.path.join(path, "metrics.csv")
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        fail(f"cannot read {path}: {error.strerror}; give a run's --out directory or its metrics.csv")
    except UnicodeDecodeError:
        fail(f"{path}: not a text file; give a run's --out directory or its metrics.csv")
    lines = text.split("\n")[:-1]  # a running trainer is about to complete what follows the last newline
    if not lines:
        fail(f"{path}: the file is empty; has the run completed a step?")
    header = lines[0].strip().split(",")
    missing = [name for name in COLUMNS if name not in header]
    if missing:
        fail(f"{path}: no column {missing[0]} in its first line; expected {','.join(COLUMNS)}")

    run = {name: [] for name in COLUMNS}
    for number, line in enumerate(lines[1:], start=2):
        values = line.strip().split(",")
        if len(values) != len(header):
            fail(f"{path}: line {number} has {len(values)} values, expected {len(header)} as in the first line")
        for name, value in zip(header, values):
            if name in run:
                run[name].append(parse(value, name, f"{path}: line {number}"))
        if len(run["step"]) > 1 and run["step"][-1] <= run["step"][-2]:
            fail(f"{path}: line {number}: its step is not after that of the line before; expected ascending steps")
    if not run["step"]:
        fail(f"{path}: no row after the first line; has the run completed a step?")
    if not any(value is not None for name in COLUMNS[3:] for value in run[name]):
        fail(f"{path}: there is no loss in it")
    return run


def parse(value, name, where):
    try:
        number = float(value) if value.strip() else math.nan
    except ValueError:
        fail(f"{where}: {name} is {value[:40]!r}, expected a number")
    if math.isfinite(number):
        return number
    if name in ("step", "tokens", "flops"):
        fail(f"{where}: {name} is {value[:40]!r}, expected a number")
    return None


def points(run, x, y):
    """The rows that have both values, as two lists."""
    pairs = [(a, b) for a, b in zip(run[x], run[y]) if b is not None]
    return [a for a, _ in pairs], [b for _, b in pairs]


def smooth(values, width):
    """Moving average, centred; in the steep fall at the start the window narrows instead of lagging behind."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    averages = []
    for i in range(len(values)):
        half = min(width // 2, i)
        first, last = i - half, min(i + half, len(values) - 1)
        averages.append((sums[last + 1] - sums[first]) / (last + 1 - first))
    return averages


def default_label(path):
    """The name of the run's directory."""
    path = os.path.abspath(path)
    return os.path.basename(path if os.path.isdir(path) else os.path.dirname(path))


def threshold_differs(run):
    pairs = zip(run["val_loss_topk"], run["val_loss_threshold"])
    return any(b is not None and (a is None or abs(a - b) > 1e-6 * abs(b)) for a, b in pairs)


# ---------------------------------------------------------------------------------------------------------------
# drawing


def draw(runs, labels, width, log_x):
    """The figure: one panel for each way of counting what a run has spent, the same loss axis in all."""
    figure, axes = new_figure(1, 3, figsize=(13, 4.6), sharey=True)
    skipped = 0.01 if log_x else 0.08  # the share of the run in the first steep fall, which would press the rest flat
    for panel, (x, title) in zip(axes, PANELS):
        for i, run in enumerate(runs):
            draw_run(panel, run, x, i, width, raw=len(runs) == 1)
        if log_x:
            panel.set_xscale("log")
            panel.set_xlim(left=min(run[x][int(skipped * len(run[x]))] for run in runs) or None)
        style_panel(panel, title, format_flops if x == "flops" else format_count)
    axes[0].set_ylabel("loss (nats per token)")
    axes[0].set_ylim(*loss_limits(runs, width, skipped))
    figure.subplots_adjust(left=0.055, right=0.86, top=0.9, bottom=0.13, wspace=0.08)
    label_lines(axes[-1], runs, labels)
    explain_styles(figure, runs)
    return figure


def new_figure(*shape, **options):
    """(figure, axes) in the style of all our pictures, made without a display."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 10, "axes.edgecolor": INK, "text.color": INK, "axes.labelcolor": INK,
                         "xtick.color": INK, "ytick.color": INK, "svg.fonttype": "none"})
    return plt.subplots(*shape, **options)


def style_panel(panel, title, format_x=None):
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    if panel.get_xscale() == "linear":
        panel.xaxis.set_major_locator(MaxNLocator(5))
    if format_x:
        panel.xaxis.set_major_formatter(FuncFormatter(format_x))
    panel.set_xlabel(title)
    panel.grid(True, color=FAINT, linewidth=0.6)
    panel.set_axisbelow(True)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def draw_run(panel, run, x, i, width, raw):
    colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
    train_x, train_loss = points(run, x, "train_loss")
    if raw:
        panel.plot(train_x, train_loss, color=colour, alpha=0.2, linewidth=0.7)
    panel.plot(train_x, smooth(train_loss, smoothing_width(train_loss, width)), color=colour, alpha=0.4, linewidth=1)
    validation_x, topk = points(run, x, "val_loss_topk")
    style = {"color": colour, "marker": marker, "markersize": 4, "markevery": max(1, len(topk) // 15)}
    panel.plot(validation_x, topk, linewidth=1.7, **style)
    if threshold_differs(run):
        panel.plot(*points(run, x, "val_loss_threshold"), linewidth=1.2, linestyle=DASHES, markerfacecolor="white",
                   **style)


def smoothing_width(losses, width):
    return max(1, len(losses) // 40) if width is None else width


def loss_limits(runs, width, skipped):
    """From the lowest loss to the highest after the skipped share of each run."""
    shown = []
    for run in runs:
        _, train_loss = points(run, "step", "train_loss")
        averages = smooth(train_loss, smoothing_width(train_loss, width))
        for losses in (averages, *(points(run, "step", name)[1] for name in COLUMNS[4:])):
            shown += losses[int(skipped * len(losses)) :]
    margin = 0.05 * (max(shown) - min(shown)) or 0.1
    return min(shown) - margin, max(shown) + margin


def final_point(run):
    """Where a run's most telling line ends: (FLOPs, loss)."""
    for name in ("val_loss_topk", "val_loss_threshold", "train_loss"):
        x, y = points(run, "flops", name)
        if y:
            return x[-1], y[-1]


def label_lines(panel, runs, labels):
    """Names each run beside the end of its line, moved apart where two ends lie close."""
    low, high = panel.get_ylim()
    gap = 0.075
    ends = sorted(((final_point(run)[1] - low) / (high - low), i) for i, run in enumerate(runs))
    heights = []
    for height, _ in ends:
        heights.append(max([height] + [heights[-1] + gap] if heights else [height]))
    excess = max(0.0, heights[-1] - 1.0)
    for (_, i), height in zip(ends, heights):
        x, loss = final_point(runs[i])
        colour = COLOURS[i % len(COLOURS)]
        panel.annotate(f"{labels[i]}  {loss:.4f}", xy=(x, loss), xycoords="data", xytext=(1.04, height - excess),
                       textcoords="axes fraction", color=colour, fontweight="bold", va="center", annotation_clip=False,
                       arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "alpha": 0.6,
                                    "relpos": (0, 0.5), "shrinkA": 1})


def explain_styles(figure, runs):
    """One line above the panels: what pale, solid and dashed mean."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=INK, alpha=0.5, linewidth=1, label="training (moving average)")]
    mark = {"color": INK, "marker": "o", "markersize": 4}
    if any(points(run, "step", "val_loss_topk")[1] for run in runs):
        name = "validation, top-k routing" if any(map(threshold_differs, runs)) else "validation"
        handles.append(Line2D([], [], linewidth=1.7, label=name, **mark))
    if any(map(threshold_differs, runs)):
        handles.append(Line2D([], [], linewidth=1.2, linestyle=DASHES, markerfacecolor="white",
                              label="validation, threshold routing", **mark))
    figure.legend(handles=handles, loc="lower left", bbox_to_anchor=(0.045, 0.91), ncol=len(handles), frameon=False,
                  handlelength=3.2)


def format_count(value, _):
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"


def format_flops(value, _):
    """As --compute takes it: 2e13."""
    return f"{value:.3g}".replace("e+", "e")


# ---------------------------------------------------------------------------------------------------------------


def with_few_colours(picture):
    """The same PNG in 64 colours: a quarter of the bytes."""
    from PIL import Image  # Matplotlib needs it as well

    smaller = io.BytesIO()
    Image.open(picture).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(smaller, "png", optimize=True)
    return smaller


def save(figure, path):
    """Writes the picture whole or not at all."""
    kind = os.path.splitext(path)[1].lstrip(".").lower()
    picture = io.BytesIO()
    figure.savefig(picture, format=kind, dpi=150, bbox_inches="tight")
    if kind == "png":
        picture = with_few_colours(picture)
    temporary = path + ".tmp"
    try:
        with open(temporary, "wb") as file:
            file.write(picture.getbuffer())
        os.replace(temporary, path)
    except OSError as error:
        if os.path.isfile(temporary):
            os.remove(temporary)
        fail(f"cannot write {path}: {error.strerror}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's directory, or its metrics.csv")
    parser.add_argument("--out", required=True, metavar="FILE", help="the picture: .png, .svg or .pdf")
    parser.add_argument("--labels", nargs="+", metavar="TEXT", help="a name for each run (default: its directory's)")
    parser.add_argument("--smooth", type=int, metavar="N", help="rows in the moving average of the training loss "
                        "(default: a fortieth of the run)")
    parser.add_argument("--log-x", action="store_true", help="logarithmic steps, tokens and FLOPs")
    options = parser.parse_args()
    if options.labels and len(options.labels) != len(options.runs):
        parser.error(f"--labels: {len(options.labels)} names for {len(options.runs)} runs; give one for each")
    if options.smooth is not None and options.smooth < 1:
        parser.error(f"--smooth {options.smooth}: expected 1 (no smoothing) or more")
    if os.path.splitext(options.out)[1].lower() not in (".png", ".svg", ".pdf"):
        parser.error(f"--out {options.out}: expected a name ending in .png, .svg or .pdf")

    runs = [read_run(path) for path in options.runs]
    try:
        figure = draw(runs, options.labels or [default_label(path) for path in options.runs], options.smooth,
                      options.log_x)
    except ImportError as error:
        fail(f"needs {error.name}: run scripts/install_deps.sh plot, or pip install matplotlib")
    save(figure, options.out)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
