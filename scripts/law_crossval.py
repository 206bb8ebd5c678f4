"""How well the scaling law predicts runs that it was not fitted to."""

from dataclasses import dataclass

import numpy as np

import law_fit
from law_report import rms, table, unidentified

FACTORS = ("L", "A", "N_act", "K", "compute")


@dataclass
class Prediction:
    """Of the runs of one group by a law fitted to the rest."""
    factor: str
    left_out: object
    mask: np.ndarray  # of all runs
    delta: np.ndarray  # predicted, of those in the mask
    error: np.ndarray
    lost: list  # constants that the rest does not determine


def leave_one_out(runs, settings, factor, log=lambda text: None):
    """A Prediction for each value of the factor; none where there is only one."""
    levels = runs.levels(factor)
    predictions = []
    for level in levels if len(levels) > 1 else []:
        log(f"leaving out {factor} {level}")
        predictions.append(predict_rest(runs, settings, factor, level, runs.factor(factor) == level))
    return predictions


def out_of_range(runs, settings, log=lambda text: None):
    """The largest value of each factor predicted by a law fitted to the smaller ones."""
    predictions = []
    for factor in FACTORS:
        levels = runs.levels(factor)
        if len(levels) > 1:
            log(f"beyond {factor} {levels[-2]}")
            predictions.append(predict_rest(runs, settings, factor, levels[-1], runs.factor(factor) == levels[-1]))
    return predictions


def predict_rest(runs, settings, factor, level, mask):
    rest, held = runs.where(~mask), runs.where(mask)
    lower, upper = law_fit.limits(settings)
    free = [i for i in range(law_fit.P) if lower[i] < upper[i] and law_fit.NAMES[i] not in settings.priors]
    lost = [law_fit.NAMES[i] for i in unidentified(rest, free)]
    found = law_fit.fit(rest, settings, ridge=bool(lost))
    predicted = found.predict(held)
    return Prediction(factor, level, mask, predicted, predicted - held.delta, lost)


def show_level(level):
    return level if isinstance(level, str) else f"{level:g}"


def crossval_text(predictions, title):
    rows = []
    for p in predictions:
        rows.append([p.factor, show_level(p.left_out), str(len(p.error)), f"{rms(p.error):.4f}",
                     f"{p.error.mean():+.4f}",
                     "the rest does not tell " + ", ".join(p.lost) if p.lost else ""])
    for factor in dict.fromkeys(p.factor for p in predictions):
        errors = [p.error for p in predictions if p.factor == factor]
        if len(errors) > 1:
            errors = np.concatenate(errors)
            rows.append([factor, "all", str(len(errors)), f"{rms(errors):.4f}", f"{errors.mean():+.4f}", ""])
    return title + "\n" + table(["factor", "left out", "runs", "rms", "mean error", ""], rows)
