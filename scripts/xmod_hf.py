#!/usr/bin/env python3
"""A checkpoint of train_xmod, of any architecture, as a PyTorch module that writes text.

    xmod_hf.py out/step_00000500 --prompt "Once upon a time" --max-new-tokens 100

or in Python, with this folder in the path:

    from xmod_hf import load
    model = load("out/step_00000500")                      # a torch.nn.Module
    logits = model(tokens, routing="threshold").logits     # (B, T, V) of tokens (B, T)
    longer = model.generate(tokens, max_new_tokens=50)     # (B, T + 50)

Directories of Hugging Face with a dense Qwen3 model open too, in one file or in shards, of 32 or 16 bits; whatever
they hold, the module computes in fp32 unless `load` is told another dtype. Sparse layers use threshold routing to
generate, which is causal, so the keys and values of what was written stay: a layer caches those of the tokens that it
selected. Needs PyTorch only; the model itself stands in xmod_reference.py.
"""

import argparse
import json
import os
import sys
import time

from prepare_data import UserError, one_line
from prepare_eval import Tokenizer, read_tokenizer
from xmod_reference import Attention, Config, XMod, torch

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


# ---------------------------------------------------------------------------------------------------------
# Text


class KeyValueCache:
    """Keys and values (1, KV, keys, hd) of the tokens that an attention has seen."""

    def __init__(self):
        self.k = self.v = None

    def extend(self, k, v):
        """Those of new tokens behind the others; returns all."""
        if self.k is not None:
            k, v = torch.cat([self.k, k], dim=2), torch.cat([self.v, v], dim=2)
        self.k, self.v = k, v
        return k, v

    def bytes(self):
        return 0 if self.k is None else 2 * self.k.numel() * self.k.element_size()


class CausalLM(XMod):
    def generate(self, tokens, max_new_tokens, **sampling):
        """Continue each row of tokens (B, n), one after the other; returns (B, n + max_new_tokens)."""
        rows = [row.tolist() + list(self.stream(row.tolist(), max_new_tokens, **sampling)) for row in tokens]
        return torch.tensor(rows, dtype=tokens.dtype, device=tokens.device)

    def stream(self, prompt, max_new_tokens, temperature=0.8, top_k=0, top_p=1.0, seed=42, end=None):
        """Yield the tokens that continue the list `prompt`, one by one, until `end`, which is not one of them."""
        T, text, seen = self.config.max_position_embeddings, list(prompt), 0
        generator = torch.Generator().manual_seed(seed)
        length = self.start_caches()
        try:
            for _ in range(max_new_tokens):
                if length + len(text) - seen > T:  # the context is full: its newest half goes on
                    seen = len(text) - (T if seen == 0 else max(1, T // 2))
                    length = self.start_caches()
                logits = self.extend(text[seen:], length)
                length, seen = length + len(text) - seen, len(text)
                token = sample(logits, temperature, top_k, top_p, generator)
                if token == end:
                    return
                text.append(token)
                yield token
        finally:
            for attention in self.attentions():
                attention.cache = None

    def attentions(self):
        return [module for module in self.modules() if isinstance(module, Attention)]

    def start_caches(self):
        for attention in self.attentions():
            attention.cache = KeyValueCache()
        return 0

    def cache_bytes(self):
        return sum(attention.cache.bytes() for attention in self.attentions())

    def extend(self, tokens, start):
        """The logits (V) behind `tokens`, which stand at the positions from `start` on."""
        device = self.model["embed_tokens"].weight.device
        with torch.no_grad():
            return self(torch.tensor([tokens], device=device), routing="threshold", start=start).logits[0, -1]


def sample(logits, temperature, top_k, top_p, generator):
    """One token by logits (V); of the top_k most probable, the fewest that together reach top_p."""
    if temperature == 0:
        return int(logits.argmax())
    ranked, order = logits.double().cpu().sort(descending=True, stable=True)
    p = (ranked[: top_k or None] / temperature).softmax(0)
    p[p.cumsum(0) - p >= top_p] = 0
    return int(order[torch.multinomial(p, 1, generator=generator)])


# ---------------------------------------------------------------------------------------------------------
# Files


def load(directory, dtype=torch.float32, device="cpu"):
    """The model of a checkpoint, in evaluation mode."""
    path = os.path.join(directory, "config.json")
    try:
        config = Config.from_json(read_text(path))
    except (TypeError, ValueError, KeyError) as error:
        raise UserError(f"{path}: {one_line(str(error))}; give a checkpoint of train_xmod or a dense Qwen3 model")
    model = CausalLM(config)
    model.load_state_dict(checked_tensors(directory, config, model.state_dict()))
    return model.to(device, dtype).eval()


def checked_tensors(directory, config, expected):
    """All tensors of the module, by name, of the shapes of `expected`."""
    tensors = dict(read_weights(directory))
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)  # some writers store the embedding twice
    for name in [name for name in tensors if name.endswith(".mlp.entropy_weight")]:
        del tensors[name]  # deco's lambda, of use to its trainer only
    for name in sorted(expected.keys() ^ tensors.keys()):
        what = "missing" if name in expected else "none of this model's"
        raise UserError(f"{directory}: tensor {name} is {what}; does config.json belong to these weights?")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise UserError(
                f"{directory}: tensor {name} has shape {list(tensor.shape)}, expected "
                f"{list(expected[name].shape)}; does config.json belong to these weights?"
            )
    return tensors


def read_weights(directory):
    """(name, tensor) of model.safetensors, or of the shards that its index names."""
    single = os.path.join(directory, "model.safetensors")
    shards = [single]
    if not os.path.exists(single) and os.path.exists(single + ".index.json"):
        names = json.loads(read_text(single + ".index.json"))["weight_map"].values()
        shards = [os.path.join(directory, name) for name in sorted(set(names))]
    for path in shards:
        yield from read_safetensors(path)


def read_safetensors(path):
    """(name, tensor) of one file, one after the other."""
    with open(path, "rb") as file:
        try:
            length = int.from_bytes(file.read(8), "little")
            if length > os.path.getsize(path):
                raise ValueError("the header is cut off")
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                file.seek(8 + length + begin)
                values = torch.frombuffer(bytearray(file.read(end - begin)), dtype=DTYPES[entry["dtype"]])
                yield name, values.reshape(entry["shape"])
        except (ValueError, KeyError, RuntimeError) as error:
            raise UserError(f"{path}: damaged or no safetensors file ({one_line(str(error))}); fetch it again")


def read_text(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def tokenizer_of(directory, config):
    path = os.path.join(directory, "tokenizer.bin")
    if config.vocab_size == 256 and not os.path.exists(path):
        return Tokenizer([bytes([byte]) for byte in range(256)], -1, 0)
    return read_tokenizer(path)


# ---------------------------------------------------------------------------------------------------------


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="directory, such as out/step_00000500")
    parser.add_argument("--prompt", default="", metavar="TEXT", help="text to go on from")
    parser.add_argument("--max-new-tokens", type=int, default=200, metavar="N", help="default %(default)s")
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="X", help="0: the most probable token (default 0.8)"
    )
    parser.add_argument("--top-k", type=int, default=0, metavar="N", help="among the K most probable; 0: off")
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="X", help="among the most probable of this probability"
    )
    parser.add_argument("--seed", type=int, default=42, metavar="N", help="default %(default)s")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="0: all processors")
    arguments = parser.parse_args()
    for name, fits, expected in (
        ("max_new_tokens", arguments.max_new_tokens >= 1, "at least 1"),
        ("temperature", arguments.temperature >= 0, "at least 0"),
        ("top_k", arguments.top_k >= 0, "at least 0"),
        ("top_p", 0 < arguments.top_p <= 1, "above 0, at most 1"),
    ):
        if not fits:
            flag = name.replace("_", "-")
            parser.error(f"--{flag} is {getattr(arguments, name)}, expected {expected}")
    return arguments


def main():
    arguments = parse_arguments()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    model = load(arguments.checkpoint)
    tokenizer = tokenizer_of(arguments.checkpoint, model.config)
    prompt = tokenizer.encode(arguments.prompt) or tokenizer.beginning()
    write(arguments.prompt.encode("utf-8", "replace"))
    begin, count, cached = time.perf_counter(), 0, 0
    stream = model.stream(
        prompt,
        arguments.max_new_tokens,
        arguments.temperature,
        arguments.top_k,
        arguments.top_p,
        arguments.seed,
        tokenizer.eot,
    )
    for token in stream:
        count, cached = count + 1, model.cache_bytes()
        write(tokenizer.tokens[token] if token < len(tokenizer.tokens) else "\ufffd".encode())
    seconds = time.perf_counter() - begin
    write(b"\n")
    print(
        f"{count} tokens, {count / seconds:.0f} a second; key/value cache {cached / 2**20:.2f} MiB",
        file=sys.stderr,
    )


def write(text):
    sys.stdout.buffer.write(text)
    sys.stdout.buffer.flush()


def run():
    try:
        main()
    except UserError as error:
        sys.exit(f"xmod_hf.py: {error}")
    except OSError as error:
        sys.exit(f"xmod_hf.py: {error.filename or 'cannot write'}: {one_line(error.strerror)}; check the path")
    except KeyboardInterrupt:
        sys.exit("xmod_hf.py: interrupted")


if __name__ == "__main__":
    run()
