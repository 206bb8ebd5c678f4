"""X-MoD in PyTorch, written to be read: what the C++ and CUDA trainer computes, in its shortest form.

    model = XMod(Config(arch="xmod", active_layers=8, token_sparsity=4, anchor_stride=1))
    output = model(tokens, targets)            # output.logits, output.loss, output.routes, output.choices

The names of the tensors are those of our checkpoints, so `model.load_state_dict` takes them as they are.
Runs with PyTorch >= 1.13. scripts/dump_reference.py turns it into the files that the C++ tests compare with,
scripts/bench_vs_pytorch.py into the opponent of a race.
"""

import json
import math
from dataclasses import asdict, dataclass, field, fields

try:
    import torch
except ImportError:
    raise SystemExit("xmod_reference.py needs PyTorch: pip install torch (or apt install python3-torch)")
from torch import nn
from torch.nn import functional as F

# ---------------------------------------------------------------------------------------------------------
# Configuration and layer plan

UNIT_ARCHS = ("xmod", "routed-ffn", "selected-q")
EXPERT_ARCHS = ("moe", "deco")
EXPERT_KEYS = (  # of the configuration, which only these know
    "experts experts_per_token shared_experts expert_dim expert_bias_rate "
    "active_ratio entropy_weight entropy_growth"
).split()


@dataclass
class Config:
    """The keys of config.json: first Hugging Face's, then ours. The defaults are the `tiny` preset."""

    hidden_size: int = 128  # d
    num_attention_heads: int = 2  # H
    num_key_value_heads: int = 1  # KV
    head_dim: int = 64  # hd
    intermediate_size: int = 384  # F
    vocab_size: int = 256  # V
    max_position_embeddings: int = 256  # T
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6

    arch: str = "xmod"  # dense | mod | xmod | routed-ffn | selected-q | moe | deco
    active_layers: int = 8  # dense layers + sparse layers / K: what a token passes through
    dense_prefix: int = 2  # P
    token_sparsity: int = 4  # K: a sparse layer processes 1/K of the tokens
    anchor_stride: int = 1  # A: sparse units between two dense anchors
    anchors: bool = True
    residual_gate: bool = True
    residual_gate_init: float = 1.0
    token_bias_strength: float = 1.0  # gamma; 0 for no token-choice bias

    experts: int = 0  # E: routed experts of each layer
    experts_per_token: int = 0  # k (moe)
    shared_experts: int = 0  # s: experts beside them that every token passes (deco: one, s times as wide)
    expert_dim: int = 0  # de: width of an expert
    expert_bias_rate: float = 0.01  # moe: how fast the bias evens out the loads; 0 for not at all
    active_ratio: float = 0.2  # deco: the share of active experts that the entropy term steers to
    entropy_weight: float = 1e-8  # deco: the weight that the term begins with, and its least
    entropy_growth: float = 1.002  # deco: the factor by which the weight changes each step

    layer_pattern: str = ""  # both are derived from the above; a value that contradicts it is refused
    num_hidden_layers: int = 0

    def __post_init__(self):
        if self.arch not in UNIT_ARCHS:  # mod: plain Mixture-of-Depths has the router, but neither of these
            self.residual_gate, self.token_bias_strength = False, 0.0
        plan = layer_plan(self)
        if self.layer_pattern not in ("", plan):
            raise ValueError(f"config: layer_pattern is {self.layer_pattern}, but its other keys give {plan}")
        if self.num_hidden_layers not in (0, len(plan)):
            raise ValueError(
                f"config: num_hidden_layers is {self.num_hidden_layers}, the plan has {len(plan)}"
            )
        self.layer_pattern, self.num_hidden_layers = plan, len(plan)

    @classmethod
    def from_json(cls, text):
        """Read config.json; keys that do not matter to the model (torch_dtype ...) are passed over."""
        known = {f.name for f in fields(cls)}
        return cls(**{key: value for key, value in json.loads(text).items() if key in known})

    def to_json(self):
        dense = self.arch == "dense"
        settings = asdict(self)
        if self.arch not in EXPERT_ARCHS:
            settings = {key: value for key, value in settings.items() if key not in EXPERT_KEYS}
        return json.dumps(
            dict(
                architectures=["Qwen3ForCausalLM" if dense else "XModForCausalLM"],
                model_type="qwen3" if dense else "xmod",
                tie_word_embeddings=True,
                hidden_act="silu",
                attention_bias=False,
                torch_dtype="float32",
                **settings,
            )
        )


def layer_plan(config):
    """The model as a string, one letter a layer: D dense (all tokens), S sparse (one token in K)."""
    active, K, A = config.active_layers, config.token_sparsity, config.anchor_stride
    if config.arch == "dense" or config.arch in EXPERT_ARCHS:
        return "D" * active
    if config.arch == "mod":  # D S D S ... D: the largest n with (n + 1) + n/K <= active
        n = (active - 1) * K // (K + 1)
        return "DS" * n + "D"
    if config.arch in UNIT_ARCHS:  # a prefix, then units of one active layer each: an anchor or K sparse ones
        units = active - config.dense_prefix
        is_anchor = [config.anchors and (u % (A + 1) == 0 or u == units) for u in range(1, units + 1)]
        return "D" * config.dense_prefix + "".join("D" if anchor else "S" * K for anchor in is_anchor)
    known = ", ".join(("dense", "mod") + UNIT_ARCHS + EXPERT_ARCHS)
    raise ValueError(f"config: arch is {config.arch!r}, expected one of {known}")


# ---------------------------------------------------------------------------------------------------------
# The Qwen3 block


def rmsnorm(x, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        return rmsnorm(x, self.eps) * self.weight


def rope_table(config, T, like):
    """For each position and i < hd/2 the angle position * theta^(-2i/hd); its cosines, and its sines with the
    signs of a rotation, for both halves of a head: (2, 1, T, hd)."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device=like.device) / config.head_dim
    position = torch.arange(T, dtype=torch.float64, device=like.device)
    angle = torch.outer(position, config.rope_theta**-exponent)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)]).unsqueeze(1).to(like.dtype)


def apply_rope(x, rope):
    """Turn the pairs (x[i], x[i + hd/2]) of x (B, heads, n, hd) by the angles of their tokens."""
    cos, sin = rope.unsqueeze(2)  # (B or 1, 1, n, hd) each
    return x * cos + x.roll(x.size(-1) // 2, dims=-1) * sin


def masked_attention(q, k, v, hidden):
    """Each row of q looks at the rows of k and v, but for those that the mask `hidden` names."""
    score = (q / math.sqrt(q.size(-1))) @ k.transpose(-2, -1)
    return score.masked_fill(hidden, -math.inf).softmax(-1) @ v


def causal_attention(q, k, v):
    """Row i of q (B, H, n, hd) looks at the rows 0..i of k and v (B, H, n, hd)."""
    n = q.size(-2)
    return masked_attention(q, k, v, torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1))


def take(x, index):
    """The rows `index` (B, C) of each sequence of x (B, n, d): (B, C, d)."""
    return x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.size(-1)))


class Attention(nn.Module):
    """Grouped-query attention: H query heads share KV key/value heads; q and k are normalised per head."""

    def __init__(self, config):
        super().__init__()
        d, self.hd = config.hidden_size, config.head_dim
        self.H, self.KV = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(d, self.H * self.hd, bias=False)
        self.k_proj = nn.Linear(d, self.KV * self.hd, bias=False)
        self.v_proj = nn.Linear(d, self.KV * self.hd, bias=False)
        self.o_proj = nn.Linear(self.H * self.hd, d, bias=False)
        self.q_norm = RMSNorm(self.hd, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.hd, config.rms_norm_eps)

    def forward(self, x, rope, index=None):
        """x (B, n, d) to (B, n, d); or to (B, C, d) if only the rows `index` (B, C) ask."""
        asking, q_rope = (x, rope) if index is None else (take(x, index), rope[:, 0, index])
        q = self.q_proj(asking).unflatten(-1, (self.H, self.hd)).transpose(1, 2)
        k = self.k_proj(x).unflatten(-1, (self.KV, self.hd)).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (self.KV, self.hd)).transpose(1, 2)
        q, k = apply_rope(self.q_norm(q), q_rope), apply_rope(self.k_norm(k), rope)
        group = self.H // self.KV  # query head h uses key/value head h // group
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        if index is None:
            y = causal_attention(q, k, v)
        else:
            later = torch.arange(x.size(1), device=x.device) > index.unsqueeze(-1)  # (B, C, n)
            y = masked_attention(q, k, v, later.unsqueeze(1))
        return self.o_proj(y.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, d, size):
        super().__init__()
        self.gate_proj = nn.Linear(d, size, bias=False)
        self.up_proj = nn.Linear(d, size, bias=False)
        self.down_proj = nn.Linear(size, d, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


# ---------------------------------------------------------------------------------------------------------
# FFNs with experts


def at_least_fp32(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def scores(x, weight):
    """x W^T in fp32 at least, also under autocast: routers decide in full precision."""
    with torch.autocast(x.device.type, enabled=False):
        x = at_least_fp32(x)
        return x @ weight.to(x.dtype).T


@dataclass
class Choice:
    """What an FFN with experts decided in its last pass, n = B * T."""

    score: torch.Tensor  # (n, E): moe sigmoid + bias, deco the router logit s
    active: torch.Tensor  # (n, E) bool
    entropy: torch.Tensor = 0.0  # deco: H, the mean over tokens


class ExpertRouter(nn.Module):
    """Scores the experts by W_r x, in fp32 at least."""

    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.experts, config.hidden_size))

    def forward(self, x):
        return scores(x, self.weight)


class MoE(nn.Module):
    """y = the shared experts + the k routed ones of the largest sigmoid(W_r x) + bias, in the proportions of
    their sigmoids. The bias takes part in the choice only, and only the trainer moves it."""

    def __init__(self, config):
        super().__init__()
        self.k = config.experts_per_token
        self.gate = ExpertRouter(config)
        self.gate.register_buffer("e_score_correction_bias", torch.zeros(config.experts))
        d, de = config.hidden_size, config.expert_dim
        self.experts = nn.ModuleList(SwiGLU(d, de) for _ in range(config.experts))
        self.shared_experts = nn.ModuleList(SwiGLU(d, de) for _ in range(config.shared_experts))

    def forward(self, x):
        x, shape = x.flatten(0, -2), x.shape  # (n, d)
        p = self.gate(x).sigmoid()  # (n, E)
        score = p.detach() + self.gate.e_score_correction_bias
        order = score.sort(descending=True, stable=True).indices  # stable: ties to the lower expert
        active = torch.zeros_like(score, dtype=torch.bool).scatter(1, order[:, : self.k], True)
        weight = p * active / (p * active).sum(1, keepdim=True)
        y = torch.zeros_like(x)
        for shared in self.shared_experts:
            y = y + shared(x)
        for e, expert in enumerate(self.experts):
            rows = active[:, e].nonzero().squeeze(1)
            y = y.index_add(0, rows, (weight[rows, e, None] * expert(x[rows])).to(y.dtype))
        self.choice = Choice(score, active)
        return y.view(shape)


class Deco(nn.Module):
    """y = a shared SwiGLU + sum over e of scale_e ReLU(s_e) W_down,e silu(norm(u_e - mean(u))), where
    s = W_r x and u = W_up x. Expert e is active where s_e > 0; the mean goes over all, active or not."""

    def __init__(self, config):
        super().__init__()
        d, de = config.hidden_size, config.expert_dim
        self.gate = ExpertRouter(config)
        self.expert_scale = nn.Parameter(torch.ones(config.experts))
        self.expert_norm = RMSNorm(de, config.rms_norm_eps)
        self.experts = nn.ModuleList(
            nn.ModuleDict(dict(up_proj=nn.Linear(d, de, bias=False), down_proj=nn.Linear(de, d, bias=False)))
            for _ in range(config.experts)
        )
        self.shared_expert = None
        if config.shared_experts:
            self.shared_expert = SwiGLU(d, config.shared_experts * de)

    def forward(self, x):
        x, shape = x.flatten(0, -2), x.shape  # (n, d)
        s = self.gate(x)  # (n, E)
        p = F.relu(s)
        u = torch.stack([expert["up_proj"](x) for expert in self.experts], dim=1)  # (n, E, de)
        a = F.silu(self.expert_norm(u - u.mean((1, 2), keepdim=True)))
        weight = (self.expert_scale * p).to(x.dtype)
        y = torch.zeros_like(x) if self.shared_expert is None else self.shared_expert(x)
        for e, expert in enumerate(self.experts):
            y = y + weight[:, e, None] * expert["down_proj"](a[:, e])
        q = p / (p.sum(1, keepdim=True) + 1e-5)
        self.choice = Choice(s.detach(), s.detach() > 0, -(q * (q + 1e-5).log()).sum(1).mean())
        return y.view(shape)


# ---------------------------------------------------------------------------------------------------------
# Layers: which rows of the residual stream x (B, T, d) a block updates, and by how much


class DenseLayer(nn.Module):
    """x += Block(x) - x, every token."""

    def __init__(self, config, mlp, attends=True):
        super().__init__()
        self.config = config
        if attends:
            self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def update(self, x, rope):
        """What the block adds to the rows x (B, n, d), which attend to one another only."""
        attention = self.self_attn(self.input_layernorm(x), rope)
        return attention + self.mlp(self.post_attention_layernorm(x + attention))

    def forward(self, x, rope):
        return x + self.update(x, rope)


class Router(nn.Module):
    """Scores tokens by s = w . RMSNorm(x), in fp32 at least; the threshold is for causal routing."""

    def __init__(self, config):
        super().__init__()
        self.eps = config.rms_norm_eps
        self.weight = nn.Parameter(torch.empty(1, config.hidden_size))
        self.register_buffer("threshold", torch.zeros(1))

    def forward(self, x):
        return scores(rmsnorm(at_least_fp32(x), self.eps), self.weight).squeeze(-1)  # (B, T)


@dataclass
class Route:
    """What a sparse layer decided."""

    score: torch.Tensor  # u (B, T): router logit + token-choice bias
    selected: torch.Tensor  # (B, T) bool
    kth_score: torch.Tensor  # (B,): the C-th largest u of each sequence


class SparseLayer(DenseLayer):
    """x_t += alpha * 2 sigmoid(s_t) * (Block(x_S) - x_S)_t for the selected tokens S; the others rest."""

    def __init__(self, config, mlp, attends=True):
        super().__init__(config, mlp, attends)
        self.router = Router(config)
        if config.residual_gate:
            self.residual_gate = nn.Parameter(torch.ones(1))  # alpha

    def forward(self, x, rope, bias, routing):
        T = x.size(1)
        C = -(-T // self.config.token_sparsity)  # ceil(T / K)
        s = self.router(x)
        u = s.detach() + bias
        ranked, order = u.sort(dim=1, descending=True, stable=True)  # stable: ties to the earlier token
        if routing == "topk":  # looks at the whole sequence: C tokens, in position order
            index = order[:, :C].sort(dim=1).values
            selected = torch.zeros_like(u, dtype=torch.bool).scatter(1, index, True)
            x = self.update_selected(x, s, index, rope)
        else:  # "threshold", causal: as many as it takes, so one sequence after the other
            selected = u > self.router.threshold
            x = torch.cat(
                [
                    self.update_selected(x[b : b + 1], s[b : b + 1], selected[b].nonzero().T, rope)
                    for b in range(x.size(0))
                ]
            )
        return x, Route(u, selected, ranked[:, C - 1])

    def update_selected(self, x, s, index, rope):
        rows = index.unsqueeze(-1).expand(-1, -1, x.size(-1))  # (B, C, d)
        gate = 2 * torch.sigmoid(s.gather(1, index))
        if self.config.residual_gate:
            gate = gate * self.residual_gate
        return x.scatter_add(1, rows, (gate.unsqueeze(-1) * self.update_at(x, index, rope)).to(x.dtype))

    def update_at(self, x, index, rope):
        """The tokens `index` (B, C) see one another, and keep the rope angles of their original positions."""
        return self.update(take(x, index), rope[:, 0, index])


class SelectedQLayer(SparseLayer):
    """The selected tokens see every earlier token, selected or not: keys and values come from all of them."""

    def update_at(self, x, index, rope):
        attention = self.self_attn(self.input_layernorm(x), rope, index)
        return attention + self.mlp(self.post_attention_layernorm(take(x, index) + attention))


class RoutedFFNLayer(SparseLayer):
    """Only the FFN is routed. The first layer of a unit has an attention of all tokens before it."""

    def forward(self, x, rope, bias, routing):
        if hasattr(self, "self_attn"):
            x = x + self.self_attn(self.input_layernorm(x), rope)
        return super().forward(x, rope, bias, routing)

    def update_at(self, x, index, rope):
        return self.mlp(self.post_attention_layernorm(take(x, index)))


class TokenBalance:
    """The token-choice bias of an interval, the run of sparse layers between two dense ones.

    A token selected c times in j layers, where j/K is its fair share, gets -gamma * (c - j/K). It depends on
    the token's own past only, hence stays causal, and carries no gradient.
    """

    def __init__(self, config):
        self.config = config
        self.count = 0.0  # c, (B, T) from the first sparse layer on
        self.layers = 0  # j

    def bias(self):
        return -self.config.token_bias_strength * (self.count - self.layers / self.config.token_sparsity)

    def add(self, selected):
        self.count = self.count + selected.float()
        self.layers += 1


# ---------------------------------------------------------------------------------------------------------
# The model


def make_layers(config):
    """The kinds of layers that the architecture puts at the letters of its plan."""
    sparse_kind = {"selected-q": SelectedQLayer, "routed-ffn": RoutedFFNLayer}.get(config.arch, SparseLayer)
    layers, depth = [], 0  # sparse layers since the last dense one
    for number, letter in enumerate(config.layer_pattern):
        if config.arch == "moe":
            mlp = MoE(config)
        elif config.arch == "deco" and number >= config.dense_prefix:
            mlp = Deco(config)
        else:
            mlp = SwiGLU(config.hidden_size, config.intermediate_size)
        if letter == "D":
            layers.append(DenseLayer(config, mlp))
            depth = 0
        else:
            first_of_unit = depth % config.token_sparsity == 0
            layers.append(sparse_kind(config, mlp, attends=first_of_unit or config.arch != "routed-ffn"))
            depth += 1
    return layers


@dataclass
class Output:
    logits: torch.Tensor  # (B, T, V)
    loss: torch.Tensor = None  # mean cross-entropy, if targets were given
    entropy: torch.Tensor = 0.0  # deco: sum of the layers' H / number of layers, dense ones included
    routes: dict = field(default_factory=dict)  # number of a sparse layer -> Route
    choices: dict = field(default_factory=dict)  # number of a layer with experts -> Choice

    def active_ratio(self):
        """The share of active ones among all pairs of a token and an expert."""
        return torch.cat([choice.active for choice in self.choices.values()]).double().mean().item()


class XMod(nn.Module):
    def __init__(self, config, seed=0):
        super().__init__()
        self.config = config
        self.model = nn.ModuleDict(
            dict(
                embed_tokens=nn.Embedding(config.vocab_size, config.hidden_size),  # also the output head
                layers=nn.ModuleList(make_layers(config)),
                norm=RMSNorm(config.hidden_size, config.rms_norm_eps),
            )
        )
        self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed):
        """Norms stay 1. The matrices that write to the residual stream are scaled down by its depth."""
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if name.endswith("residual_gate"):
                p.fill_(self.config.residual_gate_init)
            elif name.endswith("expert_scale"):
                p.fill_(0.1)
            elif "embed_tokens" in name:
                p.normal_(0, 0.02, generator=generator)
            elif "mlp.gate." in name and self.config.arch == "deco":
                p.normal_(0, 0.01, generator=generator)
            elif "router." in name or "mlp.gate." in name:
                p.normal_(0, 0.5 / math.sqrt(p.size(1)), generator=generator)
            elif p.dim() == 2:
                std = 1 / math.sqrt(p.size(1))
                if "o_proj" in name or "down_proj" in name:
                    std /= math.sqrt(2 * self.config.active_layers)
                p.normal_(0, std, generator=generator)

    def forward(self, tokens, targets=None, routing="topk"):
        """tokens and targets (B, T); routing is "topk" (training) or "threshold" (causal)."""
        embedding = self.model["embed_tokens"]
        x = embedding(tokens)
        rope = rope_table(self.config, tokens.size(1), like=x)
        routes, choices, balance = {}, {}, TokenBalance(self.config)
        for number, layer in enumerate(self.model["layers"]):
            if isinstance(layer, SparseLayer):
                x, routes[number] = layer(x, rope, balance.bias(), routing)
                balance.add(routes[number].selected)
            else:
                x, balance = layer(x, rope), TokenBalance(self.config)
            if isinstance(layer.mlp, (MoE, Deco)):
                choices[number] = layer.mlp.choice
        logits = F.linear(self.model["norm"](x), embedding.weight)
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        entropy = sum(choice.entropy for choice in choices.values()) / self.config.num_hidden_layers
        return Output(logits, loss, entropy, routes, choices)


# ---------------------------------------------------------------------------------------------------------
# Training


def newton_schulz(U):
    """Five steps that push every singular value of the matrices U (..., rows, cols) towards 1."""
    if U.size(-2) > U.size(-1):
        return newton_schulz(U.transpose(-2, -1)).transpose(-2, -1)
    X = U / (torch.linalg.matrix_norm(U, keepdim=True) + 1e-7)
    for _ in range(5):
        A = X @ X.transpose(-2, -1)
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return X


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised: a matrix moves by 0.2 sqrt(max(rows, cols)) times a near-orthogonal one."""

    def __init__(self, params, lr, momentum, weight_decay):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            by_shape = {}  # matrices of equal shape are orthogonalised as one batch
            for p in group["params"]:
                by_shape.setdefault(p.shape, []).append(p)
            for (rows, cols), params in by_shape.items():
                beta, state = group["momentum"], self.state[params[0]]
                G = torch.stack([p.grad for p in params])
                M = state["momentum"] = beta * state.get("momentum", 0) + (1 - beta) * G
                O = newton_schulz((1 - beta) * G + beta * M)
                for p, direction in zip(params, O):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.sub_(direction, alpha=group["lr"] * 0.2 * math.sqrt(max(rows, cols)))


@dataclass
class OptimizerSettings:
    lr: float = 3.2e-3  # Muon's
    adamw_lr: float = 3.2e-3
    weight_decay: float = 0.1
    momentum: float = 0.95  # Muon's
    betas: tuple = (0.9, 0.95)  # AdamW's
    eps: float = 1e-8
    grad_clip: float = 1.0
    threshold_decay: float = 0.99


class Trainer:
    """Muon on the hidden matrices; AdamW on embedding, norms, routers, gates and scales, of which only the
    embedding decays; gradients clipped by their global norm. Three things move without a gradient: thresholds
    with the C-th largest scores, expert biases with the loads, the entropy weight with the active share."""

    def __init__(self, model, settings=OptimizerSettings()):
        hidden, embedding, rest = [], [], []
        for name, p in model.named_parameters():
            (hidden if "_proj." in name else embedding if "embed_tokens." in name else rest).append(p)
        adamw_groups = [
            dict(params=embedding, weight_decay=settings.weight_decay),
            dict(params=rest, weight_decay=0.0),
        ]
        self.muon = Muon(hidden, settings.lr, settings.momentum, settings.weight_decay)
        self.adamw = torch.optim.AdamW(adamw_groups, settings.adamw_lr, settings.betas, settings.eps)
        self.model, self.settings, self.steps = model, settings, 0
        self.entropy_weight = model.config.entropy_weight  # lambda

    def objective(self, output):
        return output.loss + self.entropy_weight * output.entropy

    def step(self, tokens, targets):
        """One optimizer step; returns the Output of its forward pass and the unclipped gradient's norm."""
        self.model.zero_grad(set_to_none=True)
        output = self.model(tokens, targets)
        self.objective(output).backward()
        grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.grad_clip)
        self.muon.step()
        self.adamw.step()
        self.steps += 1
        self.update_thresholds(output.routes)
        if self.model.config.arch == "moe":
            self.update_expert_biases(output.choices)
        if self.model.config.arch == "deco":
            self.update_entropy_weight(output.active_ratio())
        return output, grad_norm

    @torch.no_grad()
    def update_thresholds(self, routes):
        """Exponential moving average; dividing by 1 - decay^n makes it a plain mean in the beginning."""
        decay = self.settings.threshold_decay
        weight = (1 - decay) / (1 - decay**self.steps)
        for number, route in routes.items():
            threshold = self.model.model["layers"][number].router.threshold
            threshold.lerp_(route.kth_score.mean().to(threshold.dtype), weight)

    @torch.no_grad()
    def update_expert_biases(self, choices):
        """An expert with more tokens than the mean becomes a little harder to choose, and vice versa."""
        for number, choice in choices.items():
            bias = self.model.model["layers"][number].mlp.gate.e_score_correction_bias
            load = choice.active.sum(0).to(bias.dtype)  # (E,)
            bias.add_((load.mean() - load).sign(), alpha=self.model.config.expert_bias_rate)

    def update_entropy_weight(self, active_ratio):
        """Grows while more experts than wanted are active; else shrinks, as far as where it began."""
        config = self.model.config
        if active_ratio > config.active_ratio:
            self.entropy_weight *= config.entropy_growth
        else:
            self.entropy_weight = max(self.entropy_weight / config.entropy_growth, config.entropy_weight)
