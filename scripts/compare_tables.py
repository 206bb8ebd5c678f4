"""The table and the picture of a comparison, from the runs of compare.py."""

import csv
import io
import os
import re
import shlex
import statistics
from dataclasses import dataclass

from compare_lists import Configuration, UserError, count, stem, words_of, write_whole

ROUTINGS = {"topk": "top-k", "threshold": "threshold"}  # as in metrics.csv and as in the tables

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
