"""Norms, activations, positions and losses of Liger-Kernel's benchmark, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from liger_bench import Bench, Row
from reading import DEVICE
from torch import Tensor, nn
from torch.nn import functional


def _leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, device=DEVICE, requires_grad=True)


def cross_entropy(row: Row) -> Bench:
    """Of logits in single precision."""
    tokens = row["B"] * row["T"]
    logits, labels = _leaf(tokens, row["V"]), torch.randint(row["V"], (tokens, 1), device=DEVICE).squeeze(1)
    return Bench(lambda: functional.cross_entropy(logits, labels), retain=False)


def _probabilities(
    row: Row, of: Callable[[Tensor], Tensor], of_target: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Two distributions; the first one's graph lasts, and ends in a leaf that only it holds."""
    tokens = row["BT"] if row.x_name == "BT" else row["B"] * row["T"]
    width = row["vocab_size"] if row.x_name == "BT" else row["V"]
    return of(_leaf(tokens, width)), of_target(torch.randn(tokens, width, device=DEVICE))


_softmax = partial(torch.softmax, dim=-1)
_log_softmax = partial(torch.log_softmax, dim=-1)


def kl_div(row: Row) -> Bench:
    """Of logarithms to probabilities."""
    ours, target = _probabilities(row, _log_softmax, _softmax)
    return Bench(lambda: functional.kl_div(ours, target, reduction="batchmean"))


def total_variation(row: Row) -> Bench:
    """Half the distance of two distributions."""
    ours, target = _probabilities(row, _softmax, _softmax)

    def forward() -> Tensor:
        apart = torch.abs(ours - target) / 2.0
        return torch.sum(apart) / ours.size(0)

    return Bench(forward)


def jsd(row: Row) -> Bench:
    """Jensen-Shannon; as a sum over each row first, since 2024-10-11, when labels to ignore came."""
    ours, target = _probabilities(row, _log_softmax, _log_softmax)
    if row.timestamp < "2024-10-11":
        return Bench(lambda: jensen_shannon(ours, target))
    return Bench(lambda: _jensen_shannon_by_rows(ours, target), gradients="random")


def jensen_shannon(ours: Tensor, target: Tensor, beta: float = 0.5) -> Tensor:
    """Of logarithms, in single precision."""
    target, ours = target.float(), ours.float()
    mean = torch.lerp(torch.exp(target), torch.exp(ours), beta)
    loss = beta * _divergence(torch.log(mean), target) + (1 - beta) * _divergence(torch.log(mean), ours)
    return loss


def _divergence(ours: Tensor, target: Tensor, reduction: str = "batchmean") -> Tensor:
    return functional.kl_div(ours, target, reduction=reduction, log_target=True)


def _jensen_shannon_by_rows(ours: Tensor, target: Tensor, beta: float = 0.5) -> Tensor:
    mean = torch.lerp(torch.exp(ours), torch.exp(target), beta)
    loss = beta * _divergence(torch.log(mean), target, "none").sum(dim=-1) + (1 - beta) * _divergence(
        torch.log(mean), ours, "none"
    ).sum(dim=-1)
    return (loss / ours.shape[0]).sum()


def _on_rows(row: Row, layer: Callable[[Tensor], Tensor], shape: tuple[int, ...], *held: nn.Module) -> Bench:
    """A layer on a matrix, with a gradient that is there before."""
    x = torch.randn(shape, dtype=row.dtype, device=DEVICE)
    gradient = torch.randn_like(x)
    return Bench(lambda: layer(x.requires_grad_(True)), gradients=(gradient,), kept=held)


class RootMeanSquare(nn.Module):
    """As Llama has it: computed in single precision."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, device=DEVICE))

    def forward(self, hidden: Tensor) -> Tensor:
        dtype = hidden.dtype
        hidden = hidden.to(torch.float32)
        variance = hidden.pow(2).mean(-1, keepdim=True)
        hidden = hidden * torch.rsqrt(variance + 1e-6)
        return self.weight * hidden.to(dtype)


def rms_norm(row: Row) -> Bench:
    """Their own layer, of the same weight, is there too."""
    theirs, plain = RootMeanSquare(row["H"]), RootMeanSquare(row["H"])
    return _on_rows(row, plain, (row["M"], row["H"]), theirs)


def fused_add_rms_norm(row: Row) -> Bench:
    """The sum of two, and its norm."""
    width = row["H"]
    held = [nn.Parameter(torch.ones(width, device=DEVICE)) for _ in range(3)]
    weight = nn.Parameter(torch.ones(width, device=DEVICE))
    x, residual = (torch.randn(row["M"], width, dtype=row.dtype, device=DEVICE) for _ in range(2))
    gradients = torch.randn_like(x), torch.randn_like(residual)

    def forward() -> tuple[Tensor, Tensor]:
        hidden = x.to(torch.float32) + residual.to(torch.float32)
        added = hidden
        variance = hidden.pow(2).mean(-1, keepdim=True)
        hidden = hidden * torch.rsqrt(variance + 1e-6)
        return weight * hidden.to(row.dtype), added.to(row.dtype)

    x.requires_grad_(True), residual.requires_grad_(True)
    return Bench(forward, gradients=gradients, retain=False, kept=(held,))


def layer_norm(row: Row) -> Bench:
    """PyTorch's; a second layer is there too."""
    theirs, plain = (nn.LayerNorm(row["N"], eps=row["eps"], device=DEVICE) for _ in range(2))
    return _on_rows(row, plain, (row["M"], row["N"]), theirs)


def group_norm(row: Row) -> Bench:
    """PyTorch's; a second layer is there too."""
    groups = row["C"] // row["channels_per_group"]
    theirs, plain = (nn.GroupNorm(groups, row["C"], eps=row["eps"], device=DEVICE) for _ in range(2))
    return replace(_on_rows(row, plain, (row["M"], row["C"], row["H"]), theirs), only_full=True)


def _on_vector(row: Row, layer: Callable[[Tensor], Tensor]) -> Bench:
    """Their memory figures of these operations are of a vector of ``N``, not of ``M`` rows."""
    x = _leaf(row["N"], dtype=row.dtype)
    return Bench(lambda: layer(x), gradients="ones")


def sparsemax(row: Row) -> Bench:
    """By sorting."""
    return _on_rows(row, _sparsemax, (row["B"] * row["T"], row["V"]))


def _sparsemax(x: Tensor) -> Tensor:
    ordered, _ = torch.sort(x, dim=-1, descending=True)
    sums = torch.cumsum(ordered, dim=-1)
    counts = torch.arange(1, x.size(-1) + 1, device=x.device, dtype=x.dtype).view(1, x.size(-1))
    bound = 1 + counts * ordered
    support = bound > sums
    size = support.sum(dim=-1, keepdim=True).clamp(min=1)
    total = (ordered * support).sum(dim=-1, keepdim=True)
    tau = (total - 1) / size
    return torch.clamp(x - tau, min=0)


def rope(row: Row) -> Bench:
    """Rotary positions, of queries and keys that are laid out by tokens."""
    tokens, width = (
        row["seq_len"] if row.x_name == "H" else row["T"],
        row["H"] if row.x_name == "H" else row["hidden_size"],
    )
    size = width // row["num_q_heads"]
    q = _leaf(1, tokens, row["num_q_heads"], size, dtype=row.dtype).transpose(1, 2)
    k = _leaf(1, tokens, row["num_kv_heads"], size, dtype=row.dtype).transpose(1, 2)
    gradients = torch.randn_like(q), torch.randn_like(k)
    frequencies = 1.0 / (10000.0 ** (torch.arange(0, size, 2, device=DEVICE).float() / size))
    positions = torch.arange(tokens, device=DEVICE).unsqueeze(0)
    if row.timestamp < "2025":
        _take_workspace()
    angles = (frequencies[None, :, None].float() @ positions[:, None, :].float()).transpose(1, 2)
    angles = torch.cat((angles, angles), dim=-1)
    cosine, sine = angles.cos().to(row.dtype), angles.sin().to(row.dtype)
    del angles
    return Bench(
        lambda: _rotated(q, k, cosine, sine),
        inputs=(q, k),
        gradients=gradients,
        kept=(positions, frequencies),
    )


def llama4_rope(row: Row) -> Bench:
    """Positions as complex numbers."""
    tokens = row["seq_len"] if row.x_name == "H" else row["T"]
    width = row["H"] if row.x_name == "H" else row["hidden_size"]
    size = width // row["num_q_heads"]
    q = _leaf(1, tokens, row["num_q_heads"], size, dtype=row.dtype)
    k = _leaf(1, tokens, row["num_kv_heads"], size, dtype=row.dtype)
    gradients = torch.randn_like(q), torch.randn_like(k)
    positions = torch.arange(tokens, device=DEVICE).unsqueeze(0)
    frequencies = 1.0 / (10000.0 ** (torch.arange(0, size, 2, device=DEVICE).float() / size))
    _take_workspace()
    angles = positions[:, :, None].float() * frequencies
    turns = torch.polar(torch.ones_like(angles), angles)
    del angles

    def turned(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns[:, :, None, :]).flatten(3)

    def forward() -> tuple[Tensor, Tensor]:
        turned_q, turned_k = turned(q), turned(k)
        return turned_q.type_as(q), turned_k.type_as(k)

    return Bench(forward, inputs=(q, k), gradients=gradients, kept=(positions, frequencies))


def _take_workspace() -> None:
    """PyTorch 2.4 gave this product, whose inner dimension is 1, to cuBLAS; 2.14 multiplies by itself. The
    workspace that a first product takes stays."""
    square = torch.ones(64, 64, device=DEVICE)
    square @ square


def _rotated(q: Tensor, k: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    cosine, sine = cosine.unsqueeze(1), sine.unsqueeze(1)
    turned_q = (q * cosine) + (_halves_turned(q) * sine)
    turned_k = (k * cosine) + (_halves_turned(k) * sine)
    return turned_q, turned_k


def _halves_turned(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]  # in this order: the backward pass goes by it
    return torch.cat((-second, first), dim=-1)


class GatedMLP(nn.Module):
    """As Llama has it."""

    def __init__(self, width: int, inner: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, inner, bias=False, device=DEVICE) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False, device=DEVICE)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x))


_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
}


def gated_mlp(row: Row) -> Bench:
    """On a batch of sequences."""
    batch = row.config["B"] if "B" in row.config else row["bsz"]
    x = _leaf(batch, row["T"], row["hidden_size"], dtype=row.dtype)
    activation = _ACTIVATIONS[row["hidden_act"]]
    layer = GatedMLP(row["hidden_size"], row["intermediate_size"], activation).to(row.dtype)
    return Bench(lambda: layer(x), gradients="random")


def embedding(row: Row) -> Bench:
    """PyTorch's; a second table is there too."""
    plain, theirs = (nn.Embedding(row["V"], row["D"], device=DEVICE).to(row.dtype) for _ in range(2))
    tokens = torch.randint(0, row["V"], (row["B"], row["T"]), device=DEVICE)
    return Bench(lambda: plain(tokens), gradients="random", retain=False, kept=(theirs,))


OPERATIONS: Mapping[str, Callable[[Row], Bench]] = {
    "cross_entropy": cross_entropy,
    "embedding": embedding,
    "fused_add_rms_norm": fused_add_rms_norm,
    "geglu": gated_mlp,
    "group_norm": group_norm,
    "jsd": jsd,
    "kl_div": kl_div,
    "layer_norm": layer_norm,
    "llama4_rope": llama4_rope,
    "relu_squared": lambda row: _on_vector(row, lambda x: torch.square(functional.relu(x))),
    "rms_norm": rms_norm,
    "rope": rope,
    "softmax": lambda row: _on_vector(row, _softmax),
    "sparsemax": sparsemax,
    "swiglu": gated_mlp,
    "tiled_geglu": gated_mlp,
    "tiled_swiglu": gated_mlp,
    "tvd": total_variation,
}
