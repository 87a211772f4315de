"""The ladder of a character-level GPT on the text of Python's own documentation (``pydoc_data.topics``).

    python benchmarks/ladder_char_gpt.py [--device cpu]              the table, as Markdown
    memfit ladder benchmarks/ladder_char_gpt.py:workload             the same workload by the command

Four layers, width 128, 128 characters, batch 8, AdamW; 40 real steps, three seeds.
"""

from __future__ import annotations

import argparse
import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfit import Workload, ladder
from memfit.analysis.ladder_values import Ladder
from memfit.core.units import MIB

WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 128, 4, 4, 128, 8
TECHNIQUES = (
    "optimizer_implementation",
    "gradient_checkpointing",
    "chunked_cross_entropy:layer=head",
    "micro_batching:micro_batches=2",
    "mixed_precision:precision=bf16",
    "low_memory_optimizer:backend=bitsandbytes",
    "lora",
)


@functools.cache
def text() -> Tensor:
    """The documentation's topics as numbers of characters."""
    from pydoc_data.topics import topics

    whole = "\n".join(topics[name] for name in sorted(topics))
    with torch.device("cpu"):
        return torch.tensor([min(ord(letter), 127) for letter in whole], dtype=torch.uint8)


class Block(nn.Module):
    """A transformer block with causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, w // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class CharGPT(nn.Module):
    """Characters in, the next character's logits out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(128, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch() -> Tensor:
    """Windows of the text, drawn anew in each call."""
    with torch.device("cpu"):
        starts = torch.randint(len(text()) - CONTEXT - 1, (BATCH,))
        return text()[starts[:, None] + torch.arange(CONTEXT + 1)].long()


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Of the next character."""
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def workload() -> Workload:
    """For ``memfit ladder benchmarks/ladder_char_gpt.py:workload``."""
    return Workload(name="char-GPT", model=CharGPT, batch=batch, loss=loss, optimizer=optimizer)


def table(climbed: Ladder) -> str:
    """The ladder as a Markdown table; sizes in MiB, times in ms."""
    trained = ["loss", "to plain"] if climbed.rungs[0].quality is not None else []
    heads = [f"rung ({climbed.device_name})", "requested", "reserved", "to rung before", "to plain", "alone"]
    heads += ["step", *trained]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    plain = climbed.rungs[0]
    for rung in climbed.rungs:
        if rung.skipped is not None:
            lines.append(f"| {rung.name} | – {'| ' * (len(heads) - 3)}| {rung.skipped} |")
            continue
        before = climbed.before(rung) or rung
        cells = [
            rung.name if rung.settings is None else f"+ {rung.name}",
            _mib(rung.peak_requested_bytes),
            _mib(rung.peak_reserved_bytes),
            _percent(rung.peak_bytes, before.peak_bytes),
            _percent(rung.peak_bytes, plain.peak_bytes),
            _percent(rung.alone_reserved_bytes, plain.peak_reserved_bytes),
            "–" if rung.step_seconds is None else f"{1e3 * rung.step_seconds:.2f} ({rung.step_seconds_kind})",
        ]
        if rung.quality is not None:
            cells += [
                f"{rung.quality.loss:.4f}",
                f"{rung.quality.difference:+.4f} ± {rung.quality.difference_spread:.4f}",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    if plain.quality is not None:
        lines.append(f"\nAnother seed changes the plain loss by {plain.quality.seed_spread:.4f}.")
    return "\n".join(lines)


def _mib(size: int | None) -> str:
    return "–" if size is None else f"{size / MIB:.1f}"


def _percent(size: int | None, of: int | None) -> str:
    return "–" if size is None or not of else f"{100 * (size / of - 1):+.1f} %"


def run(spec: str, techniques: tuple[str, ...], steps: int) -> None:
    """Climbs and prints; ``--device`` and ``--steps`` from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="dryrun", choices=["dryrun", "cpu", "cuda"])
    parser.add_argument("--gpu", default="a100-80gb")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    climbed = ladder(
        spec, techniques=list(techniques), device=given.device, gpu=given.gpu, steps=given.steps,
        seeds=given.seeds, quality=given.device == "dryrun",
    )  # fmt: skip
    print(table(climbed))
    print(f"\n{climbed.wall_seconds:.0f} s. {' '.join(climbed.notes)}")


if __name__ == "__main__":
    run(f"{__file__}:workload", TECHNIQUES, steps=40)
