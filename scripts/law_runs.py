"""The runs of a sweep as the scaling law takes them: one entry a run of X-MoD, its loss minus that of the dense model
with the same backbone, context and compute. A file that cannot give this is refused in one line."""

import csv
import io
import math
import os
import sys
from dataclasses import dataclass

import numpy as np

COLUMNS = ["name", "arch", "backbone", "seed", "L", "K", "A", "N_act", "N", "vocab_size", "compute", "val_loss_topk",
           "val_loss_threshold", "dataset"]  # those needed here, of all that sweep.py writes
SHAPE = ["dim", "heads", "kv_heads", "head_dim", "ffn_dim", "active_layers", "vocab_size", "prefix"]


def fail(message):
    sys.exit(f"{os.path.basename(sys.argv[0])}: {message}")


@dataclass
class Runs:
    """Arrays with an entry for each X-MoD run; group: of the runs that are measured against the same dense model."""
    path: str
    name: np.ndarray
    backbone: np.ndarray
    L: np.ndarray
    K: np.ndarray
    A: np.ndarray
    N: np.ndarray
    N_act: np.ndarray
    compute: np.ndarray
    loss: np.ndarray
    delta: np.ndarray  # loss - dense loss
    group: np.ndarray
    dense_runs: np.ndarray  # how many dense runs the mean of the group is of
    seed_spread: float = math.nan  # sample standard deviation of a run's loss over seeds
    seed_pairs: int = 0  # its degrees of freedom
    skipped: int = 0  # runs of other architectures
    shapes: dict = None  # backbone -> the flags that make it

    def __len__(self):
        return len(self.delta)

    def where(self, mask):
        """The runs of a mask."""
        arrays = {name: value[mask] for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        return Runs(**{**vars(self), **arrays})

    def factor(self, name):
        """What crossval groups by: the values of L, A, K, N_act (told by backbone) or compute."""
        return self.backbone if name == "N_act" else getattr(self, name)

    def levels(self, name):
        """The values of a factor, ascending; backbones by their active parameters."""
        values = list(dict.fromkeys(self.factor(name).tolist()))
        if name != "N_act":
            return sorted(values)
        return sorted(values, key=lambda backbone: self.N_act[self.backbone == backbone].mean())


def read_runs(paths, routing="topk"):
    """The Runs of the files that sweep.py wrote; the dense run that one is compared with may lie in another."""
    rows = [row for path in paths for row in read_rows(path)]
    path = ", ".join(paths)
    losses = "val_loss_" + routing
    for row in rows:
        for name in ("L", "K", "N_act", "N", "compute", losses) + (("A",) if row["arch"] == "xmod" else ()):
            row[name] = number(row, name)
    require_one(path, rows, "vocab_size", "vocabularies")
    require_one(path, rows, "dataset", "data sets")
    require_distinct(rows)
    return differences(path, rows, losses)


def read_rows(path):
    try:
        with open(path, encoding="utf-8", newline="") as file:
            text = file.read()
    except OSError as error:
        fail(f"cannot read {path}: {error.strerror}; give the runs.csv of a sweep")
    except UnicodeDecodeError:
        fail(f"{path}: not a text file; give the runs.csv of a sweep")
    if "\0" in text:
        fail(f"{path}: not a text file, or one that a crash filled with zeros; give the runs.csv of a sweep")
    if not text.strip():
        fail(f"{path}: the file is empty; give the runs.csv of a sweep")
    reader = csv.reader(io.StringIO(text))
    header = next(reader)
    missing = [name for name in COLUMNS if name not in header]
    if missing:
        fail(f"{path}: no column {', '.join(missing)} in its first line; expected at least {','.join(COLUMNS)}")
    rows = []
    for cells in reader:
        where = f"{path}: line {reader.line_num}"
        if len(cells) != len(header):
            cut = reader.line_num >= len(text.splitlines()) and len(cells) < len(header)
            fail(f"{where} has {len(cells)} values, expected {len(header)} as in the first line"
                 + ("; the file is cut off in mid-line, remove the line or run sweep.py again" if cut else ""))
        rows.append({**dict(zip(header, cells)), "where": where})
    if not text.endswith("\n"):
        fail(f"{path}: line {reader.line_num} has no end, the file is cut off in mid-line; remove the line or run "
             "sweep.py again")
    if not rows:
        fail(f"{path}: no run after the first line")
    return rows


def number(row, name):
    """A cell that must hold a positive number."""
    text = row[name].strip()
    where = f"{row['where']} ({row['name']})"
    try:
        value = float(text)
    except ValueError:
        fail(f"{where}: {name} is {text[:40]!r}, expected a number")
    if not math.isfinite(value):
        fail(f"{where}: {name} is {text}, expected a finite number; remove the run, or train it again")
    if value <= 0 or name in ("K", "A") and value < 1:
        fail(f"{where}: {name} is {text}, expected {'1 or more' if name in ('K', 'A') else 'more than 0'}")
    return value


def require_one(path, rows, name, plural):
    first = rows[0]
    for row in rows:
        if row[name] != first[name]:
            fail(f"{path}: {name} is {first[name]} in {first['name']} and {row[name]} in {row['name']}; losses of "
                 f"different {plural} do not compare, fit each alone")


def require_distinct(rows):
    seen = {}
    for row in rows:
        key = tuple(row[name] for name in ("name", "arch", "backbone", "seed", "L", "K", "A", "compute"))
        if key in seen:
            fail(f"{row['where']} ({row['name']}): the run of line {seen[key].rpartition(' ')[2]} again; remove one")
        seen[key] = row["where"]


def differences(path, rows, losses):
    dense, sparse, skipped = {}, [], 0
    for row in rows:
        key = (row["backbone"], row["L"], row["compute"])
        if row["arch"] == "dense":
            dense.setdefault(key, []).append(row[losses])
        elif row["arch"] == "xmod":
            sparse.append((key, row))
        else:
            skipped += 1
    if not sparse:
        fail(f"{path}: no run of xmod in it; the law describes these")
    missing = list(dict.fromkeys(key for key, _ in sparse if key not in dense))
    if missing:
        listed = "; ".join(f"backbone {b}, L {L:.0f}, compute {C:g}" for b, L, C in missing[:6])
        fail(f"{path}: no dense run to compare with for {listed}" +
             (f"; and {len(missing) - 6} more" if len(missing) > 6 else "") + "; train these dense models")
    groups = {key: i for i, key in enumerate(dict.fromkeys(key for key, _ in sparse))}

    def column(name):
        return np.array([row[name] for _, row in sparse])

    spread, pairs = seed_spread(rows, losses)
    baseline = np.array([np.mean(dense[key]) for key, _ in sparse])
    shapes = {row["backbone"]: {**{name: row[name] for name in SHAPE if row.get(name)}, "N_act": row["N_act"]}
              for row in rows if row["arch"] == "dense"}
    return Runs(path, *map(column, ("name", "backbone", "L", "K", "A", "N", "N_act", "compute", losses)),
                delta=column(losses) - baseline, group=np.array([groups[key] for key, _ in sparse]),
                dense_runs=np.array([len(dense[key]) for key, _ in sparse]), seed_spread=spread, seed_pairs=pairs,
                skipped=skipped, shapes=shapes)


def seed_spread(rows, losses):
    """Pooled over all that was trained with several seeds, dense or not."""
    same = {}
    for row in rows:
        key = tuple(row[name] for name in ("arch", "backbone", "L", "K", "A", "compute", "N"))
        same.setdefault(key, []).append(row[losses])
    squares = sum(np.var(values) * len(values) for values in same.values())
    pairs = sum(len(values) - 1 for values in same.values())
    return (math.sqrt(squares / pairs) if pairs else math.nan), pairs
