"""Runs scripts/prepare_eval.py on a few items of each set in each of its formats, and reads what it wrote."""

import contextlib
import io
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))
import prepare_eval  # noqa: E402
from prepare_eval import Tokenizer, piece_pattern  # noqa: E402

BYTES = [bytes([byte]) for byte in range(256)]
MERGES = [b"th", b"the", b" the", b"An", b"Answer", b" n", b" no", b"caf", b"!\n"]

ARC = {"id": "1", "question": {"stem": "Why?", "choices": [{"text": "So.", "label": "1"}, {"text": "No.", "label": "2"},
                                                           {"text": "Yes.", "label": "3"}]}, "answerKey": "3"}
HELLASWAG = {"ind": 1, "activity_label": "Roofs", "ctx_a": "A man [title] sits.", "ctx_b": "he THEN", "ctx": "unused",
             "label": 1, "endings": ["[step] is  here.", "runs.", "x", "y [a] z"]}


def write_tokenizer(path, tokens, eot=-1, pre_split=0):
    path.parent.mkdir(exist_ok=True)
    header = struct.pack("<256i", 20240328, 2, len(tokens), eot, pre_split, *[0] * 251)
    path.write_bytes(header + b"".join(bytes([len(token)]) + token for token in tokens))


class TaskFile:
    """An evaluation file in its parts."""

    def __init__(self, path):
        data = path.read_bytes()
        self.header = struct.unpack("<256i", data[:1024])
        assert self.header[0] == 20240522
        self.width = {1: 2, 2: 4}[self.header[1]]
        self.numbers = struct.unpack(f"<{(len(data) - 1024) // self.width}{'H' if self.width == 2 else 'I'}", data[1024:])
        self.items, place, longest = [], 0, 0
        for index in range(self.header[2]):
            begin = place
            mark, size, number, gold, choices = self.numbers[place:place + 5]
            assert (mark, number) == (256**self.width - 1, index)
            place, parts = place + 5, []
            for _ in range(1 + choices):
                parts.append(self.numbers[place + 1:place + 1 + self.numbers[place]])
                place += 1 + len(parts[-1])
            assert size == self.width * (place - begin)
            longest = max(longest, size)
            self.items.append((gold, *parts))
        assert self.header[3] == longest
        self.lengths = self.numbers[place:]

    def texts(self, tokens=BYTES):
        """[(right choice, context, choice, choice, ...), ...]"""
        return [(gold, *(b"".join(tokens[id] for id in part).decode() for part in parts)) for gold, *parts in self.items]


class PrepareEvalTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.use_tokenizer(BYTES)

    def use_tokenizer(self, tokens, **fields):
        write_tokenizer(self.folder / "data" / "tokenizer.bin", tokens, **fields)

    def write(self, name, *rows):
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (self.folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        return name

    def run_script(self, *arguments):
        """In this process, since starting Python takes longer than all else; (status, stdout, stderr)."""
        before, sys.argv = sys.argv, ["prepare_eval.py", "--tokenizer-dir", "data", "--out", "out", *arguments]
        folder, code = os.getcwd(), 0
        os.chdir(self.folder)
        try:
            with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
                prepare_eval.run()
        except SystemExit as exit:
            code = exit.code
        finally:
            sys.argv = before
            os.chdir(folder)
        if isinstance(code, str):  # what Python does with it
            code = (err.write(code + "\n"), 1)[1]
        return code, out.getvalue(), err.getvalue()

    def prepare(self, task, *paths):
        status, self.output, errors = self.run_script(f"--{task}", *paths)
        self.assertEqual(status, 0, errors)
        return TaskFile(self.folder / "out" / f"{task}.bin")

    def texts(self, task, *paths):
        return self.prepare(task, *paths).texts()

    def expect_error(self, parts, *arguments, status=1):
        found, _, errors = self.run_script(*arguments)
        self.assertEqual(found, status, errors)
        self.assertEqual(len(errors.splitlines()), 1, errors)
        for part in ["prepare_eval.py: ", *parts]:
            self.assertIn(part, errors)
        self.assertFalse(list(self.folder.glob("out/*")))


class Texts(PrepareEvalTest):
    """Each set in each of its formats gives the texts that lm-evaluation-harness makes of it."""

    def test_hellaswag(self):
        expected = (1, "Roofs: A man. sits. He then", "  is here.", " runs.", " x", " y z")
        self.assertEqual(self.texts("hellaswag", self.write("h", HELLASWAG)), [expected])
        as_text = {**HELLASWAG, "label": "1"}  # Hugging Face's copy
        self.assertEqual(self.texts("hellaswag", self.write("h", as_text)), [expected])
        self.assertNotIn("note", self.output)

    def test_hellaswag_without_the_parts_of_the_context(self):
        row = {key: value for key, value in HELLASWAG.items() if key not in ("ctx_a", "ctx_b")}
        texts = self.texts("hellaswag", self.write("h", {**row, "ctx": "A man sits. he"}))
        self.assertEqual(texts[0][1], "Roofs: A man sits. he")
        self.assertIn("note: h: 1 item without ctx_a and ctx_b", self.output)

    def test_arc(self):
        expected = (2, "Question: Why?\nAnswer:", " So.", " No.", " Yes.")
        hugging_face = {"question": "Why?", "choices": {"text": ["So.", "No.", "Yes."], "label": ["A", "B", "C"]},
                        "answerKey": "C"}
        for task in ("arc-easy", "arc-challenge"):
            self.assertEqual(self.texts(task, self.write("a", ARC, hugging_face)), [expected] * 2)

    def test_piqa(self):
        rows = [{"goal": f"Goal {i}", "sol1": "One", "sol2": "Two"} for i in range(2)]
        expected = [(0, "Question: Goal 0\nAnswer:", " One", " Two"), (1, "Question: Goal 1\nAnswer:", " One", " Two")]
        self.assertEqual(self.texts("piqa", self.write("p", *rows), self.write("l", "0", "1")), expected)
        with_labels = [{**row, "label": i} for i, row in enumerate(rows)]
        self.assertEqual(self.texts("piqa", self.write("p", *with_labels)), expected)

    def test_boolq(self):
        original = {"question": "is it", "title": "It", "answer": True, "passage": "It is."}
        superglue = {"question": "is it", "passage": "It -- It is.", "label": 0}
        context = "It -- It is.\nQuestion: is it?\nAnswer:"
        self.assertEqual(self.texts("boolq", self.write("b", original, superglue)),
                         [(1, context, " no", " yes"), (0, context, " no", " yes")])

    def test_lambada(self):
        expected = [(0, '"I see," he said.\n\n"So do', " I"), (0, "It was", " mine.")]
        self.assertEqual(self.texts("lambada", self.write("l", {"text": '"I see," he said.\n\n"So do I'},
                                                          {"context": "It was", "continuation": "mine."})), expected)
        self.assertEqual(self.texts("lambada", self.write("l.txt", "It was mine.", "", "one two  three")),
                         [expected[1], (0, "one two", "  three")])

    def test_ready_items(self):
        row = {"query": "Question: Why?", "choices": ["a", "b"], "gold": 1}
        for task in ("arc-easy", "arc-challenge", "piqa", "boolq"):
            self.assertEqual(self.texts(task, self.write("r", row, {**row, "query": "Question: Why?\nAnswer:"})),
                             [(1, "Question: Why?\nAnswer:", " a", " b")] * 2)
        self.assertEqual(self.texts("hellaswag", self.write("r", row)), [(1, "Question: Why?", " a", " b")])

    def test_white_space_at_the_end_of_a_context_belongs_to_the_choices(self):
        row = {"query": "So  ", "choices": ["a", "b"], "gold": 1}
        self.assertEqual(self.texts("hellaswag", self.write("r", row)), [(1, "So", "   a", "   b")])

    def test_an_empty_context_is_the_beginning_of_a_document_or_line(self):
        path = self.write("r", {"query": "", "choices": ["a", "b"], "gold": 1})
        self.assertEqual(self.texts("hellaswag", path), [(1, "\n", " a", " b")])
        self.use_tokenizer(BYTES + [b"<|endoftext|>"], eot=256)
        self.assertEqual(self.prepare("hellaswag", path).items, [(1, (256,), (32, 97), (32, 98))])


class Layout(PrepareEvalTest):
    def test_header_and_lengths(self):
        file = self.prepare("arc-challenge", self.write("a", ARC, {"query": "Q", "choices": ["né", "ab"], "gold": 0}))
        self.assertEqual(file.header[:3], (20240522, 1, 2))
        self.assertEqual(file.header[4:], (3, 0xeb763225 - 2**32, 0x8eb76421 - 2**32, 1) + (0,) * 248)
        self.assertEqual(file.lengths, (3, 3, 4, 3, 2))  # bytes, without the space
        self.assertIn("2 items, 2 to 3 choices each", self.output)
        self.assertIn("--tasks out/arc-challenge.bin", self.output)

    def test_tasks_are_numbered_as_in_the_paper(self):
        row = {"query": "Q", "choices": ["a", "b"], "gold": 0}
        for number, task in enumerate(("hellaswag", "arc-easy", "arc-challenge", "piqa", "lambada", "boolq"), 1):
            path = self.write("r", {"text": "a b"} if task == "lambada" else row)
            self.assertEqual(self.prepare(task, path).header[4], number)

    def test_four_bytes_where_two_are_too_few(self):
        row = {"query": "Q", "choices": ["a", "b"], "gold": 0}
        self.assertEqual(self.prepare("piqa", self.write("r", row)).width, 2)
        long = self.write("r", {**row, "query": "x" * 40000})
        self.assertEqual((self.prepare("piqa", long).width, self.texts("piqa", long)[0][1][:40000]), (4, "x" * 40000))
        many = {"text": "a b"}
        self.assertEqual(self.prepare("lambada", self.write("r", *[many] * 65536)).width, 4)
        pairs = [bytes([a, b]) for a in range(256) for b in range(256)][:65535 - 256]
        for tokens, width in ((BYTES + pairs, 2), (BYTES + pairs + [b"\xff\xff"], 4)):
            self.use_tokenizer(tokens)
            self.assertEqual(self.prepare("piqa", self.write("r", row)).width, width)

    def test_several_tasks_at_once_as_a_user_does(self):
        command = [sys.executable, SCRIPTS / "prepare_eval.py", "--tokenizer-dir", "data", "--out", "out",
                   "--arc-easy", self.write("a", ARC), "--hellaswag", self.write("h", HELLASWAG)]
        result = subprocess.run(command, capture_output=True, text=True, cwd=self.folder)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(sorted(path.name for path in (self.folder / "out").iterdir()), ["arc-easy.bin", "hellaswag.bin"])


class Bpe(PrepareEvalTest):
    def test_tokens_of_a_choice_stand_behind_those_of_the_context(self):
        tokens = BYTES + MERGES
        self.use_tokenizer(tokens, pre_split=1)
        file = self.prepare("arc-easy", self.write("r", {"query": "the the", "choices": ["no", "café!"], "gold": 0}))
        self.assertEqual([tokens[id] for id in file.items[0][1]], [b"the", b" the", b"\n", b"Answer", b":"])
        self.assertEqual([tokens[id] for id in file.items[0][2]], [b" no"])
        self.assertEqual(file.texts(tokens), [(0, "the the\nAnswer:", " no", " café!")])
        self.assertEqual(file.lengths, (2, 6))

    def test_merges_the_lowest_id_first(self):
        tokenizer = Tokenizer(BYTES + [b"bc", b"ab", b"cd", b"bcd"], -1, 1)
        def merged(text):
            return [tokenizer.tokens[id] for id in tokenizer.encode(text)]
        self.assertEqual(merged("abcd"), [b"a", b"bcd"])
        self.assertEqual(merged("abd"), [b"ab", b"d"])
        self.assertEqual(merged("abcd abc"), [b"a", b"bcd", b" ", b"a", b"bc"])

    def test_pieces(self):
        text = "It's THE'S 1234  ²x\r\n\n don't_stop…  漢字\tz \n"
        self.assertEqual(piece_pattern(1).findall(text),
                         ["It", "'s", " THE", "'", "S", " 1234", " ", " ²", "x", "\r\n\n", " don", "'t", "_", "stop", "…",
                          " ", " 漢字", "\t", "z", " \n"])
        self.assertEqual(piece_pattern(2).findall(text),
                         ["It", "'s", " THE", "'S", " ", "123", "4", " ", " ", "²", "x", "\r\n\n", " don", "'t", "_stop",
                          "…", " ", " 漢字", "\tz", " \n"])
        self.assertEqual(piece_pattern(3).findall(text + "\n "),
                         ["It", "'s", " THE", "'S", " ", "1", "2", "3", "4", " ", " ", "²", "x", "\r\n\n", " don", "'t",
                          "_stop", "…", " ", " 漢字", "\tz", " \n\n", " "])

    def test_no_character_is_lost(self):
        text = "".join(map(chr, [*range(0x250), *range(0x2000, 0x2070), 0x3000, 0x1F600, 0x1680, 0xE000])) * 2
        for pre_split in (1, 2, 3):
            self.assertEqual("".join(piece_pattern(pre_split).findall(text)), text)


class BadInput(PrepareEvalTest):
    def test_rows_are_named(self):
        row = {"query": "Q", "choices": ["a", "b"], "gold": 0}
        for task, bad, parts in (
                ("hellaswag", "{", ["'{', expected one JSON object"]),
                ("hellaswag", "[1]", ["expected one JSON object"]),
                ("hellaswag", {**HELLASWAG, "label": ""}, ["'label' is \"\"", "expected 0 to 3", "without labels"]),
                ("hellaswag", {**HELLASWAG, "endings": ["a"]}, ["'endings' is [\"a\"]", "two or more texts"]),
                ("hellaswag", {**HELLASWAG, "endings": ["a", "[b]"]}, ["a choice is empty"]),
                ("hellaswag", ARC, ["no 'ctx'", "right file for this task"]),
                ("arc-easy", {**ARC, "answerKey": "D"}, ["'answerKey' is 'D', expected one of 1, 2, 3"]),
                ("arc-easy", HELLASWAG, ["no 'question'"]),
                ("piqa", {"goal": "g", "sol1": "a", "sol2": "b"}, ["no 'label'", "valid-labels.lst"]),
                ("boolq", {"question": "q", "passage": "p"}, ["no 'label', expected 0 to 1"]),
                ("boolq", {"question": "q", "passage": 1, "answer": True}, ["'passage' is 1, expected a text"]),
                ("lambada", {"text": "word"}, ["'word' has no word before the last"]),
                ("lambada", row, ["no 'context'"]),
                ("piqa", {**row, "gold": 2}, ["'gold' is 2, expected 0 to 1"]),
                ("piqa", {**row, "gold": 0.5}, ["'gold' is 0.5, expected 0 to 1"]),
                ("piqa", {**row, "gold": float("inf")}, ["'gold' is Infinity, expected 0 to 1"])):
            good = {"text": "a b"} if task == "lambada" else row
            self.expect_error(["rows, line 3: ", *parts], f"--{task}", self.write("rows", good, "", bad))

    def test_files(self):
        self.expect_error(["nowhere", "No such file"], "--piqa", "nowhere")
        self.expect_error(["empty: no items"], "--piqa", self.write("empty", ""))
        (self.folder / "binary").write_bytes(b"\xff\xfe")
        self.expect_error(["binary: not UTF-8"], "--lambada", "binary")
        self.write("items", {"goal": "g", "sol1": "a", "sol2": "b"})
        self.expect_error(["labels: 2 labels, but items has 1 item"], "--piqa", "items", self.write("labels", "0", "1"))
        self.expect_error(["items, line 1: 'label' is \"2\""], "--piqa", "items", self.write("labels", "2"))

    def test_one_bad_file_keeps_all_from_being_written(self):
        self.expect_error(["nowhere"], "--arc-easy", self.write("a", ARC), "--boolq", "nowhere")

    def test_tokenizers(self):
        path = self.write("a", ARC)
        file = self.folder / "data" / "tokenizer.bin"
        whole = file.read_bytes()
        for content, parts in ((whole[:1000], ["truncated header: 1000 bytes"]),
                               (b"\0" * 4 + whole[4:], ["magic number 0"]),
                               (whole[:-1], ["not the 256 tokens"]), (whole + b"\1x", ["not the 256 tokens"])):
            file.write_bytes(content)
            self.expect_error(["tokenizer.bin: ", *parts, "prepare_data.py"], "--arc-easy", path)
        self.use_tokenizer(BYTES[:-1])
        self.expect_error(["no token for byte 255"], "--arc-easy", path)
        file.unlink()
        self.expect_error(["tokenizer.bin: not found", "--tokenizer-dir"], "--arc-easy", path)

    def test_flags(self):
        self.expect_error(["at least one of --hellaswag, --arc-easy"], status=2)
        self.expect_error(["--boolq: 2 files, expected dev.jsonl"], "--boolq", "a", "b", status=2)
        self.expect_error(["unrecognized arguments: --hella"], "--hella-swag", "a", status=2)

    def test_output_is_no_folder(self):
        self.write("a", ARC)
        (self.folder / "out").write_text("a file")
        status, _, errors = self.run_script("--arc-easy", "a")
        self.assertEqual(status, 1)
        self.assertRegex(errors, re.compile(r"^prepare_eval.py: out: .*\n$"))


if __name__ == "__main__":
    unittest.main(verbosity=2)
