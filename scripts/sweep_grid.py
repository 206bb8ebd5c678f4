"""The grid of a sweep: reading it, and the settings that are in it."""

import itertools
import re
from dataclasses import dataclass, field

from compare_lists import NAME, SET_HERE, UserError, known_flags, split_words

SHAPE = ["active_layers", "dense_prefix", "dim", "heads", "kv_heads", "head_dim", "ffn_dim", "vocab_size"]
AXES = {"backbones": str, "contexts": int, "K": int, "A": int, "compute": float, "seeds": int}
DEFAULTS = ["compute", "seeds"]  # axes that the head of the file may hold for all parts
NUMBERS = ["tokens_per_step", "val_tokens"]
FLAGS_OF_GRID = {"--arch": "dense and xmod are both trained", "--seq-len": "give contexts",
                 "--token-sparsity": "give K", "--anchor-stride": "give A", "--batch-size": "give tokens_per_step",
                 "--grad-accum": "give tokens_per_step", "--eval-batches": "give val_tokens",
                 "--eval-interval": "the evaluation is at the end", "--preset": "give a backbone",
                 **{"--" + key.replace("_", "-"): "give a backbone" for key in SHAPE}}


@dataclass(frozen=True)
class Setting:
    """What is trained: a dense model (K 1, A None) or an X-MoD."""
    backbone: str
    context: int
    k: int
    a: int  # or None
    compute: float

    def name(self):
        kind = "dense" if self.a is None else f"A{self.a}K{self.k}"
        return f"{self.backbone}-L{self.context}-C{show(self.compute)}-{kind}"


@dataclass
class Grid:
    path: str
    tokens_per_step: int
    val_tokens: int
    flags: dict  # of every run
    backbones: dict  # name -> {key of SHAPE: number}
    fitted: list = field(default_factory=list)  # (setting, seed), in the order of training
    held_out: list = field(default_factory=list)
    order: list = field(default_factory=list)  # both

    def flags_of(self, setting):
        shape = dict(self.backbones[setting.backbone])
        prefix = shape.pop("dense_prefix")
        routing = {"--arch": "dense"}
        if setting.a is not None:
            routing = {"--arch": "xmod", "--dense-prefix": str(prefix), "--token-sparsity": str(setting.k),
                       "--anchor-stride": str(setting.a)}
        return {**routing, **{"--" + key.replace("_", "-"): str(number) for key, number in shape.items()},
                "--seq-len": str(setting.context), "--compute": show(setting.compute),
                "--batch-size": str(self.tokens_per_step // setting.context), "--eval-interval": "0",
                "--eval-batches": str(self.val_tokens // self.tokens_per_step), **self.flags}


def show(number):
    """1e13, and all digits where they are needed."""
    short = f"{number:g}"
    return re.sub(r"e\+0*", "e", short if float(short) == number else repr(float(number)))


# -------------------------------------------------------------------------------------------- reading


def read_grid(path, known):
    try:
        return check_grid(path, parse_toml(path), known)
    except UserError as error:
        raise UserError(f"{path}: {error}")


def parse_toml(path):
    try:
        import tomllib
    except ImportError:
        try:
            import tomli as tomllib
        except ImportError:
            raise UserError("reading it takes Python 3.11 or newer, or `pip install tomli`")
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise UserError(f"{error.strerror}; give a grid such as scripts/sweeps/tiny.toml")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"not TOML: {error}")


def check_grid(path, content, known):
    check_keys(content, NUMBERS + ["backbones", "points"], ["flags", *DEFAULTS])
    numbers = [whole_number(key, content[key]) for key in NUMBERS]
    grid = Grid(path, *numbers, read_flags_of_all(content.get("flags", ""), known), {})
    if grid.val_tokens % grid.tokens_per_step:
        raise UserError(f"val_tokens {grid.val_tokens}: expected a multiple of tokens_per_step {grid.tokens_per_step}")
    for name, shape in expect(content["backbones"], dict, "backbones", "a table").items():
        grid.backbones[name] = read_backbone(name, shape)
    defaults = {key: content[key] for key in DEFAULTS if key in content}
    for number, part in enumerate(expect(content["points"], list, "points", "parts that begin with [[points]]"), 1):
        held_out, pairs = read_part(grid, defaults, part, f"points {number}")
        add_new(grid.order, pairs)
        add_new(grid.held_out if held_out else grid.fitted, pairs)
    both = [setting for setting in grid.fitted if setting in grid.held_out and setting[0].a is not None]
    if both:
        raise UserError(f"{both[0][0].name()} seed {both[0][1]} is held out and is not; name it in one of the parts only")
    return grid


def add_new(pairs, more):
    pairs.extend(pair for pair in more if pair not in pairs)


def check_keys(table, expected, optional):
    for key in table:
        if key not in expected and key not in optional:
            raise UserError(f"unknown key {key}; expected {', '.join(dict.fromkeys(expected + optional))}")
    for key in expected:
        if key not in table and key not in optional:
            raise UserError(f"{key} is missing")


def expect(value, kind, what, expected):
    if not isinstance(value, kind) or isinstance(value, bool) and kind is not bool:
        raise UserError(f"{what}: found {value!r}, expected {expected}")
    return value


def whole_number(what, value, least=1):
    if expect(value, int, what, "a whole number") < least:
        raise UserError(f"{what}: found {value}, expected {least} or more")
    return value


def read_flags_of_all(text, known):
    try:
        return known_flags(split_words(expect(text, str, "flags", "a text such as \"--lr 0.003\"")), known,
                           {**SET_HERE, **FLAGS_OF_GRID})
    except UserError as error:
        raise UserError(f"flags: {error}")


def read_backbone(name, shape):
    if not NAME.fullmatch(name):
        raise UserError(f"backbone {name!r}: expected a name of letters, digits and . _ + -")
    try:
        check_keys(expect(shape, dict, "it", "a table"), SHAPE, [])
        return {key: whole_number(key, shape[key], least=0 if key == "dense_prefix" else 1) for key in SHAPE}
    except UserError as error:
        raise UserError(f"backbone {name}: {error}")


# ------------------------------------------------------------------------------------------- settings


def read_part(grid, defaults, part, where):
    """Is it held out, and (setting, seed) of every combination, behind the dense models they are compared with."""
    try:
        part = {**defaults, **expect(part, dict, "it", "a table")}
        check_keys(part, list(AXES), ["held_out"])
        axes = {key: read_axis(key, part[key], kind) for key, kind in AXES.items()}
        for name in axes["backbones"]:
            if name not in grid.backbones:
                raise UserError(f"unknown backbone {name}; expected {', '.join(grid.backbones)}")
        for context in axes["contexts"]:
            if grid.tokens_per_step % context:
                raise UserError(f"context {context}: tokens_per_step {grid.tokens_per_step} is no multiple of it")
        dense = [(Setting(backbone, context, 1, None, compute), seed)
                 for seed, compute, backbone, context in combinations(axes, "seeds", "compute", "backbones", "contexts")]
        sparse = [(Setting(backbone, context, k, a, compute), seed) for seed, compute, backbone, context, a, k in
                  combinations(axes, "seeds", "compute", "backbones", "contexts", "A", "K")]
        for setting, _ in sparse:
            check_setting(setting, grid.backbones[setting.backbone])
        return expect(part.get("held_out", False), bool, "held_out", "true or false"), dense + sparse
    except UserError as error:
        raise UserError(f"{where}: {error}")


def combinations(axes, *keys):
    return itertools.product(*(axes[key] for key in keys))


def read_axis(key, values, kind):
    values = values if isinstance(values, list) else [values]
    if not values:
        raise UserError(f"{key}: found an empty list, expected a value or more")
    for value in values:
        if kind is int:
            whole_number(key, value, least={"seeds": 0, "K": 2}.get(key, 1))
        elif kind is float:
            if not 0 < expect(value, (int, float), key, "a number of FLOPs such as 1e13") < float("inf"):
                raise UserError(f"{key}: found {value}, expected a number of FLOPs above 0")
        else:
            expect(value, str, key, "names")
    return [kind(value) for value in values]


def check_setting(setting, shape):
    """Is there such a model? An interval of A units of K sparse layers, and the anchor, must fit behind the prefix."""
    units = shape["active_layers"] - shape["dense_prefix"]
    if setting.k > setting.context:
        raise UserError(f"{setting.name()}: K {setting.k} is above the context of {setting.context} tokens; at most "
                        "as many")
    if setting.a + 1 > units:
        raise UserError(f"{setting.name()}: A {setting.a} has no complete interval: {shape['active_layers']} active "
                        f"layers less {shape['dense_prefix']} of the prefix are {units} units, A and the anchor take "
                        f"{setting.a + 1}; give A of at most {units - 1}")
