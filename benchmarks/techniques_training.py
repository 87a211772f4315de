"""What precision, optimizer and adapter techniques save and cost: training on the CPU, peaks on a fake one.

    python benchmarks/techniques_training.py                 both tables, as Markdown
    python benchmarks/techniques_training.py --json          the figures
    python benchmarks/techniques_training.py --only cpu|gpu

CPU: a character-level GPT (3 layers, width 64, 64 characters, batch 8) on the text of Python's own
documentation (``pydoc_data.topics``), 80 steps of AdamW, two seeds. Memory is that of live tensors in a
whole step. GPU: GPT-2 124M as transformers builds it, AdamW, third step, by PyTorch's own allocator on a
made-up A100 (the values are not real there, so there is no quality), for a large batch, where activations
dominate, and for a small one, where weights and states do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memfit.core.devices import find_gpu
from memfit.core.errors import MemfitError
from memfit.core.units import format_bytes
from memfit.techniques import mixed_precision_of, technique_from_settings, undo_all
from memfit.techniques.batch_size_meter import PeakMeter

STEPS, LAST, SEEDS = 80, 20, (0, 1)
WIDTH, LAYERS, CONTEXT, BATCH = 64, 3, 64, 8
GPU_BATCHES = ((8, 1024), (1, 256))

Settings = dict[str, Any]


def _mp(**settings: Any) -> Settings:
    return {"technique": "mixed_precision", **settings}


VARIANTS: dict[str, list[Settings]] = {
    "plain": [],
    "bf16": [_mp(precision="bf16")],
    "fp16, scaled": [_mp(precision="fp16")],
    "bf16 weights, split": [_mp(precision="bf16", weights="bf16", rounding="split")],
    "bf16 weights, Kahan": [_mp(precision="bf16", weights="bf16", rounding="kahan")],
    "bf16 weights, stochastic": [_mp(precision="bf16", weights="bf16", rounding="stochastic")],
    "bf16 weights, nearest": [_mp(precision="bf16", weights="bf16", rounding="nearest")],
    "8-bit AdamW (torchao)": [
        {"technique": "low_memory_optimizer", "backend": "torchao", "compiled": False},
    ],
    "8-bit AdamW (bitsandbytes)": [{"technique": "low_memory_optimizer", "backend": "bitsandbytes"}],
    "4-bit AdamW": [{"technique": "low_memory_optimizer", "kind": "adamw4bit", "compiled": False}],
    "Adafactor": [{"technique": "low_memory_optimizer", "kind": "adafactor"}],
    "optimizer in backward": [{"technique": "optimizer_in_backward"}],
    "state on the host": [{"technique": "offloaded_optimizer_state"}],
    "LoRA, rank 8": [{"technique": "lora"}],
    "bf16 + state on the host": [_mp(precision="bf16"), {"technique": "offloaded_optimizer_state"}],
    "bf16 + in backward": [_mp(precision="bf16"), {"technique": "optimizer_in_backward"}],
    "bf16 + checkpointing + in backward": [
        _mp(precision="bf16"),
        {"technique": "gradient_checkpointing"},
        {"technique": "optimizer_in_backward"},
    ],
}


class CharGPT(nn.Module):
    """Layers of torch's own, with a causal mask."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.place.weight[: ids.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


def text() -> tuple[Tensor, int]:
    """The characters of Python's help topics as numbers, and how many kinds there are."""
    from pydoc_data.topics import topics

    joined = "".join(topics.values())
    kinds = {c: n for n, c in enumerate(sorted(set(joined)))}
    return torch.tensor([kinds[c] for c in joined]), len(kinds)


def on_the_cpu(techniques: Sequence[Settings], seed: int) -> dict[str, Any]:
    """Trains once: the mean loss of the last steps, milliseconds a step, the peak of live tensors."""
    data, vocabulary = text()
    torch.manual_seed(seed)
    model = CharGPT(vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for settings in techniques:
        technique_from_settings(settings).apply(model, optimizer)
    precision = mixed_precision_of(model)
    draw = torch.Generator().manual_seed(seed)
    losses: list[float] = []

    def step() -> None:
        starts = torch.randint(0, len(data) - CONTEXT - 1, (BATCH,), generator=draw)
        ids = torch.stack([data[s : s + CONTEXT + 1] for s in starts])
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        (loss if precision is None else precision.scale_loss(loss)).backward()
        losses.append(float(loss.detach()))
        del loss
        optimizer.step()
        optimizer.zero_grad()

    times = []
    for number in range(STEPS):
        if number == STEPS // 2:
            meter = PeakMeter(torch.device("cpu"), [model, optimizer], stop_at_bytes=1 << 40)
            with meter:
                step()
            continue
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    undo_all(model)
    return {
        "loss": statistics.fmean(losses[-LAST:]),
        "step_seconds": statistics.median(times),
        "peak_bytes": meter.peak_bytes,
    }


class GPT2:
    """Runs in the dry run's child: GPT-2 on the made-up GPU, and its third step under techniques."""

    def __init__(self) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, masking_utils

        masking_utils.find_packed_sequence_indices = lambda positions: None
        with torch.device("cuda"):
            config = AutoConfig.for_model("gpt2", use_cache=False)
            self.model = AutoModelForCausalLM.from_config(config).train()

    def peak(self, techniques: Sequence[Settings], batch: int, tokens: int) -> dict[str, Any]:
        """Most bytes allocated in the third step."""
        torch.cuda.empty_cache()
        optimizer = torch.optim.AdamW(self.model.parameters())
        try:
            for settings in techniques:
                technique_from_settings(settings).apply(self.model, optimizer)
            precision = mixed_precision_of(self.model)
            for _ in range(3):
                torch.cuda.reset_peak_memory_stats()
                ids = torch.randint(0, 50257, (batch, tokens), device="cuda")
                loss = self.model(input_ids=ids, labels=ids).loss
                del ids
                (loss if precision is None else precision.scale_loss(loss)).backward()
                del loss
                optimizer.step()
                optimizer.zero_grad()
            return {"allocated_bytes": torch.cuda.max_memory_allocated()}
        except (MemfitError, RuntimeError, ImportError) as error:
            return {"failure": f"{type(error).__name__}: {error}".split("\n")[0][:160]}
        finally:
            undo_all(self.model)
            self.model.zero_grad()


def on_a_made_up_gpu(names: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Peaks by variant, for each of `GPU_BATCHES`."""
    from memfit.dryrun.worker import Worker

    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    results = {}
    with Worker(find_gpu("a100-80gb"), preload=("torch", "transformers")) as worker:
        for name in names:
            with worker.session("techniques_training:GPT2") as session:
                results[name] = [
                    session.call("peak", techniques=_for_gpt2(VARIANTS[name]), batch=batch, tokens=tokens)
                    for batch, tokens in GPU_BATCHES
                ]
    return results


def _for_gpt2(techniques: list[Settings]) -> list[Settings]:
    """transformers checks for cuDNN and flash kernels by name: nothing to change but LoRA's targets."""
    return [
        {**s, "targets": ["c_attn", "c_proj", "c_fc"]} if s["technique"] == "lora" else s for s in techniques
    ]


def rows(only: str | None, names: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each variant."""
    gpu = on_a_made_up_gpu(names) if only != "cpu" else {}
    result = []
    for name in names:
        row: dict[str, Any] = {"variant": name, "gpu": gpu.get(name)}
        if only != "gpu":
            runs = [on_the_cpu(VARIANTS[name], seed) for seed in SEEDS]
            row["cpu"] = {
                "losses": [run["loss"] for run in runs],
                "step_seconds": min(run["step_seconds"] for run in runs),
                "peak_bytes": runs[0]["peak_bytes"],
            }
        result.append(row)
        print(f"{name}: {json.dumps(row)}", file=sys.stderr)
    return result


def markdown(found: list[dict[str, Any]]) -> str:
    """The rows as a table."""
    gpu_heads = [f"A100: batch {batch} × {tokens}" for batch, tokens in GPU_BATCHES]
    heads = ["technique", "CPU: live tensors", "CPU: ms a step", "CPU: loss, two seeds", *gpu_heads]
    lines = [heads, ["---"] * len(heads)]
    for row in found:
        cpu = row.get("cpu")
        cells = ["–"] * 3
        if cpu:
            losses = ", ".join(f"{loss:.4f}" for loss in cpu["losses"])
            cells = [format_bytes(cpu["peak_bytes"]), f"{1000 * cpu['step_seconds']:.0f}", losses]
        peaks = row["gpu"] or [{}] * len(GPU_BATCHES)
        cells += [
            format_bytes(p["allocated_bytes"]) if "allocated_bytes" in p else p.get("failure", "–")
            for p in peaks
        ]
        lines.append([row["variant"], *cells])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=("cpu", "gpu"))
    parser.add_argument("--variant", action="append", choices=tuple(VARIANTS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = rows(arguments.only, arguments.variant or list(VARIANTS))
    print(json.dumps(found, indent=2) if arguments.json else markdown(found))


if __name__ == "__main__":
    main()
