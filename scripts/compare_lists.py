"""Lists of configurations for compare.py: reading them, and what their flags mean to the trainer."""

import difflib
import json
import os
import re
import shlex
import subprocess
from dataclasses import dataclass

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")

# Flags of the trainer that no list may hold, and what to do instead.
SET_HERE = {flag: f"give {flag} to the script" for flag in
            ("--train-data", "--val-data", "--compute", "--threads", "--out")}
SET_HERE |= {"--seed": "give --seeds to the script", "--steps": "give --compute to the script",
             "--resume": "runs are resumed by giving the same command again", "--help": "use train_xmod --help"}
WITHOUT_EFFECT = ["--out", "--threads", "--resume", "--checkpoint-interval", "--keep-checkpoints"]  # on the result
FILES = ["--train-data", "--val-data"]


class UserError(Exception):
    """One line: what is wrong, what was expected, what to do."""


def write_whole(path, text):
    with open(path + ".tmp", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(path + ".tmp", path)


def stem(path):
    return os.path.splitext(os.path.basename(path))[0]


def count(number, noun):
    return f"{number} {noun}" + ("" if number == 1 else "s")


# ---------------------------------------------------------------------------------------------- flags
# A dictionary of flag -> value as text, None for a flag without one.


def read_flags(words):
    flags = {}
    for word in words:
        if word.startswith("--") and len(word) > 2:
            flag, equals, value = word.partition("=")
            flags[flag] = value if equals else None
        elif flags and flags[flag] is None:
            flags[flag] = word
        else:
            raise UserError(f"found {word!r}, expected a flag such as --seq-len")
    return flags


def words_of(flags):
    return [word for flag, value in flags.items() for word in ([flag] if value is None else [flag, value])]


def known_flags(words, known, set_here=SET_HERE):
    """The flags, each of which a user may give."""
    flags = read_flags(words)
    for flag in flags:
        if flag in set_here:
            raise UserError(f"{flag} cannot stand here; {set_here[flag]}")
        if flag not in known:
            close = difflib.get_close_matches(flag, known, n=1)
            raise UserError(f"unknown flag {flag}" + (f", did you mean {close[0]}?" if close else
                                                      " (train_xmod --help lists them)"))
    return flags


def behind_dashes(words, known):
    try:
        return known_flags(words, known)
    except UserError as error:
        raise UserError(f"behind --: {error}")


def same(flag, a, b):
    if flag in FILES and a and b:
        return os.path.abspath(a) == os.path.abspath(b)
    return as_number(a) == as_number(b)


def as_number(text):
    try:
        return float(text)
    except (TypeError, ValueError):
        return text


def difference(found, expected):
    """Of two sets of flags the first that is not the same in both, in words; None if there is none."""
    def show(flags):
        return " ".join(words_of({flag: flags[flag]})) if flag in flags else f"no {flag}"

    for flag in list(expected) + list(found):
        if flag in WITHOUT_EFFECT or flag in found and flag in expected and same(flag, found[flag], expected[flag]):
            continue
        return f"{show(found)}, not {show(expected)}"
    return None


# ---------------------------------------------------------------------------------------- the trainer


def run_binary(binary, *words):
    """stdout; or a UserError with its complaint."""
    try:
        result = subprocess.run([binary, *words], capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise UserError(f"--binary {binary}: {error.strerror}; build it with make, or give another")
    if result.returncode != 0:
        raise UserError(complaint(result.stderr, result.returncode))
    return result.stdout


def complaint(text, status):
    """Why a run ended: its last line, and what happened to it."""
    lines = text.strip().splitlines()
    if status < 0:
        return f"killed by signal {-status}"
    return re.sub("^error: ", "", lines[-1]) if lines else f"exit status {status}"


def flags_of_help(binary, command):
    flags = re.findall(r"^  (--[a-z0-9-]+)", run_binary(binary, command, "--help"), re.MULTILINE)
    if not flags:
        raise UserError(f"--binary {binary}: its {command} --help lists no flags; give a train_xmod")
    return flags


def make_plan(options, configuration, known):
    """Layers, parameters and FLOPs: `train_xmod plan` with those of the flags that it takes."""
    flags = {flag: value for flag, value in configuration.flags.items() if flag in known}
    try:
        text = run_binary(options.binary, "plan", *words_of(flags), "--compute", options.compute, "--json")
    except UserError as error:
        raise UserError(f"{configuration.where}: {configuration.name}: {error}")
    return json.loads(text)


# ---------------------------------------------------------------------------------------------- lists


@dataclass
class Configuration:
    name: str
    own: dict  # flags, as in its line
    where: str  # file and line
    flags: dict = None  # all
    plan: dict = None


@dataclass
class Comparison:
    """What a list file says."""
    path: str
    title: str
    notes: list
    common: dict
    baseline: str  # or None
    configurations: list


def read_list(path, known, extra):
    comparison = Comparison(path, stem(path), [], {}, None, [])
    baseline_line = None
    for number, line in numbered_lines(path):
        try:
            key, text = split_line(line)
            if key == "baseline":
                baseline_line = number
            read_line(comparison, key, text, known, f"{path}:{number}")
        except UserError as error:
            raise UserError(f"{path}:{number}: {error}")
    names = [configuration.name for configuration in comparison.configurations]
    if not names:
        raise UserError(f"{path}: no configuration in it; expected lines such as `dense: --arch dense`")
    if comparison.baseline and comparison.baseline not in names:
        raise UserError(f"{path}:{baseline_line}: baseline {comparison.baseline} is not in the list; expected one of "
                        f"{', '.join(names)}")
    for configuration in comparison.configurations:
        configuration.flags = {**comparison.common, **configuration.own, **extra}
    return comparison


def numbered_lines(path):
    """(number, line) without comments and empty lines."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a list of configurations such as scripts/compare/table1.txt")
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text file; give a list of configurations")
    stripped = [re.sub(r"(^|\s)#.*", "", line).strip() for line in lines]
    return [(number, line) for number, line in enumerate(stripped, 1) if line]


def split_line(line):
    key, colon, text = line.partition(":")
    key = key.strip()
    if not colon or not NAME.fullmatch(key):
        raise UserError(f"found {line[:60]!r}, expected `name: flags` with a name of letters, digits and . _ + -")
    return key, text.strip()


def read_line(comparison, key, text, known, where):
    if key in ("title", "note", "common", "baseline"):
        if comparison.configurations:
            raise UserError(f"{key}: stands behind a configuration; move it before the first one")
        if key == "title":
            comparison.title = text
        elif key == "note":
            comparison.notes.append(text)
        elif key == "baseline":
            comparison.baseline = text
        else:
            comparison.common.update(known_flags(split_words(text), known))
        return
    for other in comparison.configurations:
        if other.name == key:
            raise UserError(f"{key} is already the name of the configuration at {other.where}; give it another name")
    comparison.configurations.append(Configuration(key, known_flags(split_words(text), known), where))


def split_words(text):
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{error} in {text[:60]!r}")


def distinct_configurations(comparisons):
    """Of all lists, each name once; it must mean the same everywhere."""
    by_name = {}
    for comparison in comparisons:
        for configuration in comparison.configurations:
            first = by_name.setdefault(configuration.name, configuration)
            unlike = difference(configuration.flags, first.flags)
            if unlike:
                raise UserError(f"{configuration.where}: {configuration.name} has {unlike} as at {first.where}; give "
                                "one of them another name")
    return list(by_name.values())
