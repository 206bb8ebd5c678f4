#!/usr/bin/env python3
"""Turns the paper's evaluation sets into the files that `train_xmod eval --tasks` reads.

    prepare_eval.py --tokenizer-dir data --out tasks --hellaswag hellaswag_val.jsonl \\
        --arc-easy ARC-Easy-Test.jsonl --arc-challenge ARC-Challenge-Test.jsonl \\
        --piqa valid.jsonl valid-labels.lst --lambada lambada_test_en.jsonl --boolq dev.jsonl

writes tasks/hellaswag.bin, tasks/arc-easy.bin, ... through data/tokenizer.bin, which lies beside the training shards.
It needs nothing but Python. Each set is read in its original format, in that of its copy on Hugging Face saved as
JSON lines, or as lines {"query": ..., "choices": [...], "gold": 0}; LAMBADA as lines {"text": ...} or {"context": ...,
"continuation": ...}, or as plain text, a passage a line.

The texts are those of lm-evaluation-harness, without examples before them:

    HellaSwag  ACTIVITY: CONTEXT                          and each ending; wikiHow's [marks] removed
    ARC        Question: QUESTION \\n Answer:              and each choice
    PIQA       Question: GOAL \\n Answer:                  and each solution
    BoolQ      PASSAGE \\n Question: QUESTION? \\n Answer:  and no, yes
    LAMBADA    all words but the last                     and the last word

with one space between the two. (A "query" is taken as it stands, with "\\nAnswer:" added for ARC, PIQA and BoolQ where
it is not there.) The tokens of a choice are those of context + " " + choice behind those of the context alone.

A file has llm.c's multiple-choice layout, little endian:

    256 int32  header: [0] magic 20240522; [1] version: 1 for uint16, 2 for uint32; [2] items; [3] bytes of the longest
               item. Ours, all 0 in a file of llm.c: [4] task, 1 to 6 in the paper's order (hellaswag, arc-easy,
               arc-challenge, piqa, lambada, boolq); [5] and [6] low and high half of the tokenizer's fingerprint
               (FNV-1a, 64 bits, over the length byte and the bytes of each token); [7] 1: byte lengths follow
    items      numbers of that width: the largest one (a mark), bytes of this item, its index, the right choice (from
               0), number of choices; then number of tokens and tokens of the context, and of each choice
    lengths    one number for each choice of each item, in order: the bytes of its text without the space before it

llm.c reads items one after the other and never looks behind the last, so the lengths do not disturb it.
"""

import argparse
import collections
import json
import os
import re
import struct
import sys
import unicodedata

from prepare_data import UserError, count, one_line, packed

Item = collections.namedtuple("Item", "where context choices gold")  # where: for error lines; gold: the right choice
EncodedItem = collections.namedtuple("EncodedItem", "context choices gold choice_bytes")  # ids

MAGIC = 20240522
VERSIONS = {2: 1, 4: 2}  # bytes of a number -> version


# ---------------------------------------------------------------------------------------------- main


def main():
    arguments = parse_arguments()
    tokenizer = read_tokenizer(os.path.join(arguments.tokenizer_dir, "tokenizer.bin"))
    contents = {name: make_file(name, paths, tokenizer) for name, paths in arguments.inputs.items()}
    os.makedirs(arguments.out, exist_ok=True)
    outputs = []
    for name, content in contents.items():
        outputs.append(os.path.join(arguments.out, name + ".bin"))
        write_atomically(outputs[-1], content)
    print("evaluate with: --tasks " + " ".join(outputs))


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: sys.exit(usage_error(message))
    parser.add_argument("--tokenizer-dir", required=True, metavar="DIR",
                        help="where tokenizer.bin lies: the folder of the training shards, or a checkpoint")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the files; made if missing")
    for name, task in TASKS.items():
        parser.add_argument(f"--{name}", dest=name, nargs="+", metavar="FILE", help=task.help)
    arguments = parser.parse_args()
    arguments.inputs = {name: getattr(arguments, name) for name in TASKS if getattr(arguments, name)}
    if not arguments.inputs:
        parser.error("nothing to do: give at least one of " + ", ".join(f"--{name}" for name in TASKS))
    for name, paths in arguments.inputs.items():
        if len(paths) > TASKS[name].most_files:
            parser.error(f"--{name}: {len(paths)} files, expected {TASKS[name].help}")
    return arguments


def usage_error(message):
    print(f"prepare_eval.py: {message}; see --help", file=sys.stderr)
    return 2


def make_file(name, paths, tokenizer):
    task = TASKS[name]
    items = [encode_item(item, tokenizer) for item in task.read(*paths)]
    if not items:
        raise UserError(f"{paths[0]}: no items in it; give a file with one item a line")
    width = number_width(items, tokenizer)
    tokens = [item_tokens(item) for item in items]
    print(f"{name}: {count(len(items), 'item')}, {span([len(item.choices) for item in items], 'choice')} each, "
          f"{sum(tokens) / len(tokens):.0f} tokens an item, at most {max(tokens)}; uint{8 * width}")
    return pack_file(items, task.number, tokenizer, width)


def span(numbers, noun):
    low, high = min(numbers), max(numbers)
    return count(high, noun) if low == high else f"{low} to {count(high, noun)}"


# --------------------------------------------------------------------------- the sets, item by item


def read_hellaswag(path):
    without_parts = 0
    for row in json_lines(path):
        if "query" in row:
            yield ready_item(row)
            continue
        if "ctx_a" in row and "ctx_b" in row:
            context = row.text("ctx_a") + " " + row.text("ctx_b").capitalize()
        else:
            context = row.text("ctx")
            without_parts += 1
        endings = [without_marks(ending) for ending in row.texts("endings")]
        context = without_marks(row.text("activity_label") + ": " + context)
        yield Item(row.where, context, endings, row.label("label", endings))
    if without_parts:
        print(f"note: {path}: {count(without_parts, 'item')} without ctx_a and ctx_b: 'ctx' stays as it is, where "
              "lm-evaluation-harness begins ctx_b with a capital letter")


def without_marks(text):
    """wikiHow's texts have marks such as [title] and [step] in them."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def read_arc(path):
    for row in json_lines(path):
        if "query" in row:
            yield ready_item(row, answer=True)
            continue
        question, labels, choices = ai2_parts(row) if "stem" in row.inner("question") else hugging_face_parts(row)
        key = row.text("answerKey")
        if key not in labels or len(labels) != len(choices):
            row.fail(f"'answerKey' is {key!r}, expected one of {', '.join(labels)}")
        yield Item(row.where, f"Question: {question}\nAnswer:", choices, labels.index(key))


def ai2_parts(row):
    """{"question": {"stem": ..., "choices": [{"text": ..., "label": "A"}, ...]}, "answerKey": "A"}"""
    question = row.inner("question")
    options = [Row(row.where, option) for option in question.get("choices", list) if isinstance(option, dict)]
    return question.text("stem"), [o.text("label") for o in options], [o.text("text") for o in options]


def hugging_face_parts(row):
    """{"question": ..., "choices": {"text": [...], "label": ["A", ...]}, "answerKey": "A"}"""
    choices = row.inner("choices")
    return row.text("question"), choices.texts("label"), choices.texts("text")


def read_piqa(path, labels_path=None):
    rows = list(json_lines(path))
    if labels_path:
        labels = text_lines(labels_path)
        if len(labels) != len(rows):
            raise UserError(f"{labels_path}: {count(len(labels), 'label')}, but {path} has {count(len(rows), 'item')}; "
                            "give the labels of the same split")
        for row, (_, label) in zip(rows, labels):
            row.values["label"] = label
    for row in rows:
        if "query" in row:
            yield ready_item(row, answer=True)
            continue
        if "label" not in row:
            row.fail("no 'label'; PIQA has its labels in a file of their own: --piqa valid.jsonl valid-labels.lst")
        solutions = [row.text("sol1"), row.text("sol2")]
        yield Item(row.where, f"Question: {row.text('goal')}\nAnswer:", solutions, row.label("label", solutions))


def read_lambada(path):
    if path.endswith(".txt"):
        yield from (last_word(where, line) for where, line in text_lines(path))
        return
    for row in json_lines(path):
        if "text" in row:
            yield last_word(row.where, row.text("text"))
        else:
            yield Item(row.where, row.text("context"), [row.text("continuation")], 0)


def last_word(where, text):
    context, _, word = text.rpartition(" ")
    if not context.strip():
        raise UserError(f"{where}: {text[:40]!r} has no word before the last; give a passage of several words")
    return Item(where, context, [word], 0)


def read_boolq(path):
    choices = ["no", "yes"]
    for row in json_lines(path):
        if "query" in row:
            yield ready_item(row, answer=True)
            continue
        passage = row.text("passage")
        if "title" in row:  # in SuperGLUE's copy, the harness's, it is a part of the passage
            passage = f"{row.text('title')} -- {passage}"
        label = row.label("answer" if "answer" in row else "label", choices)
        yield Item(row.where, f"{passage}\nQuestion: {row.text('question')}?\nAnswer:", choices, label)


def ready_item(row, answer=False):
    """A line {"query", "choices", "gold"}."""
    query, choices = row.text("query"), row.texts("choices")
    if answer and not query.rstrip().endswith("Answer:"):
        query += "\nAnswer:"
    return Item(row.where, query, choices, row.label("gold", choices))


Task = collections.namedtuple("Task", "number read most_files help")
TASKS = {
    "hellaswag": Task(1, read_hellaswag, 1, "hellaswag_val.jsonl"),
    "arc-easy": Task(2, read_arc, 1, "ARC-Easy-Test.jsonl"),
    "arc-challenge": Task(3, read_arc, 1, "ARC-Challenge-Test.jsonl"),
    "piqa": Task(4, read_piqa, 2, "valid.jsonl and valid-labels.lst"),
    "lambada": Task(5, read_lambada, 1, "lambada_test_en.jsonl, or a .txt with a passage a line"),
    "boolq": Task(6, read_boolq, 1, "dev.jsonl"),
}


# ---------------------------------------------------------------------------------------------- lines


class Row:
    """One line of a JSON lines file: its values, each with a check of its kind."""

    KINDS = {str: "a text", list: "a list"}

    def __init__(self, where, values):
        self.where, self.values = where, values

    def __contains__(self, key):
        return key in self.values

    def get(self, key, kind):
        if not isinstance(self.values.get(key), kind):
            self.fail(f"{self.found(key)}, expected {self.KINDS[kind]}")
        return self.values[key]

    def text(self, key):
        return self.get(key, str)

    def texts(self, key):
        values = self.get(key, list)
        if len(values) < 2 or not all(isinstance(value, str) for value in values):
            self.fail(f"{self.found(key)}, expected two or more texts")
        return values

    def inner(self, key):
        """The object at a key; an empty one where there is none."""
        value = self.values.get(key)
        return Row(self.where, value if isinstance(value, dict) else {})

    def label(self, key, choices):
        """The index of the right choice: a number, a number as text, or BoolQ's true and false."""
        try:
            label = int(self.values.get(key))
        except (TypeError, ValueError, OverflowError):
            label = -1
        if isinstance(self.values.get(key), float) and label != self.values[key]:
            label = -1  # half an answer
        if not 0 <= label < len(choices):
            self.fail(f"{self.found(key)}, expected 0 to {len(choices) - 1} (a split without labels cannot be scored)")
        return label

    def found(self, key):
        return f"{key!r} is {json.dumps(self.values[key])[:40]}" if key in self else f"no {key!r}"

    def fail(self, message):
        raise UserError(f"{self.where}: {message}; is it the right file for this task?")


def json_lines(path):
    for where, line in text_lines(path):
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise UserError(f"{where}: {line[:40]!r}, expected one JSON object a line; give a .jsonl file")
        yield Row(where, values)


def text_lines(path):
    """(path and line number, line) of each line that is not blank."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            return [(f"{path}, line {number}", line.strip()) for number, line in enumerate(file, 1) if line.strip()]
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text; give the file as it was published")


# -------------------------------------------------------------------------------------- from text to ids


def encode_item(item, tokenizer):
    if not all(choice.strip() for choice in item.choices):
        raise UserError(f"{item.where}: a choice is empty, expected a text; give the file as it was published")
    # White space at the context's end belongs to the choice: the token of a word begins with it.
    context = tokenizer.encode(item.context.rstrip())
    choices = [tokenizer.encode(f"{item.context} {choice}")[len(context):] for choice in item.choices]
    lengths = [len(utf8(choice)) for choice in item.choices]
    return EncodedItem(context or tokenizer.beginning(), choices, item.gold, lengths)


def utf8(text):
    return text.encode("utf-8", "replace")  # JSON can hold half a surrogate pair


class Tokenizer:
    """Byte-level BPE, as xmod/tokenizer.h has it: cut the text into pieces, start each as single bytes and merge, again
    and again, the two neighbours whose concatenation has the lowest id."""

    def __init__(self, tokens, eot, pre_split):
        self.tokens, self.eot = tokens, eot
        self.ids = {}
        for id, token in enumerate(tokens):
            if token and id != eot:
                self.ids.setdefault(token, id)
        merges = any(len(token) > 1 for token in self.ids)
        self.pieces = piece_pattern(pre_split) if merges else re.compile(".", re.DOTALL)
        self.ids_of_piece = {}  # those met so far

    def encode(self, text):
        return [id for piece in self.pieces.findall(text) for id in self.encode_piece(piece)]

    def encode_piece(self, piece):
        if piece not in self.ids_of_piece:
            whole = utf8(piece)
            parts = [whole] if whole in self.ids else self.merge(whole)
            self.ids_of_piece[piece] = [self.ids[part] for part in parts]
        return self.ids_of_piece[piece]

    def merge(self, whole):
        none = len(self.tokens)
        parts = [whole[i:i + 1] for i in range(len(whole))]
        while len(parts) > 1:
            merged = [self.ids.get(a + b, none) for a, b in zip(parts, parts[1:])]
            first = min(range(len(merged)), key=merged.__getitem__)  # the leftmost of equal ones
            if merged[first] == none:
                break
            parts[first:first + 2] = [parts[first] + parts[first + 1]]
        return parts

    def beginning(self):
        """What stands for an empty context: the beginning of a document, or of a line."""
        return [self.eot] if self.eot >= 0 else self.encode("\n")

    def fingerprint(self):
        value = 0xCBF29CE484222325
        for token in self.tokens:
            for byte in bytes([len(token)]) + token:
                value = (value ^ byte) * 0x100000001B3 % 2**64
        return value


def piece_pattern(pre_split):
    """GPT-2's regular expression, cl100k's (2) or Qwen's (3). Python's `re` knows no Unicode categories: they are
    spelled out."""
    L, N, S = characters("L"), characters("N"), WHITE_SPACE
    if pre_split in (2, 3):
        digits, white = (f"[{N}]{{1,3}}", rf"[{S}]+\Z|[{S}]*[\r\n]") if pre_split == 2 else (f"[{N}]", rf"[{S}]*[\r\n]")
        return re.compile(rf"'(?i:[sdmt]|ll|ve|re)|[^\r\n{L}{N}]?[{L}]+|{digits}| ?[^{S}{L}{N}]+[\r\n]*"
                          rf"|{white}|[{S}]+(?![^{S}])|[{S}]")
    return re.compile(rf"'(?:[sdmt]|ll|ve|re)| ?[{L}]+| ?[{N}]+| ?[^{S}{L}{N}]+|[{S}]+\Z|[{S}]+(?![^{S}])|[{S}]")


WHITE_SPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"


def characters(category):
    """A Unicode category (L letters, N numbers) as the inside of a regular expression's [brackets]."""
    runs = []  # [first, last]
    for code in range(sys.maxunicode + 1):
        if unicodedata.category(chr(code))[0] == category:
            if runs and runs[-1][1] == code - 1:
                runs[-1][1] = code
            else:
                runs.append([code, code])
    return "".join(f"{chr(first)}-{chr(last)}" for first, last in runs)


def read_tokenizer(path):
    if not os.path.exists(path):
        raise UserError(f"{path}: not found; --tokenizer-dir is the folder where prepare_data.py wrote the training "
                        "shards, or a checkpoint")
    with open(path, "rb") as file:
        data = file.read()
    remedy = "make it again with scripts/prepare_data.py"
    if len(data) < 1024:
        raise UserError(f"{path}: truncated header: {len(data)} bytes, expected 1024; {remedy}")
    magic, version, size, eot, pre_split = struct.unpack("<5i", data[:20])
    if (magic, version) != (20240328, 2):
        raise UserError(f"{path}: magic number {magic} and version {version}, expected 20240328 and 2; {remedy}")
    tokens, place = [], 1024
    while len(tokens) < size and place < len(data):
        tokens.append(data[place + 1:place + 1 + data[place]])
        place += 1 + data[place]
    if len(tokens) != size or place != len(data):
        raise UserError(f"{path}: {len(data)} bytes, which are not the {size} tokens of its header; {remedy}")
    tokenizer = Tokenizer(tokens, eot, pre_split)
    for byte in range(256):
        if bytes([byte]) not in tokenizer.ids:
            raise UserError(f"{path}: no token for byte {byte}, expected one for each of the 256 bytes; {remedy}")
    return tokenizer


# --------------------------------------------------------------------------------------------- output


def item_tokens(item):
    return len(item.context) + sum(map(len, item.choices))


def item_numbers(item):
    return 5 + 1 + len(item.choices) + item_tokens(item)


def number_width(items, tokenizer):
    """2 bytes where every number fits and is none that marks the beginning of an item, else 4."""
    largest = max(len(tokenizer.tokens) - 1, len(items) - 1, 2 * max(map(item_numbers, items)),
                  max(max(item.choice_bytes) for item in items))
    return 2 if largest < 2**16 - 1 else 4


def pack_file(items, task, tokenizer, width):
    longest = width * max(map(item_numbers, items))
    fingerprint = struct.unpack("<2i", struct.pack("<Q", tokenizer.fingerprint()))
    header = struct.pack("<8i", MAGIC, VERSIONS[width], len(items), longest, task, *fingerprint, 1)
    numbers = []
    for index, item in enumerate(items):
        numbers += [256**width - 1, width * item_numbers(item), index, item.gold, len(item.choices)]
        for ids in [item.context, *item.choices]:
            numbers += [len(ids), *ids]
    for item in items:
        numbers += item.choice_bytes
    return header.ljust(1024, b"\0") + packed(numbers, width)


def write_atomically(path, content):
    try:
        with open(path + ".tmp", "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path + ".tmp", path)
    except BaseException:
        if os.path.isfile(path + ".tmp"):
            os.remove(path + ".tmp")
        raise


def run():
    try:
        main()
    except UserError as error:
        sys.exit(f"prepare_eval.py: {error}")
    except OSError as error:
        sys.exit(f"prepare_eval.py: {error.filename or 'cannot write'}: {one_line(error.strerror)}; check the path, its "
                 "permissions and the space on the disk")
    except KeyboardInterrupt:
        sys.exit("prepare_eval.py: interrupted; run it again, each file appears whole or not at all")


if __name__ == "__main__":
    run()
