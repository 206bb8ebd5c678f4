#!/usr/bin/env python3
"""Write what scripts/xmod_reference.py computes for a few small models, for the C++ tests to compare with.

    scripts/dump_reference.py                       write test/data/<case>.safetensors, all cases
    scripts/dump_reference.py --check test/data     compute afresh, compare with the stored files

Everything is computed in fp64 from fp32 weights, and stored in fp32. Each file holds

    metadata config, optimizer         JSON: config.json, and the settings of the optimizer steps
    tokens                             (B, T+1) int32: inputs are [:, :T], targets [:, 1:]
    param.<name>                       initial weights, by their names in a checkpoint
    buffer.<name>                      initial expert biases of moe
    logits (B, T, V), loss (1)         of the initial weights, under top-k routing
    entropy_loss (1)                   deco: sum of the layers' entropies / number of all layers
    grad.<name>, grad_norm (1)         of loss, or deco's loss + entropy weight * entropy_loss; not clipped
    routing.<layer>, kth.<layer>       (B, C) int32 selected tokens; (1) C-th largest score, mean over B
    experts.<layer>                    moe: (B*T, k) int32, the experts of each token, ascending
    active.<layer>                     deco: (B*T, E) int32, 1 where an expert is active
    step3.<name>                       weights, thresholds and expert biases after the optimizer steps
    expert_active_ratio (3)            deco: in the forward pass of each step, the first as above
    entropy_weight (3)                 deco: after each step; before the first it is that of config
    threshold_tau                      (sparse layers,): thresholds for a causal pass of the initial weights
    threshold_logits                   (B, T, V) of that pass
    threshold_mask.<layer>             (B, T) int32: 1 where it selected
    bf16_error.<name>                  (1): normalised error of logits, loss and gradients in PyTorch under
                                       bf16 autocast; only where that selects the same tokens and experts

The same in fp32 PyTorch shows, tensor by tensor, the error that rounding alone makes. A seed is passed over
when that is large (a scalar that cancels to almost nothing), or when rounding could change a selection (a
score lies within 1e-4 of the cut, be it of tokens or of experts).
"""

import argparse
import json
import os
import sys
from dataclasses import asdict

import numpy as np
import torch

from xmod_reference import Config, OptimizerSettings, Trainer, XMod

STEPS = 3
MARGIN = 1e-4  # least distance of a score from the cut between selected and not
ROUNDING = 2e-6  # most that fp32 PyTorch may differ from fp64, as a normalised error of a tensor
AGREEMENT = 5e-7  # most that a fresh dump may differ from a stored one
SETTINGS = OptimizerSettings(lr=0.01, adamw_lr=0.005)  # more than in training: three steps must show

SMALL = dict(
    hidden_size=12,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    intermediate_size=20,
    vocab_size=40,
    max_position_embeddings=24,
    dense_prefix=1,
)
A1K4 = dict(SMALL, arch="xmod", active_layers=5, token_sparsity=4, anchor_stride=1)
MOE = dict(
    SMALL,
    arch="moe",
    active_layers=2,
    experts=5,
    experts_per_token=2,
    shared_experts=1,
    expert_dim=6,
    expert_bias_rate=0.03,
)
DECO = dict(
    SMALL,
    arch="deco",
    active_layers=3,
    experts=6,
    shared_experts=1,
    expert_dim=8,
    active_ratio=0.44,  # the entropy weight grows twice, then shrinks
    entropy_weight=0.1,  # that large, the gradient of the entropy matters
    entropy_growth=1.5,
)
CASES = {
    "dense": dict(
        SMALL,
        arch="dense",
        active_layers=3,
        hidden_size=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
    ),
    "dense_untied": dict(SMALL, arch="dense", active_layers=2, tie_word_embeddings=False),
    "mod": dict(SMALL, arch="mod", active_layers=4, token_sparsity=4, num_attention_heads=3, head_dim=6),
    "xmod_a1k4": dict(A1K4),
    # D SSSSSS D SSS D: the last interval is incomplete
    "xmod_a2k3": dict(SMALL, arch="xmod", active_layers=6, token_sparsity=3, anchor_stride=2, head_dim=4),
    # One token per sequence in a sparse layer: a constant softmax, so q, k and their norms have gradient 0
    "xmod_c1": dict(
        SMALL, arch="xmod", active_layers=4, token_sparsity=6, anchor_stride=1, max_position_embeddings=6
    ),
    "xmod_ragged": dict(
        A1K4,
        active_layers=3,
        hidden_size=16,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=4,
        max_position_embeddings=22,
    ),
    "no_anchors": dict(SMALL, arch="xmod", active_layers=3, token_sparsity=4, anchors=False),
    "no_residual_gate": dict(A1K4, active_layers=3, residual_gate=False),
    "no_token_bias": dict(A1K4, active_layers=3, token_bias_strength=0.0),
    "no_dense_prefix": dict(A1K4, active_layers=4, dense_prefix=0),
    "routed_ffn": dict(
        SMALL,
        arch="routed-ffn",
        active_layers=5,
        token_sparsity=3,
        anchor_stride=1,
        max_position_embeddings=22,
    ),
    # D SS SS D: the second unit begins with an attention too, inside the interval
    "routed_ffn_a2k2": dict(SMALL, arch="routed-ffn", active_layers=4, token_sparsity=2, anchor_stride=2),
    "selected_q": dict(
        SMALL,
        arch="selected-q",
        active_layers=5,
        token_sparsity=4,
        anchor_stride=1,
        max_position_embeddings=22,
    ),
    "selected_q_a1k2": dict(SMALL, arch="selected-q", active_layers=3, token_sparsity=2, anchor_stride=1),
    "moe": dict(MOE),
    "moe_extremes": dict(MOE, experts=4, shared_experts=0),
    "deco": dict(DECO),
    # So few experts are active that the entropy weight stays at its least
    "deco_no_shared": dict(
        DECO, active_layers=2, dense_prefix=0, experts=4, shared_experts=0, active_ratio=0.9
    ),
}

# ---------------------------------------------------------------------------------------------------------
# Files

DTYPES = {"F32": np.dtype("<f4"), "I32": np.dtype("<i4")}


def write_safetensors(path, tensors, metadata):
    """Header length, JSON header padded with spaces, then the tensors without gaps."""
    header, offset = {"__metadata__": metadata}, 0
    for name, a in tensors.items():
        dtype = next(key for key, value in DTYPES.items() if value == a.dtype)
        header[name] = dict(dtype=dtype, shape=a.shape, data_offsets=[offset, offset + a.nbytes])
        offset += a.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path + ".tmp", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for a in tensors.values():
            file.write(np.ascontiguousarray(a).tobytes())
    os.replace(path + ".tmp", path)


def read_safetensors(path):
    with open(path, "rb") as file:
        data = file.read()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        flat = np.frombuffer(data[start + begin : start + end], DTYPES[entry["dtype"]])
        tensors[name] = flat.reshape(entry["shape"])
    return tensors, metadata


def normalised_error(a, b):
    """||a - b|| / ||b||, or ||a|| where b is zero."""
    norm = np.linalg.norm(b)
    return np.linalg.norm(a - b) / (norm if norm > 0 else 1.0)


# ---------------------------------------------------------------------------------------------------------
# One case

EXPERT_BIAS = "e_score_correction_bias"
BF16_ERROR = "bf16_error."


def random_tokens(config, rng):
    B, n, V = 2, config.max_position_embeddings + 1, config.vocab_size
    if config.layer_pattern.startswith("S"):  # straight from the embedding, equal tokens have equal scores
        return torch.from_numpy(np.stack([rng.permutation(V)[:n] for _ in range(B)]))
    return torch.from_numpy(rng.randint(0, V, (B, n)))


def random_weights(model, rng):
    """Not the initial weights of training, which would hide mistakes: no norm or gate is 1, no output small,
    and router scores spread so that layers select different tokens."""
    weights = {}
    for name, p in model.named_parameters():
        normal = rng.standard_normal(p.shape)
        if "norm" in name:
            value = 1 + 0.1 * normal
        elif name.endswith(("residual_gate", "expert_scale")):
            value = 0.7 + 0.2 * normal
        elif "embed_tokens" in name:
            value = normal
        else:
            value = normal / np.sqrt(p.shape[1])
            value *= 0.5 if "o_proj" in name or "down_proj" in name else 1.0  # lest depth amplify rounding
        weights[name] = torch.from_numpy(value.astype(np.float32))
    for name, b in model.named_buffers():
        if name.endswith(EXPERT_BIAS):
            weights[name] = torch.from_numpy((0.1 * rng.standard_normal(b.shape)).astype(np.float32))
    return weights


def go_to_extremes(case, weights):
    """Experts that no token chooses, or all, as far as the case is about them."""
    for name, value in weights.items():
        if case == "moe_extremes" and name.endswith(EXPERT_BIAS):
            value[1], value[2] = -10, 10
        if case == "deco" and name.endswith("mlp.gate.weight"):
            value[2] = 0  # its score is 0, and active is above 0


def margin(config, output):
    """Least distance of a score from the cut between selected and not, of tokens and of experts."""

    def of_largest(score, n):
        ranked = score.sort(dim=1, descending=True).values
        return (ranked[:, n - 1] - ranked[:, n]).min().item()

    margins = [of_largest(route.score, int(route.selected[0].sum())) for route in output.routes.values()]
    for choice in output.choices.values():
        if config.arch == "moe":
            margins.append(of_largest(choice.score, int(choice.active[0].sum())))
        else:
            margins.append(choice.score[choice.score != 0].abs().min().item())
    return min(margins, default=np.inf)


def compute(config, weights, tokens, dtype, tau=None):
    """All tensors of a file that depend on the arithmetic, and the least margin of a selection."""
    model = XMod(config).to(dtype)
    model.load_state_dict(weights, strict=False)  # all but the thresholds
    routers = {n: layer.router for n, layer in enumerate(model.model["layers"]) if hasattr(layer, "router")}
    trainer = Trainer(model, SETTINGS)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    out, margins = {}, []

    output = model(inputs, targets)
    trainer.objective(output).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    out["logits"] = output.logits
    out["loss"] = output.loss.reshape(1)
    if config.arch == "deco":
        out["entropy_loss"] = output.entropy.reshape(1)
    out["grad_norm"] = torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt().reshape(1)
    for n, route in output.routes.items():
        out[f"routing.{n}"] = torch.stack([row.nonzero().squeeze(1) for row in route.selected])
        out[f"kth.{n}"] = route.kth_score.mean().reshape(1)
    for n, choice in output.choices.items():
        if config.arch == "moe":
            out[f"experts.{n}"] = torch.stack([row.nonzero().squeeze(1) for row in choice.active])
        else:
            out[f"active.{n}"] = choice.active.int()
    out.update({f"grad.{name}": g for name, g in grads.items()})

    if routers:
        if tau is None:
            tau = torch.cat([out[f"kth.{n}"] for n in routers]).float()
        for router, value in zip(routers.values(), tau):
            router.threshold.fill_(value)
        causal = model(inputs, routing="threshold")
        out["threshold_tau"] = tau
        out["threshold_logits"] = causal.logits
        for n, route in causal.routes.items():
            out[f"threshold_mask.{n}"] = route.selected.int()
            margins.append((route.score - routers[n].threshold).abs().min().item())
            routers[n].threshold.zero_()

    active_ratios, entropy_weights = [], []
    for _ in range(STEPS):
        output, _ = trainer.step(inputs, targets)
        margins.append(margin(config, output))
        if config.arch == "deco":
            active_ratios.append(output.active_ratio())
            entropy_weights.append(trainer.entropy_weight)
    out.update({f"step{STEPS}.{name}": value for name, value in model.state_dict().items()})
    if config.arch == "deco":
        out["expert_active_ratio"] = torch.tensor(active_ratios)
        out["entropy_weight"] = torch.tensor(entropy_weights)
    return {name: value.detach().clone().numpy() for name, value in out.items()}, min(margins)


def rounding_errors(config, weights, tokens, exact, rng):
    """Largest error of each tensor in fp32, and in fp64 when the weights are off by one part in 1e7: the
    latter finds tensors that fp32 PyTorch got right by luck."""
    tau = torch.from_numpy(exact["threshold_tau"]) if "threshold_tau" in exact else None
    jittered = {
        name: w.double() * (1 + 1e-7 * torch.from_numpy(rng.standard_normal(w.shape)))
        for name, w in weights.items()
    }
    runs = [
        compute(config, weights, tokens, torch.float32, tau)[0],
        compute(config, jittered, tokens, torch.float64, tau)[0],
    ]
    return {
        name: max(normalised_error(run[name].astype(np.float64), exact[name]) for run in runs)
        for name in exact
    }


def bf16_errors(config, weights, tokens, exact, rng):
    """Largest errors of PyTorch under bf16 autocast, in a few runs with weights off by one part in 1e4, which
    round otherwise; none if rounding changes a selection. The low-precision run that ours may err twice as
    much as."""
    errors = {}
    for _ in range(4):
        jittered = {
            name: w * (1 + 1e-4 * torch.from_numpy(rng.standard_normal(w.shape)).float())
            for name, w in weights.items()
        }
        model = XMod(config)
        model.load_state_dict(jittered, strict=False)
        with torch.autocast("cpu", torch.bfloat16):
            output = model(tokens[:, :-1], tokens[:, 1:])
            objective = Trainer(model, SETTINGS).objective(output)
        objective.backward()
        for n, route in output.routes.items():
            selected = torch.stack([row.nonzero().squeeze(1) for row in route.selected]).numpy()
            if not np.array_equal(selected, exact[f"routing.{n}"]):
                return {}
        for n, choice in output.choices.items():
            active = choice.active
            if config.arch == "moe":
                active = torch.stack([row.nonzero().squeeze(1) for row in active])
            if not np.array_equal(active.int().numpy(), exact[f"{'experts' if config.arch == 'moe' else 'active'}.{n}"]):
                return {}
        run = {"logits": output.logits, "loss": output.loss.reshape(1)}
        run.update({f"grad.{name}": p.grad for name, p in model.named_parameters()})
        for name, value in run.items():
            error = normalised_error(value.detach().double().numpy(), exact[name])
            errors[name] = max(error, errors.get(name, 0))
    return errors


def dump(case, seeds, most_rounding):
    """Tensors and metadata of one case, and the rounding error of each tensor; None if no seed is good."""
    config = Config(**CASES[case])
    for seed in seeds:
        rng = np.random.RandomState(seed)  # a stream that NumPy promises never to change
        tokens = random_tokens(config, rng)
        weights = random_weights(XMod(config), rng)
        go_to_extremes(case, weights)
        exact, least_margin = compute(config, weights, tokens, torch.float64)
        if least_margin < MARGIN:
            continue
        errors = rounding_errors(config, weights, tokens, exact, rng)
        if max(errors.values()) < most_rounding:
            break
    else:
        return None

    tensors = {"tokens": tokens.numpy().astype(np.int32)}
    for name, value in weights.items():
        tensors[("buffer." if name.endswith(EXPERT_BIAS) else "param.") + name] = value.numpy()
    for name, value in exact.items():
        tensors[name] = value.astype(np.float32 if value.dtype.kind == "f" else np.int32)
    for name, error in bf16_errors(config, weights, tokens, exact, rng).items():
        tensors[BF16_ERROR + name] = np.array([error], np.float32)
    optimizer = dict(asdict(SETTINGS), optimizer="muon", steps=STEPS)
    metadata = dict(config=config.to_json(), optimizer=json.dumps(optimizer), seed=str(seed))
    return tensors, metadata, errors


def stored(name, folder):
    path = os.path.join(folder, name + ".safetensors")
    try:
        return read_safetensors(path)
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"dump_reference.py: {path} cannot be read ({error}): write it with --out {folder}")


def compare(name, tensors, metadata, folder):
    """The worst tensor of a fresh dump against the stored one, and a list of complaints."""
    old, old_metadata = stored(name, folder)
    complaints = [
        f"{name}: metadata {key} differs" for key in metadata if metadata[key] != old_metadata.get(key)
    ]
    if list(old) != list(tensors):
        return "", complaints + [
            f"{name}: the file holds other tensors: {sorted(set(old) ^ set(tensors))[:4]}"
        ]
    errors = {}
    for key, a in tensors.items():
        b = old[key]
        if a.shape != b.shape or a.dtype != b.dtype:
            complaints.append(f"{name}: stored {key} is {b.dtype} {b.shape}, expected {a.dtype} {a.shape}")
            continue
        if key.startswith(BF16_ERROR):  # a measure of rounding, which differs between versions of PyTorch
            if not 0.5 * b <= a <= 2 * b:
                complaints.append(f"{name}: stored {key} is {b[0]:.1e}, now {a[0]:.1e}")
            continue
        errors[key] = normalised_error(a.astype(np.float64), b.astype(np.float64))
        if not errors[key] <= (AGREEMENT if a.dtype.kind == "f" else 0):
            complaints.append(f"{name}: stored {key} differs, normalised error {errors[key]:.1e}")
    worst = max(errors, key=errors.get)
    return f"{errors[worst]:.1e} ({worst})", complaints


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", default="test/data", metavar="DIR", help="where to write (default %(default)s)"
    )
    parser.add_argument("--check", metavar="DIR", help="write nothing; compare with the files of DIR")
    parser.add_argument(
        "--cases",
        nargs="+",
        default=list(CASES),
        choices=list(CASES),
        metavar="CASE",
        help="some of: " + " ".join(CASES),
    )
    parser.add_argument("--verbose", action="store_true", help="the rounding error of every tensor")
    args = parser.parse_args()
    if not args.check:
        os.makedirs(args.out, exist_ok=True)

    torch.set_num_threads(1)  # the tensors are too small to share
    complaints = []
    for name in args.cases:
        if args.check:  # how fp32 rounds depends on the BLAS; it served to choose the seed, and that is stored
            result = dump(name, [int(stored(name, args.check)[1]["seed"])], np.inf)
        else:
            result = dump(name, range(1000), ROUNDING)
        if result is None:
            complaints.append(f"{name}: rounding decides with every seed that was tried")
            continue
        tensors, metadata, errors = result
        plan, worst = json.loads(metadata["config"])["layer_pattern"], max(errors, key=errors.get)
        print(
            f"{name:17} {plan:12} seed {metadata['seed']:>3}, rounding {errors[worst]:.1e} ({worst})", end=""
        )
        if args.verbose:
            print("".join(f"\n    {error:.1e}  {key}" for key, error in errors.items()), end="")
        if args.check:
            worst, differences = compare(name, tensors, metadata, args.check)
            complaints += differences
            print(f", against the stored file {worst}", end="")
        else:
            path = os.path.join(args.out, name + ".safetensors")
            write_safetensors(path, tensors, metadata)
            print(f", {os.path.getsize(path) / 1000:.0f} kB", end="")
        print(flush=True)
    for complaint in complaints:
        print("dump_reference.py: " + complaint, file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
