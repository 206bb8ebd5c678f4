"""Pictures of the scaling law, in the manner of the paper's Figures 2 and 3."""

import math

import numpy as np

import law_fit
import plot_metrics as plot
from law_crossval import show_level
from law_report import rms


def regularities(runs, found, absolute=False):
    """The difference to dense against K for several L, against the sparse context L/K, for several Nact, for several A:
    points are means over seeds, lines the law. What a panel does not vary is held where it has the most points."""
    figure, axes = plot.new_figure(1, 4, figsize=(16, 4.4), sharey=not absolute)
    panels = [("L", ("N_act", "A"), False), ("L", ("N_act", "A"), True), ("N_act", ("L", "A"), False),
              ("A", ("L", "N_act"), False)]
    for panel, letter, (factor, held, sparse_context) in zip(axes, "abcd", panels):
        held = richest(runs, factor, held)
        draw_panel(panel, runs, found, factor, held, sparse_context, absolute)
        fixed = ", ".join(f"{show_factor(name)} {show_value(name, level)}" for name, level in held.items())
        panel.set_title(f"({letter}) {fixed}", fontsize=10, loc="left")
    axes[0].set_ylabel("validation loss (nats per token)" if absolute else "loss minus dense loss (nats per token)")
    figure.tight_layout()
    return figure


def richest(runs, factor, held):
    """The values of the held factors, compute among them, at which `factor` takes the most values, and K with it."""
    names = (*held, "compute")
    keys = list(zip(*(runs.factor(name).tolist() for name in names)))

    def points(key):
        mask = np.array([k == key for k in keys])
        return (len(set(runs.factor(factor)[mask].tolist())), len(set(zip(runs.factor(factor)[mask].tolist(),
                                                                         runs.K[mask].tolist()))))

    distinct = list(dict.fromkeys(keys))
    best = max(distinct, key=points)
    if len(runs.levels("compute")) == 1:
        names = held
    return dict(zip(names, best))


def draw_panel(panel, runs, found, factor, held, sparse_context, absolute):
    mask = np.all([runs.factor(name) == value for name, value in held.items()], axis=0)
    chosen = runs.where(mask)
    for i, level in enumerate(chosen.levels(factor)):
        line = chosen.where(chosen.factor(factor) == level)
        colour, marker = plot.COLOURS[i % len(plot.COLOURS)], plot.MARKERS[i % len(plot.MARKERS)]
        values, means, baseline = means_over_seeds(line, absolute)
        across = line.L[0] / values if sparse_context else values
        panel.plot(across, means, linestyle="", marker=marker, markersize=6, color=colour,
                   label=f"{show_factor(factor)} {show_value(factor, level)}")
        K, law = law_line(line, found)
        panel.plot(line.L[0] / K if sparse_context else K, law + (baseline if absolute else 0), color=colour,
                   linewidth=1.4)
    panel.set_xscale("log", base=2)
    plot.style_panel(panel, "sparse context L/K (tokens)" if sparse_context else "token sparsity K",
                     lambda value, _: f"{value:g}")
    panel.xaxis.set_minor_formatter("")
    if not absolute:
        panel.axhline(0, color=plot.INK, linewidth=0.8, linestyle=plot.DASHES)
    panel.legend(frameon=False, fontsize=9)


def means_over_seeds(line, absolute):
    losses = line.loss if absolute else line.delta
    values = np.array(sorted(set(line.K.tolist())))
    means = np.array([losses[line.K == K].mean() for K in values])
    return values, means, float((line.loss - line.delta).mean())


def law_line(line, found):
    """The law over K, between the runs and a little beyond. N is a straight line in K for a backbone and stride."""
    low, high = line.K.min(), line.K.max()
    K = np.geomspace(max(1, low / 1.3), high * 1.3, 100) if low < high else np.array([low])
    N = np.polyval(np.polyfit(line.K, line.N, 1), K) if low < high else line.N[:1]
    return K, law_fit.predict(found.constants, N, line.N_act.mean(), line.L[0], K, line.A[0])


def show_factor(name):
    return {"N_act": "Nact", "compute": "C"}.get(name, name)


def show_value(name, level):
    if isinstance(level, str):
        return level
    return plot.format_flops(level, None) if name == "compute" else f"{level:g}"


# ---------------------------------------------------------------------------------------------------------------


def predictions(runs, found, left_out, beyond):
    """Predicted against true loss: (a) fitted, and beyond the range of a fit to the rest; then leaving out one group at
    a time. left_out: {factor: [Prediction]}."""
    left_out = {factor: found for factor, found in left_out.items() if found}
    figure, axes = plot.new_figure(1, 1 + len(left_out), figsize=(3.9 * (1 + len(left_out)), 4.3), squeeze=False)
    axes = axes[0]
    series = [("in range", runs.loss, runs.loss - runs.delta + found.predict(runs), "o", plot.COLOURS[0])]
    for i, p in enumerate(beyond):
        rest = runs.where(p.mask)
        series.append((f"beyond in {show_factor(p.factor)}", rest.loss, rest.loss - rest.delta + p.delta, "s",
                       plot.COLOURS[(i + 1) % len(plot.COLOURS)]))
    draw_predictions(axes[0], "(a) fitted, and beyond the range", series)
    for panel, letter, (factor, parts) in zip(axes[1:], "bcdef", left_out.items()):
        series = []
        for i, p in enumerate(parts):
            rest = runs.where(p.mask)
            label = f"{show_factor(factor)} {show_level(p.left_out)}"
            series.append((label, rest.loss, rest.loss - rest.delta + p.delta,
                           plot.MARKERS[i % len(plot.MARKERS)], plot.COLOURS[i % len(plot.COLOURS)]))
        draw_predictions(panel, f"({letter}) leaving out one {show_factor(factor)}", series)
    axes[0].set_ylabel("predicted validation loss")
    figure.tight_layout()
    return figure


def draw_predictions(panel, title, series):
    ends = [math.inf, -math.inf]
    for label, true, predicted, marker, colour in series:
        panel.plot(true, predicted, linestyle="", marker=marker, markersize=4.5, color=colour, alpha=0.8,
                   markerfacecolor="none", label=f"{label}: rms {rms(predicted - true):.4f}")
        ends = [min(ends[0], true.min(), predicted.min()), max(ends[1], true.max(), predicted.max())]
    margin = 0.04 * (ends[1] - ends[0]) or 0.01
    ends = [ends[0] - margin, ends[1] + margin]
    panel.plot(ends, ends, color=plot.INK, linewidth=0.8, linestyle=plot.DASHES, zorder=0)
    panel.set_xlim(ends)
    panel.set_ylim(ends)
    panel.set_title(title, fontsize=10, loc="left")
    plot.style_panel(panel, "validation loss")
    panel.legend(frameon=False, fontsize=8, loc="upper left", handletextpad=0.2)
