"""Checkpoints across the border to Hugging Face: directories as it writes a dense Qwen3 model (made here by hand, and by
transformers where that is installed) opened by ./train_xmod and scripts/xmod_hf.py, and ours opened there. Everything is
compared by the log-probabilities of all tokens behind a few contexts. `make test` builds the program first."""

import json
import math
import os
import random
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BINARY = ROOT / "train_xmod"
sys.path.insert(0, str(ROOT / "scripts"))
from run_tests import python_with  # noqa: E402

V = 256  # a token is a byte
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "head_dim": 8,
         "hidden_act": "silu", "hidden_size": 24, "intermediate_size": 40, "max_position_embeddings": 48,
         "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 4, "num_hidden_layers": 3,
         "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 50000.0,
         "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "float32", "use_sliding_window": False,
         "vocab_size": V}
SIZES = ("--dim 24 --heads 4 --kv-heads 2 --head-dim 8 --ffn-dim 40 --active-layers 3 --seq-len 48 --rope-theta 50000 "
         "--threads 1").split()
# Of each architecture, with layers D SS D where it has sparse ones.
ARCHITECTURES = {"dense": "", "mod": "--token-sparsity 2", "xmod": "--dense-prefix 1 --token-sparsity 2",
                 "routed-ffn": "--dense-prefix 1 --token-sparsity 2", "selected-q": "--dense-prefix 1 --token-sparsity 2",
                 "moe": "--experts 4 --experts-per-token 2 --shared-experts 1 --expert-dim 12",
                 "deco": "--experts 4 --expert-dim 12"}
TOLERANCE = 1e-4

# Scripts for a Python with PyTorch, or with transformers. Each prints JSON; argv: folder of scripts, then what it says.
MODULE = """
# checkpoints, contexts: log-probabilities behind each context, of each checkpoint
import json, sys
sys.path.insert(0, sys.argv[1])
from xmod_hf import load, torch
def behind(model, context):
    return model(torch.tensor([context]), routing="threshold").logits[0, -1].double().log_softmax(-1).tolist()
models = [load(folder) for folder in json.loads(sys.argv[2])]
print(json.dumps([[behind(model, context) for context in json.loads(sys.argv[3])] for model in models]))
"""
CACHE = """
# checkpoints, tokens: what generation with a cache does, of each checkpoint
import json, sys
sys.path.insert(0, sys.argv[1])
from xmod_hf import load, torch
tokens = json.loads(sys.argv[3])
def measure(model):
    whole, gaps = model(torch.tensor([tokens]), routing="threshold"), []
    for pieces in [1] * len(tokens), [7, 1, 1, len(tokens) - 9], [len(tokens)]:
        length = model.start_caches()
        for n in pieces:
            row = model.extend(tokens[length:length + n], length)
            length += n
            gaps.append((row - whole.logits[0, length - 1]).abs().max().item())
    kept = model.cache_bytes() // (2 * 4 * model.config.num_key_value_heads * model.config.head_dim)
    rows = torch.tensor([tokens[:5], tokens[5:10]])
    return dict(gap=max(gaps), kept=kept, selected=sum(int(route.selected.sum()) for route in whole.routes.values()),
                layers=model.config.layer_pattern, rows=model.generate(rows, 60, temperature=0).tolist(),
                alone=[model.generate(rows[i:i + 1], 60, temperature=0)[0].tolist() for i in range(2)],
                text=list(model.stream(list(b"Once upon a time"), 70, temperature=0)))
with torch.no_grad():
    print(json.dumps([measure(load(folder)) for folder in json.loads(sys.argv[2])]))
"""
THEIRS = """
# checkpoints, contexts: as MODULE
import json, sys, torch
from transformers import AutoModelForCausalLM
models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in json.loads(sys.argv[2])]
def behind(model, context):
    return model(torch.tensor([context])).logits[0, -1].double().log_softmax(-1).tolist()
with torch.no_grad():
    print(json.dumps([[behind(model, context) for context in json.loads(sys.argv[3])] for model in models]))
"""
MAKE_THEIRS = """
# folder, configuration: random models in it, whole and in shards
import json, sys, torch
from transformers import Qwen3Config, Qwen3ForCausalLM
values = json.loads(sys.argv[3])
theta = values.pop("rope_theta")
if "rope_parameters" in Qwen3Config().to_dict():  # transformers 5
    values["rope_parameters"] = {"rope_theta": theta, "rope_type": "default"}
else:
    values["rope_theta"] = theta
torch.manual_seed(1)
for name, tied, dtype in ("tied", True, "float32"), ("untied", False, "float32"), ("halves", False, "bfloat16"):
    model = Qwen3ForCausalLM(Qwen3Config(**{**values, "tie_word_embeddings": tied}))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    model.to(getattr(torch, dtype)).save_pretrained(f"{sys.argv[2]}/{name}", max_shard_size="20KB" if name != "tied" else "5GB")
print("null")
"""


def run_python(python, script, *arguments):
    words = [str(ROOT / "scripts"), *map(str, arguments)]
    result = subprocess.run([python, "-c", script, *words], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


# --------------------------------------------------------------------------------- directories, by hand


def qwen3_tensors(config):
    """Random weights under Hugging Face's names: (shape, values)."""
    pick = random.Random(3)
    d, F, hd = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * hd, config["num_key_value_heads"] * hd
    shapes = {"model.embed_tokens.weight": [V, d], "model.norm.weight": [d]}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in {"input_layernorm": [d], "self_attn.q_proj": [q, d], "self_attn.k_proj": [kv, d],
                            "self_attn.v_proj": [kv, d], "self_attn.o_proj": [d, q], "self_attn.q_norm": [hd],
                            "self_attn.k_norm": [hd], "post_attention_layernorm": [d], "mlp.gate_proj": [F, d],
                            "mlp.up_proj": [F, d], "mlp.down_proj": [d, F]}.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = [V, d]
    # Odd numbers of 7 bits, which every format holds exactly, and which no tiny step of training moves.
    return {name: (shape, [(pick.randrange(-63, 64, 2) / 64 + 2 * (len(shape) == 1)) / 2 for _ in range(math.prod(shape))])
            for name, shape in shapes.items()}


def pack(values, dtype):
    if dtype == "F16":
        return struct.pack(f"<{len(values)}e", *values)
    single = struct.pack(f"<{len(values)}f", *values)
    if dtype == "F32":
        return single
    return b"".join(single[i + 2:i + 4] for i in range(0, len(single), 4))


def safetensors(tensors, dtype):
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, (shape, values) in tensors.items():
        content = pack(values, dtype)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def write_qwen3(folder, tensors, config, dtype="F32", shards=1):
    """A model's directory as save_pretrained leaves it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text("{}")
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors(tensors, dtype))
        return folder
    weight_map, names = {}, sorted(tensors)
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        mine = {name: tensors[name] for name in names[shard::shards]}
        weight_map.update(dict.fromkeys(mine, file))
        (folder / file).write_bytes(safetensors(mine, dtype))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def read_tensors(path):
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:8 + length])
    header.pop("__metadata__", None)
    return {name: content[8 + length:][slice(*entry["data_offsets"])] for name, entry in header.items()}


def write_contexts(path, contexts):
    """An evaluation file whose choices are all tokens, behind each context."""
    numbers = []
    for index, context in enumerate(contexts):
        item = [index, 0, V, len(context), *context]
        for token in range(V):
            item += [1, token]
        numbers += [65535, 2 * (len(item) + 2), *item]
    longest = 2 * (6 + max(map(len, contexts)) + 2 * V)
    header = struct.pack("<8i", 20240522, 1, len(contexts), longest, 1, 0, 0, 0)
    path.write_bytes(header.ljust(1024, b"\0") + struct.pack(f"<{len(numbers)}H", *numbers))


class HuggingFaceTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)
        pick = random.Random(4)
        cls.contexts = [pick.choices(range(V), k=n) for n in (1, 2, 5, 17, 48)]
        write_contexts(cls.folder / "contexts.bin", cls.contexts)
        text = pick.choices(range(V), k=600)
        (cls.folder / "train.bin").write_bytes(struct.pack("<256i", 20240520, 1, len(text), *[0] * 253)
                                               + struct.pack(f"<{len(text)}H", *text))
        cls.tied = dict(QWEN3)
        cls.untied = {**QWEN3, "tie_word_embeddings": False}
        cls.tensors = qwen3_tensors(cls.untied)  # those of the tied one are the same, without the head
        cls.tied_tensors = {name: tensor for name, tensor in cls.tensors.items() if name != "lm_head.weight"}
        cls.qwen3 = write_qwen3(cls.folder / "qwen3", cls.tied_tensors, cls.tied)
        cls.untied_qwen3 = write_qwen3(cls.folder / "untied", cls.tensors, cls.untied)

    def new(self, name):
        return self.folder / f"{self._testMethodName}_{name}"

    @classmethod
    def run_binary(cls, *arguments):
        return subprocess.run([BINARY, *map(str, arguments)], capture_output=True, cwd=cls.folder,
                              env={**os.environ, "OMP_WAIT_POLICY": "passive"})

    @classmethod
    def succeed(cls, *arguments):
        result = cls.run_binary(*arguments)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def expect_error(self, parts, *arguments, status=1):
        result = self.run_binary(*arguments)
        error = result.stderr.decode(errors="replace")
        self.assertRegex(error, r"\Aerror: [^\n]+\n\Z")
        for part in parts:
            self.assertIn(str(part), error)
        self.assertEqual(result.returncode, status, error)

    def log_probabilities(self, checkpoint):
        """Of each token behind each context, by the program."""
        items = self.new("items")
        self.succeed("eval", "--checkpoint", checkpoint, "--tasks", "contexts.bin", "--per-item", items, "--threads", 1)
        return [json.loads(line)["loglikelihoods"] for line in items.read_text().splitlines()]

    @classmethod
    def train(cls, out, *flags):
        cls.succeed("train", "--train-data", "train.bin", "--batch-size", 2, "--out", out, "--threads", 1, *flags)
        return max(path for path in (cls.folder / out).iterdir() if path.name.startswith("step_"))

    def untouched(self, out, *flags):
        """A checkpoint of weights as a run began with them: the step moves nothing."""
        return self.train(out, "--steps", 1, "--lr", "1e-30", *flags)

    def largest_gap(self, a, b):
        self.assertEqual([len(row) for row in a], [len(row) for row in b])
        return max(abs(x - y) for row_a, row_b in zip(a, b) for x, y in zip(row_a, row_b))

    def expect_same(self, a, b):
        self.assertLess(self.largest_gap(a, b), TOLERANCE)
        self.assertGreater(max(map(max, a)) - min(map(min, a)), 1)  # no flat distribution, in which all agree


class FilesTest(HuggingFaceTest):
    """What needs neither PyTorch nor transformers."""

    def test_shards_and_16_bits_are_the_same_weights(self):
        for config, tensors in (self.tied, self.tied_tensors), (self.untied, self.tensors):
            expected = self.log_probabilities(self.qwen3 if config is self.tied else self.untied_qwen3)
            for dtype, shards in ("F32", 3), ("BF16", 1), ("BF16", 4), ("F16", 2):
                folder = write_qwen3(self.new(f"{len(tensors)}_{dtype}_{shards}"), tensors, config, dtype, shards)
                self.assertEqual(self.log_probabilities(folder), expected)
        self.assertGreater(self.largest_gap(expected, self.log_probabilities(self.qwen3)), 0.1)  # tied against untied

    def test_a_tied_head_that_is_stored_twice(self):
        embedding = self.tensors["model.embed_tokens.weight"]
        folder = write_qwen3(self.new("twice"), {**self.tied_tensors, "lm_head.weight": embedding}, self.tied)
        self.assertEqual(self.log_probabilities(folder), self.log_probabilities(self.qwen3))
        other = write_qwen3(self.new("other"), self.tensors, self.tied)
        self.expect_error(["lm_head.weight differs from model.embed_tokens.weight", "tie_word_embeddings"], "generate",
                          "--checkpoint", other)

    def test_eval_generate_and_routing(self):
        out = self.succeed("eval", "--checkpoint", self.qwen3, "--val-data", "train.bin", "--json")
        self.assertEqual(json.loads(out)["targets"], 12 * 48)
        out = self.succeed("generate", "--checkpoint", self.untied_qwen3, "--prompt", "abc", "--max-new-tokens", 60,
                           "--temperature", 0)
        self.assertTrue(out.startswith(b"abc"))
        self.assertEqual(len(out), 3 + 60 + 1)
        self.expect_error(["none of them sparse"], "routing", "--checkpoint", self.qwen3, "--val-data", "train.bin")

    def test_a_shorter_context(self):
        loss = [json.loads(self.succeed("eval", "--checkpoint", self.qwen3, "--val-data", "train.bin", "--json", *flags))
                for flags in ([], ["--seq-len", 48], ["--seq-len", 16])]
        self.assertEqual(loss[0], loss[1])
        self.assertEqual(loss[2]["targets"], 37 * 16)
        self.assertNotEqual(loss[2]["val_loss_topk"], loss[0]["val_loss_topk"])
        self.succeed("generate", "--checkpoint", self.qwen3, "--seq-len", 8, "--max-new-tokens", 20)
        for command in ["eval", "--val-data", "train.bin"], ["generate"]:
            self.expect_error(["--seq-len 49", "context of 48"], *command, "--checkpoint", self.qwen3, "--seq-len", 49)

    # --- training goes on ---

    def test_a_run_starts_from_the_weights(self):
        for name, source in ("tied", self.qwen3), ("untied", self.untied_qwen3):
            checkpoint = self.untouched(self.new(name), "--init-from", source)
            self.assertEqual(read_tensors(checkpoint / "model.safetensors"), read_tensors(source / "model.safetensors"))
            ours, theirs = (json.loads((path / "config.json").read_text()) for path in (checkpoint, source))
            for key in ours.keys() & theirs.keys():
                self.assertEqual(ours[key], theirs[key], key)
            self.assertEqual(self.log_probabilities(checkpoint), self.log_probabilities(source))

    def test_training_moves_an_untied_head(self):
        checkpoint = self.train(self.new("out"), "--steps", 2, "--init-from", self.untied_qwen3)
        before = read_tensors(self.untied_qwen3 / "model.safetensors")
        after = read_tensors(checkpoint / "model.safetensors")
        self.assertEqual(before.keys(), after.keys())
        self.assertEqual([name for name in before if before[name] == after[name]], [])
        self.assertIn("lm_head.weight.exp_avg_sq", read_tensors(checkpoint / "optimizer.safetensors"))

    def test_a_sparse_model_starts_from_dense_layers(self):
        source = read_tensors(self.untied_qwen3 / "model.safetensors")
        for arch, expected in ("xmod", [0, 1, 1, 2]), ("mod", [0, 1, 2]), ("routed-ffn", [0, 1, 1, 2]), ("selected-q", [0, 1, 1, 2]):
            flags = ["--init-from", self.untied_qwen3, "--arch", arch, *ARCHITECTURES[arch].split()]
            out = self.succeed("train", "--train-data", "train.bin", "--batch-size", 2, "--out", self.new(arch),
                               "--threads", 1, "--steps", 1, "--lr", "1e-30", *flags).decode()
            self.assertIn(f"starting from the weights of {self.untied_qwen3}\n", out)
            self.assertIn("layers begin as its layers 0, " + ("2 x 1, 2;" if arch != "mod" else "1, 2;"), out)
            tensors = read_tensors(self.new(arch) / "step_00000001" / "model.safetensors")
            for name, content in tensors.items():
                if "router" in name or "residual_gate" in name:
                    continue
                parts = name.split(".")
                if parts[1] == "layers":
                    parts[2] = str(expected[int(parts[2])])
                self.assertEqual(content, source[".".join(parts)], name)

    def test_a_run_is_resumed_without_the_weights_it_began_with(self):
        flags = ["--init-from", self.qwen3, "--arch", "xmod", *ARCHITECTURES["xmod"].split(), "--seed", 5, "--warmup-steps", 0,
                 "--lr-schedule", "constant"]
        whole = self.train(self.new("whole"), "--steps", 4, *flags)
        self.train(self.new("parts"), "--steps", 2, *flags)
        parts = self.train(self.new("parts"), "--steps", 4, *flags, "--resume")
        self.assertEqual(read_tensors(whole / "model.safetensors"), read_tensors(parts / "model.safetensors"))
        by_flags = ["--arch", "xmod", *ARCHITECTURES["xmod"].split(), *SIZES, "--seed", 5, "--resume"]
        self.expect_error(["rms_norm_eps 1e-06 against 1e-05"], "train", "--train-data", "train.bin", "--out",
                          self.new("parts"), "--steps", 5, "--batch-size", 2, *by_flags)

    def test_a_tokenizer_that_the_model_did_not_learn(self):
        data = self.new("data")
        data.mkdir()
        (data / "train.bin").write_bytes((self.folder / "train.bin").read_bytes())

        def tokenizer(last):
            tokens = [bytes([byte]) for byte in range(255)] + [last]
            return struct.pack("<256i", 20240328, 2, 256, -1, *[0] * 252) + b"".join(bytes([len(t)]) + t for t in tokens)

        source = write_qwen3(self.new("source"), self.tied_tensors, self.tied)
        (source / "tokenizer.bin").write_bytes(tokenizer(b"\xff"))
        flags = ["--steps", 1, "--batch-size", 2, "--threads", 1, "--init-from", source]
        checkpoint = self.train(self.new("none"), "--steps", 1, "--init-from", source)  # shards without one
        self.assertEqual((checkpoint / "tokenizer.bin").read_bytes(), tokenizer(b"\xff"))
        (data / "tokenizer.bin").write_bytes(tokenizer(b"\xff"))
        self.succeed("train", "--train-data", data / "train.bin", "--out", self.new("same"), *flags)
        (data / "tokenizer.bin").write_bytes(tokenizer(b"end"))
        self.expect_error([data / "tokenizer.bin", "another tokenizer than", source / "tokenizer.bin"], "train",
                          "--train-data", data / "train.bin", "--out", self.new("other"), *flags)

    # --- bad input ---

    def refused_start(self, parts, *flags, status=1):
        out = self.new("refused")
        self.expect_error(parts, "train", "--train-data", "train.bin", "--steps", 1, "--out", out, *flags, status=status)
        self.assertFalse(out.exists())

    def test_starts_that_are_refused(self):
        start = ["--init-from", self.qwen3]
        for parts, flags in (([self.qwen3, "--dim 32 against 24"], ["--dim", 32]),
                             (["--active-layers 4 against 3"], ["--active-layers", 4, "--arch", "xmod"]),
                             (["--vocab-size 512 against 256"], ["--vocab-size", 512]),
                             (["--heads 2 against 4"], ["--heads", 2]),
                             (["tie_word_embeddings false against true"], ["--untied-head"]),
                             (["no experts for --arch moe"], ["--arch", "moe", *ARCHITECTURES["moe"].split()])):
            self.refused_start(parts, *start, *flags)
        self.refused_start(["--init-from nowhere", "no such directory"], "--init-from", "nowhere")
        self.refused_start(["--preset", "--init-from", "exclude"], *start, "--preset", "tiny", status=2)
        self.refused_start(["--init-from is empty"], "--init-from", "", status=2)

    def test_models_that_are_not_computed_here(self):
        for key, value in (("model_type", "qwen3_moe"), ("model_type", "llama"), ("attention_bias", True),
                           ("hidden_act", "gelu"), ("use_sliding_window", True), ("rope_scaling", {"type": "yarn"}),
                           ("layer_types", ["full_attention", "sliding_attention", "full_attention"]),
                           ("rope_parameters", {"rope_theta": 1e6, "rope_type": "yarn"}),
                           ("quantization_config", {"quant_method": "fp8"}), ("attention_dropout", 0.5)):
            folder = write_qwen3(self.new(f"{key}_{str(value)[:4]}"), self.tied_tensors, {**self.tied, key: value})
            expected = ["config.json", key.split("_parameters")[0]]
            self.expect_error(expected, "generate", "--checkpoint", folder)
            self.expect_error(expected, "eval", "--checkpoint", folder, "--val-data", "train.bin")
            self.refused_start(expected, "--init-from", folder)

    def refused_everywhere(self, parts, folder):
        self.expect_error(parts, "generate", "--checkpoint", folder)
        self.expect_error(parts, "eval", "--checkpoint", folder, "--val-data", "train.bin")
        self.expect_error(parts, "train", "--train-data", "train.bin", "--steps", 1, "--out", self.new("refused"),
                          "--init-from", folder, "--batch-size", 2, "--threads", 1)

    def test_weights_that_are_incomplete(self):
        second = "model-00002-of-00003.safetensors"
        folder = write_qwen3(self.new("shards"), self.tied_tensors, self.tied, "BF16", 3)
        whole = (folder / second).read_bytes()
        for size in 0, 5, 1000, len(whole) - 1:
            (folder / second).write_bytes(whole[:size])
            self.refused_everywhere([second, "fetch or save it again"], folder)
        self.expect_error([second, "tensor model.norm.weight: its data_offsets"], "generate", "--checkpoint", folder)
        (folder / second).unlink()
        self.refused_everywhere([second, "not there", "tensor model."], folder)
        (folder / "model.safetensors.index.json").unlink()
        self.refused_everywhere(["model.safetensors", "No such file"], folder)

    def test_weights_of_another_model(self):
        norm, up = "model.layers.1.self_attn.q_norm.weight", "model.layers.1.mlp.up_proj.weight"
        without = {name: tensor for name, tensor in self.tied_tensors.items() if name != norm}
        shape, values = self.tied_tensors[up]
        for parts, tensors, config in (
                (["no tensor " + norm], without, self.tied),
                (["model.layers.1.self_attn.q_proj.bias", "not one of this model's"],
                 {**self.tied_tensors, "model.layers.1.self_attn.q_proj.bias": ([1], [0.0])}, self.tied),
                ([up, "[24, 40]", "[40, 24]"], {**self.tied_tensors, up: (shape[::-1], values)}, self.tied),
                (["no tensor lm_head.weight"], self.tied_tensors, self.untied),
                ([up, "holds nan"], {**self.tied_tensors, up: (shape, [math.nan] + values[1:])}, self.tied)):
            for shards, where in (1, "model.safetensors"), (2, "model"):
                folder = write_qwen3(self.new(str(len(list(self.folder.iterdir())))), tensors, config, "F32", shards)
                self.refused_everywhere([where, *parts], folder)


class ModuleTest(HuggingFaceTest):
    """scripts/xmod_hf.py against the program."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.python = python_with("torch")
        if cls.python is None:
            raise unittest.SkipTest("PyTorch is not installed (scripts/install_deps.sh reference)")
        # Trained until thresholds lie amid the scores and logits are not flat.
        cls.trained = {arch: cls.train(f"out_{arch}", "--steps", 4, "--arch", arch, "--lr", 0.03, *flags.split(), *SIZES)
                       for arch, flags in ARCHITECTURES.items()}

    def expect_same_by_module(self, checkpoints):
        found = run_python(self.python, MODULE, json.dumps(list(map(str, checkpoints))), json.dumps(self.contexts))
        for checkpoint, rows in zip(checkpoints, found):
            with self.subTest(checkpoint):
                self.expect_same(rows, self.log_probabilities(checkpoint))

    def test_every_architecture_gives_the_same_logits(self):
        self.expect_same_by_module(list(self.trained.values()))

    def test_directories_of_hugging_face(self):
        shards = write_qwen3(self.new("shards"), self.tensors, self.untied, "BF16", 3)
        newer = {key: value for key, value in self.tied.items() if key not in ("rope_theta", "rope_scaling")}
        newer["rope_parameters"] = {"rope_theta": 50000.0, "rope_type": "default"}
        newer = write_qwen3(self.new("newer"), self.tied_tensors, newer)
        self.expect_same_by_module([self.qwen3, self.untied_qwen3, shards, newer])

    def test_text_with_a_cache(self):
        tokens = random.Random(5).choices(range(V), k=40)
        checkpoints = list(map(str, self.trained.values()))
        for arch, found in zip(self.trained, run_python(self.python, CACHE, json.dumps(checkpoints), json.dumps(tokens))):
            with self.subTest(arch):
                self.assertLess(found["gap"], TOLERANCE)  # from one pass over all tokens
                self.assertEqual(found["rows"], found["alone"])
                self.assertEqual([len(row) for row in found["rows"]], [65, 65])  # beyond the context of 48
                self.assertEqual(bytes(found["text"]), self.greedy_text(arch))
                dense = found["layers"].count("D") * len(tokens)
                if "S" in found["layers"]:
                    self.assertTrue(0 < found["selected"] < len(tokens) * found["layers"].count("S"))
                expected = {"mod": dense + found["selected"], "xmod": dense + found["selected"],
                            "routed-ffn": dense + len(tokens), "selected-q": len(found["layers"]) * len(tokens)}
                self.assertEqual(found["kept"], expected.get(arch, dense))

    PROMPT = ["--prompt", "Once upon a time", "--max-new-tokens", 70, "--temperature", 0]

    def greedy_text(self, arch):
        """By the program, without the prompt."""
        text = self.succeed("generate", "--checkpoint", self.trained[arch], "--threads", 1, *self.PROMPT)
        return text[len(self.PROMPT[1]):-1]

    def test_the_command_writes_the_program_s_text(self):
        command = [self.python, ROOT / "scripts" / "xmod_hf.py", self.trained["xmod"], *self.PROMPT]
        result = subprocess.run(list(map(str, command)), capture_output=True)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(result.stdout, self.PROMPT[1].encode() + self.greedy_text("xmod") + b"\n")
        self.assertRegex(result.stderr.decode(), r"\A70 tokens, \d+ a second; key/value cache [\d.]+ MiB\n\Z")

    def test_bad_input_is_one_line(self):
        missing = {name: t for name, t in self.tied_tensors.items() if name != "model.norm.weight"}
        cut = write_qwen3(self.new("cut"), self.tied_tensors, self.tied)
        whole = (cut / "model.safetensors").read_bytes()
        (cut / "model.safetensors").write_bytes(whole[:-100])
        for parts, folder in (
                (["config.json", "No such file"], self.new("nowhere")),
                (["config.json", "rope_scaling"], write_qwen3(self.new("rope"), self.tied_tensors,
                                                             {**self.tied, "rope_scaling": {"type": "yarn"}})),
                (["model.norm.weight", "missing"], write_qwen3(self.new("missing"), missing, self.tied)),
                (["lm_head.weight", "missing"], write_qwen3(self.new("head"), self.tied_tensors, self.untied)),
                (["model.safetensors", "damaged"], cut)):
            result = subprocess.run([self.python, ROOT / "scripts" / "xmod_hf.py", folder], capture_output=True, text=True)
            self.assertEqual(result.returncode, 1, result.stderr)
            self.assertEqual(len(result.stderr.splitlines()), 1, result.stderr)
            for part in parts:
                self.assertIn(part, result.stderr)


class TransformersTest(HuggingFaceTest):
    """The same models in transformers itself."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.python = python_with("transformers")
        if cls.python is None:
            raise unittest.SkipTest("transformers is not installed (pip install torch transformers)")

    def expect_same_by_transformers(self, checkpoints):
        found = run_python(self.python, THEIRS, json.dumps(list(map(str, checkpoints))), json.dumps(self.contexts))
        for checkpoint, rows in zip(checkpoints, found):
            with self.subTest(checkpoint):
                self.expect_same(rows, self.log_probabilities(checkpoint))

    def test_our_dense_checkpoints_open_there(self):
        flags = ["--steps", 4, "--arch", "dense", "--lr", 0.03, *SIZES]
        self.expect_same_by_transformers([self.train(self.new("tied"), *flags),
                                          self.train(self.new("untied"), *flags, "--untied-head")])

    def test_models_made_there_open_here(self):
        keys = ("vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
                "max_position_embeddings rms_norm_eps rope_theta").split()
        self.new("theirs").mkdir()
        run_python(self.python, MAKE_THEIRS, self.new("theirs"), json.dumps({key: QWEN3[key] for key in keys}))
        folders = [self.new("theirs") / name for name in ("tied", "untied", "halves")]
        self.assertEqual([len(list(folder.glob("model-*-of-*"))) > 1 for folder in folders], [False, True, True])
        self.expect_same_by_transformers(folders)

    def test_directories_made_by_hand_are_theirs(self):
        shards = write_qwen3(self.new("shards"), self.tensors, self.untied, "BF16", 3)
        self.expect_same_by_transformers([self.qwen3, self.untied_qwen3, shards])


if __name__ == "__main__":
    unittest.main(verbosity=2)
