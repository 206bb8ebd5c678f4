#!/usr/bin/env python3
"""Draws what the sparse layers of one or several models select.

    train_xmod routing --checkpoint out/step_00000500 --val-data 'data/val_*.bin' --json > xmod.json
    scripts/plot_routing.py xmod.json unbiased.json --labels "A1K4" "without token-choice bias" --out routing.png

The upper panels show how many layers of an interval select a token (the paper's Figure 5); models with the same K and
the same length of interval share one. Dashed grey: all layers select the same subset; dot-dashed green: each layer
selects a random subset of its own. Below, layer by layer: the share of the tokens that an interval has selected so far,
and the overlap of each layer with the one before it.

    train_xmod routing --checkpoint out/step_00000500 --val-data 'data/val_*.bin' --map map.csv
    scripts/plot_routing.py --map map.csv --out map.png

The map is text, and under each token a column with a cell for each layer, the first layer at the top. The more sparse
layers select a token, the darker is the ground of its letters.
"""

import argparse
import csv
import json
import os
import re
import sys
import warnings

import plot_metrics as plot  # beside this script

REPEATED, INDEPENDENT = "#888888", "#2E8B57"
DOT_DASHED = (0, (6, 2, 1, 2))
MAP_COLUMNS = ["sequence", "position", "id", "text", "layers"]
DENSE, PASSED, SELECTED = "#E3E3E3", "#FFFFFF", plot.COLOURS[0]


def fail(message):
    sys.exit(f"plot_routing.py: {message}")


def read_text(path, what):
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return file.read()
    except OSError as error:
        fail(f"cannot read {path}: {error.strerror}; give {what}")
    except UnicodeDecodeError:
        fail(f"{path}: not a text file; give {what}")


# ---------------------------------------------------------------------------------------------------------------
# reports


def read_report(path):
    what = "the output of train_xmod routing --json"
    try:
        report = json.loads(read_text(path, what))
    except (ValueError, RecursionError):
        fail(f"{path}: not valid JSON; give {what}")
    try:
        check_report(report)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        fail(f"{path}: {describe(error)}; give {what}")
    return report


def describe(error):
    return f"no '{error.args[0]}' in it" if isinstance(error, KeyError) else "not a routing report"


def check_report(report):
    """Touches everything that the drawing needs."""
    float(report["token_sparsity"]), str(report["model"])
    for name in "repeated_subset", "independent_subsets", "threshold", "topk":
        updates = report["all"][name]["updates"]
        if len(updates) != report["all"]["layers"] + 1:
            raise TypeError
        sum(updates)
    if not report["layers"]:
        raise TypeError
    for layer in report["layers"]:
        layer["layer"] + layer["interval"] + layer["depth"]
        for name in "threshold", "topk":
            layer[name]["covered"] + (layer[name]["jaccard"] or 0)


def group_reports(reports):
    """[[index of a report, ...], ...]: those with the same references stand together."""
    groups = {}
    for i, report in enumerate(reports):
        groups.setdefault((report["token_sparsity"], report["all"]["layers"]), []).append(i)
    return list(groups.values())


def draw_reports(reports, labels, routing):
    groups = group_reports(reports)
    n = len(groups)
    figure, panel = plot.new_figure(1, 1, figsize=(max(12, 4.4 * n), 8))
    panel.remove()
    panels = figure.subplot_mosaic([[i for i in range(n) for _ in range(2)],
                                    ["coverage"] * n + ["jaccard"] * n])
    for i, group in enumerate(groups):
        draw_updates(panels[i], reports, group, routing)
    panels[0].set_ylabel("percent of the tokens")
    draw_depth(panels["coverage"], reports, routing, "covered", independent_coverage,
               "selected so far in the interval (percent)")
    draw_depth(panels["jaccard"], reports, routing, "jaccard", independent_jaccard,
               "overlap with the layer before (Jaccard, percent)")
    height = explain_lines(figure, labels, routing)
    figure.tight_layout(rect=(0, 0, 1, 1 - height), h_pad=2.5, w_pad=2.5)
    return figure


def draw_updates(panel, reports, group, routing):
    """How many layers of an interval select a token."""
    figures = reports[group[0]]["all"]
    length = figures["layers"]
    repeated, independent = [percent(figures[name]["updates"]) for name in ("repeated_subset", "independent_subsets")]
    measured = {i: percent(reports[i]["all"][routing]["updates"]) for i in group}
    panel.plot(repeated, color=REPEATED, linestyle=plot.DASHES, linewidth=1.2)
    panel.plot(independent, color=INDEPENDENT, linestyle=DOT_DASHED, linewidth=1.4)
    for i, values in measured.items():
        colour, marker = colour_and_marker(i)
        panel.fill_between(range(length + 1), values, color=colour, alpha=0.12, linewidth=0)
        panel.plot(values, color=colour, marker=marker, markersize=4, linewidth=1.7)
    top = 1.12 * max(max(values) for values in [independent, *measured.values()])
    panel.set_ylim(0, top)
    if repeated[0] > top:  # a spike that would press the rest flat
        leaves = 1 - top / repeated[0]  # where the line, which falls to 0 at 1, crosses the upper border
        panel.annotate(f"{repeated[0]:.4g}% at 0", (leaves, top), xytext=(6, -8), textcoords="offset points",
                       fontsize=8, color=REPEATED)
    panel.set_title(f"K = {reports[group[0]]['token_sparsity']}, intervals of {length} "
                    f"layer{'s' if length > 1 else ''}", fontsize=10, loc="left")
    plot.style_panel(panel, "sparse updates of a token in an interval")
    panel.xaxis.get_major_locator().set_params(integer=True)


def draw_depth(panel, reports, routing, name, reference, title):
    """One value of each sparse layer; a line breaks off where an interval ends."""
    for i, report in enumerate(reports):
        colour, marker = colour_and_marker(i)
        size = 3 if len(report["layers"]) < 60 else 0
        for interval in split_intervals(report["layers"]):
            x = [layer["layer"] for layer in interval]
            y = [None if layer[routing][name] is None else 100 * layer[routing][name] for layer in interval]
            known = [(a, b) for a, b in zip(x, y) if b is not None]
            panel.plot([a for a, _ in known], [b for _, b in known], color=colour, marker=marker, markersize=size,
                       linewidth=1.3)
            expected = [reference(report["token_sparsity"], layer["depth"]) for layer in interval]
            panel.plot(x, [None if value is None else 100 * value for value in expected], color=INDEPENDENT,
                       linestyle=DOT_DASHED, linewidth=0.9, alpha=0.8)
    panel.set_ylim(0, None)
    panel.set_title(title, fontsize=10, loc="left")
    plot.style_panel(panel, "layer")
    panel.xaxis.get_major_locator().set_params(integer=True)


def split_intervals(layers):
    intervals = []
    for layer in layers:
        if layer["depth"] == 0:
            intervals.append([])
        intervals[-1].append(layer)
    return intervals


def independent_coverage(K, depth):
    return 1 - (1 - 1 / K) ** (depth + 1)


def independent_jaccard(K, depth):
    return None if depth == 0 else 1 / (2 * K - 1)


def explain_lines(figure, labels, routing):
    """The legend above the panels; returns its share of the figure's height."""
    from matplotlib.lines import Line2D

    handles = []
    for i, label in enumerate(labels):
        colour, marker = colour_and_marker(i)
        handles.append(Line2D([], [], color=colour, marker=marker, markersize=4, linewidth=1.7, label=label))
    handles.append(Line2D([], [], color=REPEATED, linestyle=plot.DASHES, linewidth=1.2, label="repeated subset"))
    handles.append(Line2D([], [], color=INDEPENDENT, linestyle=DOT_DASHED, linewidth=1.4, label="independent subsets"))
    name = {"threshold": "threshold", "topk": "top-k"}[routing]
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.01, 1.0), ncol=3, frameon=False,
                  handlelength=3.2, title=f"under {name} routing", alignment="left")
    rows = (len(handles) + 2) // 3
    return 0.05 + 0.028 * rows


def colour_and_marker(i):
    return plot.COLOURS[i % len(plot.COLOURS)], plot.MARKERS[i % len(plot.MARKERS)]


def percent(shares):
    return [100 * share for share in shares]


# ---------------------------------------------------------------------------------------------------------------
# the map


def read_map(path):
    """[(text, letters of the layers), ...]"""
    what = "a file that train_xmod routing --map wrote"
    rows = csv.reader(read_text(path, what).splitlines(keepends=True), strict=True)
    tokens = []
    try:
        if next(rows, None) != MAP_COLUMNS:
            fail(f"{path}: its first line is not {','.join(MAP_COLUMNS)}; give {what}")
        for row in rows:
            where = f"{path}: line {rows.line_num}"
            if len(row) != len(MAP_COLUMNS):
                fail(f"{where} has {len(row)} values, expected {len(MAP_COLUMNS)}; give {what}")
            text, layers = row[3:]
            if not re.fullmatch("[DS.]+", layers) or (tokens and len(layers) != len(tokens[0][1])):
                fail(f"{where}: its layers are {layers[:40]!r}, expected D, S and . and as many as before; give {what}")
            tokens.append((show_text(text), layers))
    except csv.Error as error:
        fail(f"{path}: line {rows.line_num}: {error}; give {what}")
    if not tokens:
        fail(f"{path}: no token in it; give {what}")
    return tokens


def show_text(text):
    """Escapes as characters that take one place; a byte that is no character is a dot."""
    signs = {"n": "↵", "t": "→", "\\": "\\"}
    return re.sub(r"\\(n|t|\\|x..)", lambda match: signs.get(match[1], "·"), text) or " "


def wrap(tokens, width):
    """Lines of [(column, text, layers), ...]; a token is not torn apart."""
    lines, column = [[]], 0
    for text, layers in tokens:
        text = text[:width]
        if column + len(text) > width:
            lines.append([])
            column = 0
        lines[-1].append((column, text, layers))
        column += len(text)
    return lines


def draw_map(tokens, width):
    lines = wrap(tokens, width)
    layers = len(tokens[0][1])
    letter, line = 0.105, 0.26  # inches
    raster = min(3.0, max(0.5, 0.075 * layers))
    block = line + raster + 0.14
    figure, panel = plot.new_figure(1, 1, figsize=(letter * width + 0.9, block * len(lines) + 0.6))
    figure.subplots_adjust(left=0.8 / (letter * width + 0.9), right=0.99, bottom=0.01,
                           top=1 - 0.45 / (block * len(lines) + 0.6))
    most = max(1, max(letters.count("S") for _, letters in tokens))
    for i, tokens_of_line in enumerate(lines):
        draw_map_line(panel, tokens_of_line, -i * block, line, raster, width, most)
    panel.set_xlim(0, width)
    panel.set_ylim(-block * len(lines), 0)
    panel.axis("off")
    explain_cells(panel, block * len(lines))
    return figure


def draw_map_line(panel, tokens, top, line, raster, width, most):
    """A line of text from `top` down, and the layers below it."""
    from matplotlib.colors import ListedColormap

    layers = len(tokens[0][2])
    cells = [[None] * width for _ in range(layers)]
    for column, text, letters in tokens:
        darkness = 0.55 * letters.count("S") / most
        panel.fill_between([column, column + len(text)], top - line, top, color=SELECTED, alpha=darkness, linewidth=0)
        for i, character in enumerate(text):
            panel.text(column + i + 0.5, top - 0.55 * line, character, family="monospace", fontsize=9, ha="center",
                       va="center")
            for layer, letter in enumerate(letters):
                cells[layer][column + i] = "D.S".index(letter)
    end = tokens[-1][0] + len(tokens[-1][1])
    shown = [[float("nan") if cell is None else cell for cell in row] for row in cells]
    panel.imshow(shown, extent=(0, width, top - line - raster, top - line), aspect="auto", interpolation="none",
                 cmap=ListedColormap([DENSE, PASSED, SELECTED]), vmin=-0.5, vmax=2.5)
    borders = [column for column, _, _ in tokens[1:]] + [end]
    if any(len(text) > 1 for _, text, _ in tokens):
        panel.vlines(borders, top - line - raster, top, color=plot.FAINT, linewidth=0.5)
    panel.plot([0, end, end, 0, 0], [top - line - raster] * 2 + [top - line] * 2 + [top - line - raster],
               color=plot.INK, linewidth=0.5)
    for layer, height in ((0, top - line), (layers - 1, top - line - raster)):
        panel.text(-0.6, height, f"layer {layer}", fontsize=7, ha="right", va="top" if layer == 0 else "bottom")


def explain_cells(panel, height):
    from matplotlib.patches import Patch

    style = {"edgecolor": plot.INK, "linewidth": 0.5}
    panel.legend(handles=[Patch(facecolor=SELECTED, label="a sparse layer selects the token", **style),
                          Patch(facecolor=PASSED, label="passes it by", **style),
                          Patch(facecolor=DENSE, label="dense layer", **style)],
                 loc="lower left", bbox_to_anchor=(-0.01, 1.0 + 0.02 / height), ncol=3, frameon=False, fontsize=9)


# ---------------------------------------------------------------------------------------------------------------


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="*", metavar="REPORT", help="the output of train_xmod routing --json")
    parser.add_argument("--map", metavar="FILE", help="draw this file of train_xmod routing --map instead")
    parser.add_argument("--out", required=True, metavar="FILE", help="the picture: .png, .svg or .pdf")
    parser.add_argument("--labels", nargs="+", metavar="TEXT", help="a name for each report (default: the model's)")
    parser.add_argument("--routing", choices=["threshold", "topk"], default="threshold",
                        help="whose selections (default: threshold, as in the paper)")
    parser.add_argument("--width", type=int, default=100, metavar="N",
                        help="characters in a line of the map (default: 100)")
    options = parser.parse_args()
    if bool(options.reports) == bool(options.map):
        parser.error("give reports or --map FILE, one of them")
    if options.labels and len(options.labels) != len(options.reports):
        parser.error(f"--labels: {len(options.labels)} names for {len(options.reports)} reports; give one for each")
    if options.width < 1 or options.width > 1000:
        parser.error(f"--width {options.width}: expected a whole number from 1 to 1000")
    if os.path.splitext(options.out)[1].lower() not in (".png", ".svg", ".pdf"):
        parser.error(f"--out {options.out}: expected a name ending in .png, .svg or .pdf")
    return options


def draw(options):
    if options.map:
        return draw_map(read_map(options.map), options.width)
    reports = [read_report(path) for path in options.reports]
    return draw_reports(reports, options.labels or [report["model"] for report in reports], options.routing)


def main():
    options = parse_arguments()
    warnings.simplefilter("ignore")  # of characters that the font lacks; they show as boxes
    try:
        figure = draw(options)
    except ImportError as error:
        fail(f"needs {error.name}: run scripts/install_deps.sh plot, or pip install matplotlib")
    plot.save(figure, options.out)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
