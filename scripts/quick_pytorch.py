"""The training step of scripts/xmod_reference.py as fast as this PyTorch makes it: the opponent of a race.

The reference is written to be read. This is the same arithmetic with what PyTorch has that is quicker: fused
attention, norm and AdamW, bf16 autocast, torch.compile.
"""

import os
import time

import xmod_reference  # says how to get PyTorch where it is missing
from xmod_reference import Trainer, XMod, torch

# ---------------------------------------------------------------------------------------------------------
# Quicker variants


def attention(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def norm(self, x):
    return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


def newton_schulz(U):
    if U.size(-2) > U.size(-1):
        return newton_schulz(U.mT).mT
    X = U / (torch.linalg.matrix_norm(U, keepdim=True) + 1e-7)
    for _ in range(5):
        A = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=-4.7750, alpha=2.0315), X, beta=3.4445)
    return X


def quicken_reference():
    xmod_reference.newton_schulz = newton_schulz
    if hasattr(torch.nn.functional, "scaled_dot_product_attention"):  # PyTorch 2.0
        xmod_reference.causal_attention = attention
    if hasattr(torch.nn.functional, "rms_norm"):  # PyTorch 2.4
        xmod_reference.RMSNorm.forward = norm


def quick_adamw(adamw):
    keys = ("params", "lr", "betas", "eps", "weight_decay")
    groups = [{key: group[key] for key in keys} for group in adamw.param_groups]
    for option in (dict(fused=True), dict(foreach=True)):
        try:
            return torch.optim.AdamW(groups, **option)
        except (TypeError, RuntimeError):  # fused on the CPU came with PyTorch 2.4
            continue
    return adamw


# ---------------------------------------------------------------------------------------------------------


class Opponent:
    """A model in training on random tokens."""

    def __init__(self, config, precision, compiled, batch_size, threads):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        quicken_reference()
        self.shape = (batch_size, config.max_position_embeddings + 1)
        self.vocab_size = config.vocab_size
        model = XMod(config)
        if precision == "bf16":  # the factors of matrix products; weights stay fp32, as ours do
            model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
        if compiled:
            model.forward = torch.compile(model.forward)
        self.trainer = Trainer(model)
        self.trainer.adamw = quick_adamw(self.trainer.adamw)

    def run(self, steps):
        """The tokens per second of each step, and the last loss."""
        speeds = []
        for _ in range(steps):
            start = time.perf_counter()
            tokens = torch.randint(self.vocab_size, self.shape)
            output, grad_norm = self.trainer.step(tokens[:, :-1], tokens[:, 1:])
            loss, _ = output.loss.item(), grad_norm.item()
            speeds.append(output.logits[..., 0].numel() / (time.perf_counter() - start))
        return speeds, loss


# ---------------------------------------------------------------------------------------------------------
# Is PyTorch at its best here?


def blas_name():
    """The library that multiplies PyTorch's matrices, as far as the process shows."""
    if torch.backends.mkl.is_available():
        return "MKL"
    with open("/proc/self/maps") as file:
        mapped = {os.path.basename(line.split()[-1]) for line in file if "/" in line}
    for name in ("openblas", "blis", "atlas"):
        if any(name in library for library in mapped):
            return name
    return "reference BLAS"


def matmul_gflops(threads, n=512):
    torch.set_num_threads(threads)
    a = torch.randn(n, n)
    a @ a
    times = []
    for _ in range(5):
        start = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - start)
    return 2e-9 * n**3 / min(times)
