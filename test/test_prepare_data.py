"""Runs scripts/prepare_data.py as a user does and reads what it wrote. Bytes need nothing but Python; the tests
of BPE are skipped, with a line, where the packages tiktoken or tokenizers are missing."""

import base64
import importlib.util
import json
import os
import re
import resource
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "prepare_data.py"
sys.path.insert(0, str(SCRIPT.parent))
from prepare_data import PRE_SPLIT, UserError, printable_bytes, qwen_tokens  # noqa: E402
from prepare_eval import read_tokenizer as read_eval_tokenizer  # noqa: E402


def missing(package):
    return importlib.util.find_spec(package) is None


def read_shard(path):
    """(bytes per token, ids)"""
    data = path.read_bytes()
    magic, version, count = struct.unpack("<3i", data[:12])
    width = {(20240520, 1): 2, (20240801, 7): 4}[magic, version]
    assert data[12:1024] == bytes(1012) and len(data) == 1024 + count * width
    return width, list(struct.unpack(f"<{count}{'H' if width == 2 else 'I'}", data[1024:]))


def read_tokenizer(path):
    """(tokens, end-of-text token, pre-split)"""
    data = path.read_bytes()
    magic, version, count, eot, pre_split = struct.unpack("<5i", data[:20])
    assert (magic, version) == (20240328, 2)
    tokens, place = [], 1024
    for _ in range(count):
        tokens.append(data[place + 1:place + 1 + data[place]])
        place += 1 + data[place]
    assert place == len(data)
    return tokens, eot, pre_split


class PrepareDataTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.out = self.folder / "out"

    def write(self, name, content):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    def run_script(self, *arguments, environment=None, preexec=None):
        return subprocess.run([sys.executable, str(SCRIPT), *map(str, arguments), "--out", str(self.out)],
                              capture_output=True, text=True, cwd=self.folder, preexec_fn=preexec,
                              env={**os.environ, **(environment or {})})

    def prepare(self, *arguments):
        result = self.run_script(*arguments)
        self.assertEqual(result.returncode, 0, result.stderr)
        return result.stdout + result.stderr

    def expect_error(self, parts, *arguments, status=1, **options):
        result = self.run_script(*arguments, **options)
        self.assertEqual(result.returncode, status, result.stderr)
        self.assertEqual(len(result.stderr.splitlines()), 1, result.stderr)
        for part in parts:
            self.assertIn(part, result.stderr)

    def names(self):
        return sorted(path.name for path in self.out.iterdir())

    def ids(self, split):
        return [id for path in sorted(self.out.glob(f"{split}_*.bin")) for id in read_shard(path)[1]]

    def text(self, split):
        tokens = read_tokenizer(self.out / "tokenizer.bin")[0]
        return b"".join(tokens[id] for id in self.ids(split))


class Bytes(PrepareDataTest):
    def test_train_and_val_are_the_two_ends_of_the_file(self):
        text = "".join(f"line {i} of a téxt\n" for i in range(1000)).encode()
        output = self.prepare(self.write("book.txt", text))
        self.assertEqual(self.names(), ["tokenizer.bin", "train_000000.bin", "val_000000.bin"])
        self.assertEqual(read_shard(self.out / "train_000000.bin")[0], 2)
        train, val = self.text("train"), self.text("val")
        self.assertEqual(train + val, text)
        self.assertTrue(train.endswith(b"\n"))
        self.assertTrue(0 <= len(val) - len(text) // 10 < 25)
        self.assertIn(f"train: {len(train):,} tokens in 1 shard", output)
        self.assertIn("--vocab-size 256", output)

    def test_a_token_is_a_byte(self):
        content = bytes(range(256)) * 3  # zero bytes and invalid UTF-8: taken, since the file is named
        self.prepare(self.write("any.bin", content), "--val-fraction", 0)
        self.assertEqual(self.ids("train"), list(content))
        self.assertEqual(read_tokenizer(self.out / "tokenizer.bin"), ([bytes([byte]) for byte in range(256)], -1, 0))
        self.assertEqual(self.names(), ["tokenizer.bin", "train_000000.bin"])

    def test_cuts_no_character(self):
        for letters in range(40, 60):
            self.prepare(self.write("line.txt", b"a" * letters + "漢字仮名".encode() * 10), "--overwrite")
            self.text("train").decode()
            self.assertGreater(len(self.text("val").decode()), 0)

    def test_files_are_split_one_by_one(self):
        for name in "abc":
            self.write(f"{name}.txt", (f"{name} train\n" * 90 + f"{name} value\n" * 10).encode())
        self.prepare("b.txt", "a.txt", "c.txt", "b.txt")  # in the order given, each once
        self.assertEqual(self.text("train"), b"b train\n" * 90 + b"a train\n" * 90 + b"c train\n" * 90)
        self.assertEqual(self.text("val"), b"b value\n" * 10 + b"a value\n" * 10 + b"c value\n" * 10)

    def test_pieces_are_split_like_files(self):
        """Of a file of four books each gives its end, and nothing is lost or there twice."""
        for numbered in (True, False):
            books = [[f"{name} train\n"] * 900 + [f"{name} value\n"] * 100 for name in "abcd"]
            if numbered:  # lines of different length, so that the borders are not those of the books
                books = [[f"{i} {line}" for i, line in enumerate(book)] for book in books]
            text = "".join(line for book in books for line in book).encode()
            self.prepare(self.write("books.txt", text), "--val-pieces", 4, "--overwrite")
            train, val = self.text("train").splitlines(True), self.text("val").splitlines(True)
            self.assertEqual(sorted(train + val), sorted(text.splitlines(True)))
            self.assertTrue(abs(len(b"".join(val)) - len(text) / 10) < 4 * 20)
            for name in b"abcd":
                self.assertTrue(90 < sum(name in line[:-len(b"value\n")] for line in val) < 110)
        self.assertEqual(b"".join(val), b"".join(b"%c value\n" % name * 100 for name in b"abcd"))

    def test_pieces_cut_no_character(self):
        text = "漢字仮名".encode() * 100  # no line in it
        for letters in range(20):
            self.prepare(self.write("line.txt", b"a" * letters + text), "--val-pieces", 7, "--overwrite")
            train, val = self.text("train").decode(), self.text("val").decode()
            self.assertEqual(len(train) + len(val), letters + 400)
            self.assertTrue(40 <= len(val) <= 54)

    def test_more_pieces_than_text(self):
        self.write("a.txt", b"short\n")
        self.write("b.txt", b"b\n" * 1000)
        self.prepare("a.txt", "b.txt", "--val-pieces", 10)
        self.assertEqual(len(self.text("train") + self.text("val")), 2006)
        self.assertTrue(b"short\n" in self.text("train"))

    def test_a_file_larger_than_a_chunk(self):
        text = b"".join(b"%d\n" % i for i in range(400000))
        self.prepare(self.write("large.txt", text))
        self.assertEqual(self.text("train") + self.text("val"), text)

    def test_shards(self):
        for length, sizes in {299: [299], 300: [300], 301: [301], 449: [449], 450: [300, 150], 600: [300, 300],
                              749: [300, 449], 1000: [300, 300, 400]}.items():
            text = bytes(i % 251 for i in range(length))
            self.prepare(self.write("text", text), "--val-fraction", 0, "--shard-tokens", 300, "--overwrite")
            names = [f"train_{i:06}.bin" for i in range(len(sizes))]
            self.assertEqual(self.names(), ["tokenizer.bin"] + names)
            self.assertEqual([len(read_shard(self.out / name)[1]) for name in names], sizes)
            self.assertEqual(self.ids("train"), list(text))

    def test_folders(self):
        self.write("in/b.txt", b"b" * 20)
        self.write("in/a/z.md", b"z" * 20)
        self.write("in/a/y.TXT", b"y" * 20)
        self.write("in/.git/config", b"hidden")
        self.write("in/a/.hidden", b"hidden")
        self.write("in/image", b"binary \0")
        self.write("in/empty.txt", b"")
        self.out = self.folder / "in" / "out"  # its own output is no input
        output = self.prepare("in", "--val-fraction", 0)
        self.assertEqual(self.text("train"), b"b" * 20 + b"y" * 20 + b"z" * 20)
        self.assertIn("input: 3 files", output)
        for part in ("2 hidden", "1 binary", "1 empty"):
            self.assertIn(part, output)
        self.write("in/out/note.txt", b"n" * 20)
        self.prepare("in", "--val-fraction", 0, "--extensions", "txt,.md", "--overwrite")
        self.assertEqual(self.text("train"), b"b" * 20 + b"z" * 20)

    def test_patterns(self):
        self.write("in/deep/a.txt", b"a" * 20)
        self.write("in/b.txt", b"b" * 20)
        self.write("in/c.md", b"c" * 20)
        self.prepare("in/**/*.txt", "--val-fraction", 0)
        self.assertEqual(self.text("train"), b"b" * 20 + b"a" * 20)

    def test_an_earlier_run_is_replaced_only_if_asked_and_then_whole(self):
        text = self.write("text", b"x" * 900)
        self.prepare(text, "--shard-tokens", 100)
        before = {name: (self.out / name).read_bytes() for name in self.names()}
        self.expect_error(["holds tokenizer.bin", "--overwrite"], text)
        self.write("out/train_000077.bin.tmp", b"left by a run that was killed")
        self.expect_error(["nowhere: no such file"], "nowhere", "--overwrite")
        self.assertEqual({name: (self.out / name).read_bytes() for name in self.names()}, before)
        self.prepare(text, "--overwrite")
        self.assertEqual(self.names(), ["tokenizer.bin", "train_000000.bin", "val_000000.bin"])

    def test_a_full_disk_leaves_the_earlier_run(self):
        text = self.write("text", b"x\n" * 5000)
        self.prepare(text)
        before = {name: (self.out / name).read_bytes() for name in self.names()}
        self.write("text", b"y\n" * 500000)
        self.expect_error(["File too large", "space on the disk"], text, "--overwrite",
                          preexec=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000)))
        self.assertEqual({name: (self.out / name).read_bytes() for name in self.names()}, before)


class BadInput(PrepareDataTest):
    def test_no_text(self):
        self.expect_error(["nowhere.txt", "no such file or folder"], "nowhere.txt")
        self.expect_error(["*.txt", "nothing matches"], "*.txt")
        self.expect_error(["empty.txt", "no text", "1 empty"], self.write("empty.txt", b""))
        (self.folder / "hollow").mkdir()
        self.expect_error(["hollow", "no text"], "hollow")
        self.assertEqual(self.names(), [])

    @unittest.skipIf(os.geteuid() == 0, "root may read everything")
    def test_unreadable(self):
        path = self.write("secret.txt", b"secret")
        path.chmod(0)
        self.expect_error(["secret.txt", "Permission denied"], path)

    def test_output_is_no_folder(self):
        self.write("out", b"a file")
        self.expect_error([str(self.out), "File exists"], self.write("text", b"text"))

    def test_splits_without_text(self):
        text = self.write("text", b"12345")
        self.expect_error(["--val-fraction 0.1", "too short for a validation part"], text)
        self.expect_error(["no text is left for training"], self.write("sign", "é".encode()), "--val-fraction", 0.9)
        self.assertEqual(self.names(), [])

    def test_flags(self):
        text = self.write("text", b"text")
        for parts, arguments in (
                (["--val-fraction 1.0", "less than 1"], ["--val-fraction", 1]),
                (["--val-fraction -0.1"], ["--val-fraction", -0.1]),
                (["--val-pieces 0", "1 (the end of each file) or more"], ["--val-pieces", 0]),
                (["--shard-tokens 0", "expected 1 to"], ["--shard-tokens", 0]),
                (["--shard-tokens 3000000000"], ["--shard-tokens", 3000000000]),
                (["--vocab-size 256", "too small", "257"], ["--tokenizer", "bpe", "--vocab-size", 256]),
                (["--vocab-size", "only for --tokenizer bpe"], ["--vocab-size", 512]),
                (["--bpe-file", "only for"], ["--bpe-file", "x"]),
                (["invalid choice: 'words'"], ["--tokenizer", "words"])):
            self.expect_error(parts + ["--help"], text, *arguments, status=2)

    def test_missing_packages_are_named(self):
        text = self.write("text", b"text")
        for package, tokenizer in (("tiktoken", "gpt2"), ("tiktoken", "cl100k"), ("tokenizers", "bpe")):
            self.write(f"hidden/{package}.py", b"raise ImportError")
            self.expect_error([f"--tokenizer {tokenizer}", f"pip install {package}"], text, "--tokenizer", tokenizer,
                              environment={"PYTHONPATH": str(self.folder / "hidden")})

    def test_bpe_wants_text(self):
        self.expect_error(["binary", "zero byte", "--tokenizer bytes"], self.write("binary", b"a\0b"),
                          "--tokenizer", "bpe")


@unittest.skipIf(missing("tokenizers"), "the package tokenizers is missing: pip install tokenizers")
class TrainedBpe(PrepareDataTest):
    TEXT = "".join(f"the {i} theory of them; then téa 漢字, don't!\n\n  x" for i in range(3000)).encode()

    def test_round_trip(self):
        self.write("a.txt", self.TEXT)
        self.write("b.txt", b"b\n" * 100)
        self.prepare("a.txt", "b.txt", "--tokenizer", "bpe", "--vocab-size", 300)
        tokens, eot, pre_split = read_tokenizer(self.out / "tokenizer.bin")
        self.assertEqual((len(tokens), eot, pre_split), (300, 299, 1))
        self.assertEqual(tokens[eot], b"<|endoftext|>")
        self.assertEqual(sorted(tokens[:256]), [bytes([byte]) for byte in range(256)])
        self.assertIn(b" the", tokens)
        for split in ("train", "val"):  # the end-of-text token stands before each document and nowhere else
            self.assertEqual(self.ids(split)[0], eot)
            self.assertEqual(self.ids(split).count(eot), 2)
        parts = [self.text(split).split(b"<|endoftext|>")[1:] for split in ("train", "val")]
        self.assertEqual([train + val for train, val in zip(*parts)], [self.TEXT, b"b\n" * 100])
        self.assertLess(len(self.ids("train")), len(self.TEXT) / 2)

    def test_pieces(self):
        """Between two pieces of training text a piece of validation text is missing: another document begins."""
        self.prepare(self.write("text", self.TEXT), "--tokenizer", "bpe", "--vocab-size", 300, "--val-pieces", 5)
        parts = [self.text(split).split(b"<|endoftext|>")[1:] for split in ("train", "val")]
        self.assertEqual([len(part) for part in parts], [5, 5])
        self.assertEqual(b"".join(train + val for train, val in zip(*parts)), self.TEXT)

    def test_text_with_few_merges(self):
        output = self.prepare(self.write("text", b"abab\n" * 20), "--tokenizer", "bpe")
        vocabulary = len(read_tokenizer(self.out / "tokenizer.bin")[0])
        self.assertLess(vocabulary, 270)
        self.assertIn(f"the vocabulary is {vocabulary}", output)

    def test_invalid_utf8_is_replaced_and_reported(self):
        output = self.prepare(self.write("latin1.txt", "naïve café\n".encode("latin-1") * 100), "--tokenizer", "bpe")
        self.assertIn("na\ufffdve caf\ufffd", self.text("train").decode())
        self.assertIn("latin1.txt (200)", output)


def qwen_settings(merges=("t h", "th e", "Ġ the", "! Ċ", "1 2")):
    """A tokenizer.json as Hugging Face has it for Qwen models, of a few merges."""
    vocabulary = {character: id for id, character in enumerate(printable_bytes())}
    for merge in merges:
        vocabulary["".join(merge.split(" "))] = len(vocabulary)
    added = [{"id": len(vocabulary) + i, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": True} for i, content in enumerate(["<|endoftext|>", "<|im_start|>"])]
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": {"type": "NFC"},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": PRE_SPLIT["qwen"][1]}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}]},
            "post_processor": None, "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False,
                                                "use_regex": False},
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
                      "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "vocab": vocabulary,
                      "merges": list(merges)}}


class QwenFile(unittest.TestCase):
    def test_tokens_by_their_ids(self):
        settings = qwen_settings()
        tokens, eot = qwen_tokens(settings, "x")
        self.assertEqual(sorted(tokens[:256]), [bytes([byte]) for byte in range(256)])
        self.assertEqual(tokens[256:], [b"th", b"the", b" the", b"!\n", b"12", b"<|endoftext|>", b"<|im_start|>"])
        self.assertEqual(eot, 261)
        settings["model"]["merges"] = [merge.split(" ") for merge in settings["model"]["merges"]]  # of newer versions
        settings["added_tokens"][1]["id"] = 264  # two ids without a text
        self.assertEqual(qwen_tokens(settings, "x"), (tokens[:-1] + [b"", b"", b"<|im_start|>"], 261))

    def test_other_files(self):
        def changed(change):
            settings = qwen_settings()
            change(settings)
            return settings

        for part, settings in (
                ("not laid out", {}), ("not laid out", []), ("not laid out", changed(lambda s: s.pop("added_tokens"))),
                ("not laid out", changed(lambda s: s["model"].update(merges=[["q", "z"]]))),
                ("kind WordPiece", changed(lambda s: s["model"].update(type="WordPiece"))),
                ("expected by Qwen's pattern", changed(lambda s: s["pre_tokenizer"]["pretokenizers"].pop(0))),
                ("order of the merges", changed(lambda s: s["model"]["merges"].reverse())),
                ("no token for some byte", changed(lambda s: s["model"]["vocab"].pop("a"))),
                ("no <|endoftext|>", changed(lambda s: s["added_tokens"].pop(0)))):
            with self.assertRaisesRegex(UserError, "^some/tokenizer.json: .*" + re.escape(part)):
                qwen_tokens(settings, "some/tokenizer.json")


@unittest.skipIf(missing("tokenizers"), "the package tokenizers is missing: pip install tokenizers")
class QwenShards(PrepareDataTest):
    TEXT = "the 12 the!\n\n It's THE'LL <|endoftext|>  ²½ 漢字, don't \t\n x\n\n  "

    def test_ids_are_those_of_tokenizers_and_of_the_evaluation(self):
        import tokenizers
        path = self.write("model/tokenizer.json", json.dumps(qwen_settings()).encode())
        output = self.prepare(self.write("text", self.TEXT.encode()), "--tokenizer", "qwen", "--bpe-file", path,
                              "--val-fraction", 0)
        self.assertIn(f"--init-from {path.parent}", output)
        self.assertEqual(read_tokenizer(self.out / "tokenizer.bin")[1:], (261, 3))
        found, theirs = self.ids("train"), tokenizers.Tokenizer.from_file(str(path))
        self.assertEqual(found, [261] + read_eval_tokenizer(self.out / "tokenizer.bin").encode(self.TEXT))
        before, after = self.TEXT.split("<|endoftext|>")  # which is a special token there, and text here
        self.assertEqual(found[1:1 + len(theirs.encode(before).ids)], theirs.encode(before).ids)
        self.assertEqual(found[-len(theirs.encode(after).ids):], theirs.encode(after).ids)


@unittest.skipIf(missing("tiktoken"), "the package tiktoken is missing: pip install tiktoken")
class RankFile(PrepareDataTest):
    MERGES = [b"th", b"the", b" the", b"!\n", b"12"]

    def ranks(self, merges=MERGES):
        tokens = [bytes([byte]) for byte in range(256)] + merges
        lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)]
        return self.write("small.tiktoken", b"".join(lines)), lines

    def test_both_patterns(self):
        path = self.ranks()[0]
        text = self.write("text", b"the the!\n1 12")
        for tokenizer, pre_split, ids in (("gpt2", 1, [257, 258, 33, 10, 49, 32, 260]),
                                          ("cl100k", 2, [257, 258, 259, 49, 32, 260])):
            self.prepare(text, "--tokenizer", tokenizer, "--bpe-file", path, "--val-fraction", 0, "--overwrite")
            self.assertEqual(self.ids("train"), [261] + ids)
            tokens, eot, found = read_tokenizer(self.out / "tokenizer.bin")
            self.assertEqual((tokens[256:], eot, found), (self.MERGES + [b"<|endoftext|>"], 261, pre_split))

    def test_chunks_encode_like_the_whole(self):
        import tiktoken
        path = self.ranks()[0]
        text = "".join(f"the {i}  x!\n\n" + "漢" * (i % 7) for i in range(200000))
        self.prepare(self.write("text", text.encode()), "--tokenizer", "gpt2", "--bpe-file", path, "--val-fraction", 0)
        ranks = {token: rank for rank, token in enumerate([bytes([byte]) for byte in range(256)] + self.MERGES)}
        pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
        whole = tiktoken.Encoding("small", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        self.assertEqual(self.ids("train"), [261] + whole.encode_ordinary(text))

    def test_large_vocabularies_take_four_bytes_a_token(self):
        text = self.write("text", b"AABA")
        pairs = [bytes([first, second]) for first in range(256) for second in range(256)]
        pairs.sort(key=lambda pair: pair == b"AA")  # "AA" comes last
        for merges, width in ((pairs[256:-1] + [b"AA"], 4), (pairs[512:-1] + [b"AA"], 2)):
            path = self.ranks(merges)[0]
            self.prepare(text, "--tokenizer", "gpt2", "--bpe-file", path, "--val-fraction", 0, "--overwrite")
            tokens = read_tokenizer(self.out / "tokenizer.bin")[0]
            self.assertEqual(len(tokens), 257 + len(merges))
            found, ids = read_shard(self.out / "train_000000.bin")
            self.assertEqual((found, ids[0]), (width, len(tokens) - 1))
            self.assertEqual(b"".join(tokens[id] for id in ids[1:]), b"AABA")

    def test_bad_rank_files(self):
        text = self.write("text", b"text")
        path, lines = self.ranks()
        for parts, content in ((["line 3", "expected base64"], lines[:2] + [b"not base64!\n"]),
                               (["255 tokens", "256 bytes"], lines[:255]),
                               (["260 tokens", "once each"], lines[:258] + lines[259:])):
            path.write_bytes(b"".join(content))
            self.expect_error([str(path)] + parts, text, "--tokenizer", "gpt2", "--bpe-file", path)
        self.expect_error(["nowhere", "No such file"], text, "--tokenizer", "gpt2", "--bpe-file", "nowhere")


if __name__ == "__main__":
    unittest.main(verbosity=2)
