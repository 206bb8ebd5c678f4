#!/usr/bin/env python3
"""Turns text into token shards for training.

    prepare_data.py book.txt --out data                           a token is a byte (vocabulary 256)
    prepare_data.py src/ docs/*.md --out data --extensions h,cpp,md
    prepare_data.py corpus/ --out data --tokenizer gpt2           GPT-2's BPE (50257), by tiktoken
    prepare_data.py corpus/ --out data --tokenizer bpe --vocab-size 8192   a BPE trained on this text
    prepare_data.py corpus/ --out data --tokenizer qwen --bpe-file Qwen3-0.6B/tokenizer.json   that of the model

writes OUT/train_000000.bin ..., OUT/val_000000.bin ... and OUT/tokenizer.bin. A shard is 256 little-endian
int32 (magic, version, number of tokens), then the tokens: uint16 where the vocabulary fits (magic 20240520,
version 1), else uint32 (magic 20240801, version 7). All files appear together when all of them are complete.

Validation text: the last part of every file, cut at the beginning of a line, so it has the same mixture as
the training text and shares nothing with it. One file of many books would have its last books there: with
--val-pieces 50 it is cut into 50 stretches of equal length, and the last part of each is validation text. BPE
tokenizers put their end-of-text token before each part; bytes have no such token. A BPE is trained on the
training text only.

Folders are searched for text files, except hidden names (.git and so on) and files with a zero byte in their
first 8 KiB; a file that is named itself is always taken.
"""

import argparse
import base64
import codecs
import collections
import glob
import json
import os
import re
import struct
import sys
import time
from array import array

CHUNK_BYTES = 1 << 18  # read at a time
BATCH_CHARACTERS = 2 << 20  # encoded at a time, by all cores
SNIFF_BYTES = 8192
LINE_WINDOW = 4096
LARGEST_SHARD = 1_000_000_000  # the header's count is an int32, and the last shard may grow by half
LONGEST_TOKEN = 255  # bytes: tokenizer.bin has one byte for the length

END_OF_TEXT = b"<|endoftext|>"
# The regular expressions by which words are told apart: name -> (number in tokenizer.bin, pattern). The possessive
# ++ never has to backtrack, so a megabyte of spaces is no trouble.
PRE_SPLIT = {
    "gpt2": (1, r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"),
    "cl100k": (2, r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
                  r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"),
    "qwen": (3, r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
                r"|\s+(?!\S)|\s+"),  # as it stands in a tokenizer.json
}
# tiktoken's name, number of ranks, end-of-text token
PUBLISHED = {"gpt2": ("gpt2", 50256, 50256), "cl100k": ("cl100k_base", 100256, 100257)}


class UserError(Exception):
    """One line: what is wrong, what was expected, what to do."""


# ---------------------------------------------------------------------------------------------- main


def main():
    arguments = parse_arguments()
    check_output(arguments.out, arguments.overwrite)
    documents = find_documents(arguments)
    tokenizer = make_tokenizer(arguments, documents)
    width = 2 if tokenizer.vocab_size <= 65536 else 4
    train = ShardWriter(arguments.out, "train", width, arguments.shard_tokens)
    val = ShardWriter(arguments.out, "val", width, arguments.shard_tokens)
    try:
        encode_documents(documents, tokenizer, train, val)
        train.finish()
        val.finish()
        check_splits(train, val, arguments.val_fraction)
        tokenizer_path = write_tokenizer(arguments.out, tokenizer)
        publish(arguments.out, train.paths + val.paths + [tokenizer_path])
    except BaseException:
        remove_temporaries(arguments.out)
        raise
    report(arguments, tokenizer, train, val)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: sys.exit(usage_error(message))
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="text file, folder or quoted glob pattern")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the shards; made if missing")
    parser.add_argument("--tokenizer", choices=["bytes", "gpt2", "cl100k", "bpe", "qwen"], default="bytes",
                        help="bytes (default); gpt2 or cl100k through tiktoken; bpe: train one through tokenizers; "
                        "qwen: that of a Qwen model, through tokenizers")
    parser.add_argument("--vocab-size", type=int, metavar="N",
                        help="for bpe: 256 bytes + merges + end-of-text token (default 4096)")
    parser.add_argument("--bpe-file", metavar="FILE",
                        help="for gpt2 and cl100k: a local .tiktoken rank file, else tiktoken downloads one; for qwen: "
                        "the model's tokenizer.json")
    parser.add_argument("--val-fraction", type=float, default=0.1, metavar="F",
                        help="part of each file kept for validation, from its end (default 0.1; 0 for none)")
    parser.add_argument("--val-pieces", type=int, default=1, metavar="N",
                        help="cut each file into N equal stretches and keep the end of each (default 1: of the file)")
    parser.add_argument("--shard-tokens", type=int, default=100_000_000, metavar="N",
                        help="tokens per shard (default 100000000); a short last one joins the one before")
    parser.add_argument("--extensions", type=lambda text: re.split(r"[ ,]+", text.strip(" ,")), metavar="LIST",
                        help="take only such files from folders, for example txt,md")
    parser.add_argument("--overwrite", action="store_true", help="replace the shards of an earlier run in DIR")
    arguments = parser.parse_args()
    if not 0 <= arguments.val_fraction < 1:
        parser.error(f"--val-fraction {arguments.val_fraction}: expected 0 or more and less than 1")
    if arguments.val_pieces < 1:
        parser.error(f"--val-pieces {arguments.val_pieces}: expected 1 (the end of each file) or more")
    if not 1 <= arguments.shard_tokens <= LARGEST_SHARD:
        parser.error(f"--shard-tokens {arguments.shard_tokens}: expected 1 to {LARGEST_SHARD}")
    if arguments.vocab_size is not None and arguments.tokenizer != "bpe":
        parser.error("--vocab-size: only for --tokenizer bpe, the others have a vocabulary of their own")
    if arguments.bpe_file and arguments.tokenizer not in (*PUBLISHED, "qwen"):
        parser.error("--bpe-file: only for --tokenizer gpt2, cl100k or qwen")
    if arguments.tokenizer == "qwen" and not arguments.bpe_file:
        parser.error("--tokenizer qwen needs --bpe-file DIR/tokenizer.json, of the model's folder")
    if arguments.vocab_size is None:
        arguments.vocab_size = 4096
    if not 257 <= arguments.vocab_size <= 2**31 - 1:
        parser.error(f"--vocab-size {arguments.vocab_size}: too small or too large, expected 257 (256 bytes and "
                     "the end-of-text token) or more")
    return arguments


def usage_error(message):
    print(f"prepare_data.py: {message}; see --help", file=sys.stderr)
    return 2


def report(arguments, tokenizer, train, val):
    folder = arguments.out
    for writer in (train, val):
        if writer.tokens:
            print(f"{writer.split}: {writer.tokens:,} tokens in {count(len(writer.paths), 'shard')}, "
                  f"{os.path.join(folder, writer.split)}_*.bin")
    print(f"tokenizer: {os.path.join(folder, 'tokenizer.bin')}, vocabulary {tokenizer.vocab_size}")
    pattern = os.path.join(folder, "{}_*.bin").format
    validation = f" --val-data '{pattern('val')}'" if val.tokens else ""
    model = f"--vocab-size {tokenizer.vocab_size}"
    if arguments.tokenizer == "qwen":  # a model has some more ids than its tokenizer
        model = f"--init-from {os.path.dirname(arguments.bpe_file) or '.'}"
    print(f"train with: --train-data '{pattern('train')}'{validation} {model}")


def count(number, noun):
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


# --------------------------------------------------------------------------------------------- input


Document = collections.namedtuple("Document", "path size pieces")
Piece = collections.namedtuple("Piece", "begin cut end")  # bytes [begin, cut) for training, [cut, end) for validation


def find_documents(arguments):
    out = os.path.realpath(arguments.out)
    skipped = collections.Counter()
    paths = {}  # real path -> path as given; a file counts once, however often it is named
    for given in arguments.inputs:
        for path in expand(given):
            named = [path] if not os.path.isdir(path) else files_of_folder(path, out, arguments.extensions, skipped)
            for file in named:
                paths.setdefault(os.path.realpath(file), file)
    documents = []
    for path in paths.values():
        size = os.path.getsize(path)
        if size == 0:
            skipped["empty"] += 1
            continue
        if arguments.tokenizer != "bytes" and is_binary(path):
            raise UserError(f"{path}: not text, there is a zero byte in it; convert it to UTF-8 (iconv -t utf-8) "
                            "or use --tokenizer bytes")
        documents.append(Document(path, size, cut_pieces(path, size, arguments.val_pieces, arguments.val_fraction)))
    total = sum(document.size for document in documents)
    reasons = ", ".join(f"{number:,} {reason}" for reason, number in skipped.items() if number)
    note = f", skipped {reasons}" if reasons else ""
    print(f"input: {count(len(documents), 'file')}, {total / 1e6:,.2f} MB{note}")
    if not documents:
        raise UserError(f"{' '.join(arguments.inputs)}: no text in it{note}; give files or folders that hold text")
    return documents


def expand(given):
    if os.path.exists(given):
        return [given]
    found = sorted(glob.glob(given, recursive=True))
    if not found:
        raise UserError(f"{given}: no such file or folder, and nothing matches it as a pattern; check the path")
    return found


def files_of_folder(folder, out, extensions, skipped):
    """Text files below the folder, in the order of their names, without hidden ones and our own output."""
    def unreadable(error):
        raise error

    endings = tuple("." + ending.lstrip(".") for ending in extensions or [])
    found = []
    for parent, folders, files in os.walk(folder, onerror=unreadable):
        skipped["hidden"] += sum(name.startswith(".") for name in folders + files)
        skipped["linked folders"] += sum(os.path.islink(os.path.join(parent, name)) for name in folders)
        folders[:] = sorted(name for name in folders
                            if not name.startswith(".") and os.path.realpath(os.path.join(parent, name)) != out)
        for name in sorted(files):
            path = os.path.join(parent, name)
            if name.startswith("."):
                continue
            if not os.path.isfile(path):
                skipped["not regular"] += 1
            elif endings and not name.endswith(endings):
                skipped["with other extensions"] += 1
            elif is_binary(path):
                skipped["binary"] += 1
            else:
                found.append(path)
    return found


def is_binary(path):
    with open(path, "rb") as file:
        return b"\0" in file.read(SNIFF_BYTES)


def cut_pieces(path, size, number, val_fraction):
    """Stretches of equal length, each with its validation text at its end."""
    pieces, begin = [], 0
    for i in range(1, number + 1):
        end = size if i == number else safe_place(path, begin, size * i // number)
        val_bytes = int((end - begin) * val_fraction)
        cut = safe_place(path, begin, end - val_bytes) if val_bytes else end
        pieces.append(Piece(begin, cut, end))
        begin = end
    return pieces


def safe_place(path, lowest, place):
    """Where to cut near a place: at a line if one begins shortly before, else at least at a character."""
    window = min(place - lowest, LINE_WINDOW)
    with open(path, "rb") as file:
        file.seek(place - window)
        before, at = file.read(window), file.read(1)
    line = before.rfind(b"\n") + 1
    if line > 0:
        return place - window + line
    while at and 0x80 <= at[0] < 0xC0 and before:  # a continuation byte of UTF-8
        before, at = before[:-1], before[-1:]
        place -= 1
    return place


def byte_chunks(document, begin, end, progress):
    with open(document.path, "rb") as file:
        file.seek(begin)
        while begin < end:
            chunk = file.read(min(CHUNK_BYTES, end - begin))
            if not chunk:
                raise UserError(f"{document.path}: ends at byte {begin}, {end - begin} bytes short; "
                                "it was shortened while in use: run again")
            begin += len(chunk)
            yield chunk
            progress.advance(len(chunk))


class TextReader:
    """Decodes UTF-8, with U+FFFD for what is invalid, and counts the files in which that happened."""

    def __init__(self):
        self.invalid = collections.Counter()  # path -> number of replacements
        self.path = None  # of the document being read
        codecs.register_error("replace_and_count", self.replace)

    def replace(self, error):
        self.invalid[self.path] += 1
        return "\ufffd", error.end

    def chunks(self, document, begin, end, progress):
        """Chunks that are cut between a letter or digit and white space. No pre-split joins such two, so the
        tokens are those of the whole text."""
        self.path = document.path
        decoder = codecs.getincrementaldecoder("utf-8")("replace_and_count")
        rest = ""
        for chunk in byte_chunks(document, begin, end, progress):
            text = rest + decoder.decode(chunk)
            seam = last_seam(text)
            if seam == 0 and len(text) > 8 * CHUNK_BYTES:
                seam = len(text)  # megabytes without a space: no words to keep whole
            if seam > 0:
                yield text[:seam]
            rest = text[seam:]
        rest += decoder.decode(b"", final=True)
        if rest:
            yield rest

    def report(self):
        if self.invalid:
            path, number = self.invalid.most_common(1)[0]
            print(f"warning: bytes that are not valid UTF-8 became U+FFFD in {count(len(self.invalid), 'file')}, "
                  f"most in {path} ({number:,}); --tokenizer bytes keeps them", file=sys.stderr)


def last_seam(text):
    for i in range(len(text) - 1, 0, -1):
        if text[i].isspace() and text[i - 1].isalnum():
            return i
    return 0


class Progress:
    """Share done, rate and time left on stderr: one line rewritten on a terminal, else a line now and then."""

    def __init__(self, what, total):
        self.what, self.total, self.done = what, total, 0
        self.start = self.shown = time.monotonic()
        self.terminal = sys.stderr.isatty()

    def advance(self, amount):
        self.done += amount
        now = time.monotonic()
        if now - self.shown < (0.2 if self.terminal else 10):
            return
        self.shown = now
        rate = self.done / (now - self.start)
        left = int((self.total - self.done) / rate)
        line = (f"{self.what}: {100 * self.done / self.total:3.0f}% of {self.total / 1e6:,.2f} MB, "
                f"{rate / 1e6:.1f} MB/s, {left // 60}:{left % 60:02} left")
        print(f"\r{line}  " if self.terminal else line, end="" if self.terminal else "\n", file=sys.stderr, flush=True)

    def finish(self):
        if self.terminal and self.shown > self.start:
            print(file=sys.stderr)


# ---------------------------------------------------------------------------------------- tokenizers


class ByteTokenizer:
    tokens = [bytes([byte]) for byte in range(256)]
    vocab_size = 256
    eot = -1
    pre_split = 0


class BpeTokenizer:
    """tokens: byte strings in the order of their ids; encode: list of texts -> list of lists of ids."""

    def __init__(self, tokens, eot, pre_split, encode):
        self.tokens, self.eot, self.pre_split, self.encode = tokens, eot, pre_split, encode
        self.vocab_size = len(tokens)
        longest = max(tokens, key=len)
        if len(longest) > LONGEST_TOKEN:
            raise UserError(f"the tokenizer has a token of {len(longest)} bytes, expected at most {LONGEST_TOKEN}; "
                            "use another one")


def make_tokenizer(arguments, documents):
    if arguments.tokenizer == "bytes":
        return ByteTokenizer()
    if arguments.tokenizer == "bpe":
        return trained_tokenizer(arguments.vocab_size, documents)
    if arguments.tokenizer == "qwen":
        return qwen_tokenizer(arguments.bpe_file)
    return published_tokenizer(arguments.tokenizer, arguments.bpe_file)


def published_tokenizer(name, bpe_file):
    try:
        import tiktoken
    except ImportError:
        raise UserError(f"--tokenizer {name} needs the package tiktoken, which is missing; pip install tiktoken")
    published_name, published_ranks, published_eot = PUBLISHED[name]
    number, pattern = PRE_SPLIT[name]
    if bpe_file:
        ranks = read_ranks(bpe_file)
        encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        tokens = sorted(ranks, key=ranks.get)
    else:
        try:
            encoding = tiktoken.get_encoding(published_name)
        except Exception as error:  # whatever the download raises
            raise UserError(f"--tokenizer {name}: tiktoken cannot download its ranks ({one_line(error)}); "
                            "give a local rank file with --bpe-file")
        tokens = [encoding.decode_single_token_bytes(id) for id in range(published_ranks)]
    eot = published_eot if len(tokens) == published_ranks else len(tokens)
    tokens += [b""] * (eot - len(tokens)) + [END_OF_TEXT]  # cl100k leaves one id unused
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return BpeTokenizer(tokens, eot, number, lambda texts: encoding.encode_ordinary_batch(texts, num_threads=threads))


def read_ranks(path):
    """Lines of base64 bytes and their rank: {bytes: rank}, every byte among them and no rank missing."""
    ranks = {}
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except ValueError:
                raise UserError(f"{path}: line {number} is {line.strip()[:40]!r}, expected base64 bytes and a rank; "
                                "give a .tiktoken file")
    if sorted(ranks.values()) != list(range(len(ranks))) or not all(bytes([byte]) in ranks for byte in range(256)):
        raise UserError(f"{path}: {len(ranks)} tokens, expected the ranks 0, 1, 2, ... once each and all of the "
                        "256 bytes among the tokens; give a whole .tiktoken file")
    return ranks


def trained_tokenizer(vocab_size, documents):
    try:
        import tokenizers
    except ImportError:
        raise UserError("--tokenizer bpe needs the package tokenizers, which is missing; pip install tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)  # GPT-2's pattern
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size - 1, special_tokens=[], max_token_length=LONGEST_TOKEN,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=sys.stderr.isatty())
    parts = [(document, piece) for document in documents for piece in document.pieces]
    progress = Progress("reading words", sum(piece.cut - piece.begin for _, piece in parts))
    reader = TextReader()
    model.train_from_iterator((text for document, piece in parts
                               for text in reader.chunks(document, piece.begin, piece.cut, progress)), trainer)
    progress.finish()
    byte_of = {character: byte for byte, character in enumerate(printable_bytes())}
    vocabulary = model.get_vocab()
    tokens = [bytes(byte_of[character] for character in token) for token in sorted(vocabulary, key=vocabulary.get)]
    if len(tokens) < vocab_size - 1:
        print(f"note: the text has no more than {len(tokens) - 256:,} merges, so the vocabulary is {len(tokens) + 1:,}")
    encode_batch = getattr(model, "encode_batch_fast", model.encode_batch)
    return BpeTokenizer(tokens + [END_OF_TEXT], len(tokens), PRE_SPLIT["gpt2"][0],
                        lambda texts: [encoding.ids for encoding in encode_batch(texts)])


def qwen_tokenizer(path):
    try:
        import tokenizers
    except ImportError:
        raise UserError("--tokenizer qwen needs the package tokenizers, which is missing; pip install tokenizers")
    with open(path, encoding="utf-8") as file:
        try:
            settings = json.load(file)
        except ValueError as error:
            raise UserError(f"{path}: not valid JSON ({one_line(error)}); fetch it again")
    tokens, eot = qwen_tokens(settings, path)
    # Text is never one of the special tokens.
    model = tokenizers.Tokenizer.from_str(json.dumps({**settings, "added_tokens": [], "post_processor": None}))
    encode_batch = getattr(model, "encode_batch_fast", model.encode_batch)
    return BpeTokenizer(tokens, eot, PRE_SPLIT["qwen"][0],
                        lambda texts: [encoding.ids for encoding in encode_batch(texts, add_special_tokens=False)])


def qwen_tokens(settings, path):
    """The byte strings of a tokenizer.json in the order of their ids, and the end-of-text token. Our encoders merge by
    the lowest id, so the ids must stand in the order of the merges."""
    def expect(right, what):
        if not right:
            raise UserError(f"{path}: {what}; give the tokenizer.json of a Qwen model, or make shards with another tokenizer")

    try:
        model, vocabulary = settings["model"], settings["model"]["vocab"]
        expect(model["type"] == "BPE", f"a tokenizer of the kind {model['type']}, expected BPE")
        patterns = [step["pattern"]["Regex"] for step in settings["pre_tokenizer"]["pretokenizers"] if "pattern" in step]
        expect(patterns == [PRE_SPLIT["qwen"][1]], f"text is split by {patterns}, expected by Qwen's pattern")
        merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        made = [vocabulary[first + second] for first, second in merges]
        byte_of = {character: byte for byte, character in enumerate(printable_bytes())}
        by_id = {id: bytes(byte_of[character] for character in token) for token, id in vocabulary.items()}
        by_id.update({token["id"]: token["content"].encode() for token in settings["added_tokens"]})
        tokens = [by_id.get(id, b"") for id in range(max(by_id) + 1)]
        eot = next((token["id"] for token in settings["added_tokens"] if token["content"].encode() == END_OF_TEXT), None)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: not laid out as a tokenizer.json ({type(error).__name__} {one_line(error)}); fetch it again")
    expect(all(a < b for a, b in zip(made, made[1:])), "the ids do not stand in the order of the merges")
    expect({bytes([byte]) for byte in range(256)} <= set(tokens), "no token for some byte")
    expect(eot is not None, f"no {END_OF_TEXT.decode()} token")
    return tokens, eot


def printable_bytes():
    """The characters by which byte-level BPE vocabularies write the bytes 0 to 255: printable ones stand for
    themselves, the others for U+0100, U+0101, ..."""
    printable = set(range(0x21, 0x7F)) | set(range(0xA1, 0xAD)) | set(range(0xAE, 0x100))
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def encode_documents(documents, tokenizer, train, val):
    progress = Progress("encoding", sum(document.size for document in documents))
    parts = [(document, writer, begin, end) for document in documents for piece in document.pieces
             for writer, begin, end in ((train, piece.begin, piece.cut), (val, piece.cut, piece.end)) if begin < end]
    if isinstance(tokenizer, ByteTokenizer):
        for document, writer, begin, end in parts:
            for chunk in byte_chunks(document, begin, end, progress):
                writer.write(widened(chunk))
    else:
        encode_texts(parts, tokenizer, progress)
    progress.finish()


def encode_texts(parts, tokenizer, progress):
    reader = TextReader()
    batch = []  # (writer, ids that go before, text)

    def flush():
        for (writer, before, _), ids in zip(batch, tokenizer.encode([text for _, _, text in batch])):
            writer.write(packed(before + list(ids), writer.width))
        batch.clear()

    characters = 0
    for document, writer, begin, end in parts:
        before = [tokenizer.eot]
        for text in reader.chunks(document, begin, end, progress):
            batch.append((writer, before, text))
            before = []
            characters += len(text)
            if characters >= BATCH_CHARACTERS:
                flush()
                characters = 0
    flush()
    reader.report()


def widened(chunk):
    """Bytes as little-endian uint16."""
    wide = bytearray(2 * len(chunk))
    wide[::2] = chunk
    return wide


def packed(ids, width):
    tokens = array("H" if width == 2 else "I", ids)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes()


# -------------------------------------------------------------------------------------------- output


OUTPUT_NAME = re.compile(r"((train|val)_\d{6}|tokenizer)\.bin")


def check_output(folder, overwrite):
    os.makedirs(folder, exist_ok=True)
    earlier = sorted(name for name in os.listdir(folder) if OUTPUT_NAME.fullmatch(name))
    if earlier and not overwrite:
        raise UserError(f"{folder}: holds {earlier[0]} of an earlier run; give another --out, or --overwrite to "
                        "replace it")
    remove_temporaries(folder)  # of a run that was killed


def remove_temporaries(folder):
    for name in os.listdir(folder):
        if name.endswith(".tmp") and OUTPUT_NAME.fullmatch(name[:-len(".tmp")]):
            os.remove(os.path.join(folder, name))


class ShardWriter:
    """Writes FOLDER/SPLIT_000000.bin.tmp, SPLIT_000001.bin.tmp, ... of shard_tokens tokens each. A last one of
    less than half of that joins the one before, so that no shard is too short for a sequence."""

    def __init__(self, folder, split, width, shard_tokens):
        self.folder, self.split, self.width, self.shard_tokens = folder, split, width, shard_tokens
        self.paths = []
        self.tokens = 0  # in all shards
        self.file, self.held = None, 0  # the open shard and its tokens
        self.full = None  # the shard before, still open

    def write(self, raw):
        view = memoryview(raw)
        while len(view):
            if self.file is None or self.held == self.shard_tokens:
                self.open_next()
            part = view[:(self.shard_tokens - self.held) * self.width]
            self.file.write(part)
            self.held += len(part) // self.width
            self.tokens += len(part) // self.width
            view = view[len(part):]

    def open_next(self):
        if self.full:
            self.close(self.full, self.shard_tokens)
        self.full = self.file
        self.paths.append(os.path.join(self.folder, f"{self.split}_{len(self.paths):06}.bin.tmp"))
        self.file, self.held = open(self.paths[-1], "w+b"), 0
        self.file.write(bytes(1024))

    def finish(self):
        if self.full and self.held < self.shard_tokens / 2:
            self.join_last()
        if self.full:
            self.close(self.full, self.shard_tokens)
        if self.file:
            self.close(self.file, self.held)
        self.full = self.file = None

    def join_last(self):
        self.file.seek(1024)
        for chunk in iter(lambda: self.file.read(CHUNK_BYTES), b""):
            self.full.write(chunk)
        self.file.close()
        os.remove(self.paths.pop())
        self.file, self.held, self.full = self.full, self.shard_tokens + self.held, None

    def close(self, file, tokens):
        magic, version = (20240520, 1) if self.width == 2 else (20240801, 7)
        file.seek(0)
        file.write(struct.pack("<3i", magic, version, tokens))
        file.flush()
        os.fsync(file.fileno())
        file.close()


def check_splits(train, val, val_fraction):
    if train.tokens == 0:
        raise UserError(f"--val-fraction {val_fraction}: no text is left for training; give more text or a smaller "
                        "fraction")
    if val.tokens == 0 and val_fraction > 0:
        raise UserError(f"--val-fraction {val_fraction}: the text is too short for a validation part; give more text "
                        "or a larger fraction, 0 for no validation")


def write_tokenizer(folder, tokenizer):
    path = os.path.join(folder, "tokenizer.bin.tmp")
    with open(path, "wb") as file:
        fields = (20240328, 2, tokenizer.vocab_size, tokenizer.eot, tokenizer.pre_split)
        file.write(struct.pack("<5i", *fields).ljust(1024, b"\0"))
        for token in tokenizer.tokens:
            file.write(bytes([len(token)]) + token)
        file.flush()
        os.fsync(file.fileno())
    return path


def publish(folder, temporary_paths):
    """Gives the complete files their names; shards of an earlier run go first, so that none is left between."""
    for name in os.listdir(folder):
        if OUTPUT_NAME.fullmatch(name):
            os.remove(os.path.join(folder, name))
    for path in temporary_paths:
        os.replace(path, path[:-len(".tmp")])


# --------------------------------------------------------------------------------------------- errors


def one_line(error):
    return " ".join(str(error).split())[:200]


def run():
    try:
        main()
    except UserError as error:
        sys.exit(f"prepare_data.py: {error}")
    except OSError as error:
        sys.exit(f"prepare_data.py: {error.filename or 'cannot write'}: {error.strerror}; check the path, its "
                 "permissions and the space on the disk")
    except KeyboardInterrupt:
        sys.exit("prepare_data.py: interrupted, nothing was written")


if __name__ == "__main__":
    run()
