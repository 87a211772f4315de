"""Plans of single operators on the meter of CPU operators: what PyTorch's own profiler sees allocated in a
real forward and backward pass, parameters not counted, and floating-point operations run again.

    python benchmarks/planner_cpu.py resnet50 --peaks 766 599 501
    python benchmarks/planner_cpu.py gpt2-scaled --shares 0.5 0.38 --seconds

For each peak (MiB, or a share of the plain one) the choice is solved on the step captured on the CPU, run,
and measured: the peak by the profiler's allocation events, the gradients against the plain ones bit by bit.
Convolutions take memory inside that no operator shows, so where the profiler reads more than the peak, less
is asked for by as much, until its own reading is within. With ``--seconds`` plain and planned steps are timed
in turn, in processor time, and with ``--compiled`` compiled steps run too (``aot_eager``): PyTorch's default
cut, and memfit's for each peak. The models are written in plain torch: fp32, no
dropout, no optimizer, gradients None at the start. Predicted time is that of an A100.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from memfit.capture import capture_step
from memfit.capture.costs import op_seconds
from memfit.capture.graph import StepGraph
from memfit.core.devices import find_gpu
from memfit.core.workload import Workload
from memfit.planning.bound import lower_bound
from memfit.planning.drops import DropProgram, Drops
from memfit.techniques import CompiledPartition, Rematerialization, Technique, undo
from memfit.techniques.blocks import block_names
from memfit.techniques.recomputed_steps import RecomputedStep

MIB = 2**20
ROUNDS = 6
TIGHT_SHARE = 0.985
"""A reading of this part of the peak is not brought nearer."""
PAIRS = 5
"""Steps that are timed, plain and planned in turn."""


class Block(nn.Module):
    """A transformer block with PyTorch's attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.packed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Features to features."""
        batch, tokens, width = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, -1).transpose(1, 2)
            for part in self.packed(self.first(x)).split(width, 2)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(functional.gelu(self.up(self.second(x)), approximate="tanh"))


class GPT(nn.Module):
    """Twelve blocks, tied embedding."""

    def __init__(self, width: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(512, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(12))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Tokens to logits."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _gpt(width: int, heads: int, vocabulary: int, batch: int) -> Workload:
    return Workload(
        name=f"GPT {width}",
        model=lambda: GPT(width, heads, vocabulary),
        batch=lambda: torch.randint(vocabulary, (batch, 512)),
        loss=lambda model, ids: functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()),
    )


def _resnet() -> Workload:
    from torchvision.models import resnet50

    return Workload(
        name="ResNet-50",
        model=resnet50,
        batch=lambda: (torch.randn(16, 3, 224, 224), torch.randint(1000, (16,))),
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
    )


MODELS: dict[str, Callable[[], Workload]] = {
    "gpt2-scaled": lambda: _gpt(384, 6, 4096, 2),
    "gpt2": lambda: _gpt(768, 12, 50304, 4),
    "resnet50": _resnet,
}


def without_optimizer(graph: StepGraph) -> StepGraph:
    """The forward and the backward pass."""
    end = next((op.index for op in graph.ops if op.phase in ("optimizer", "other")), len(graph.ops))
    kept = tuple(
        replace(s, died=-1 if s.died >= end else s.died)
        if s.born < end
        else replace(s, size_bytes=0, born=end - 1, died=end - 1)
        for s in graph.storages
    )
    return replace(graph, ops=graph.ops[:end], storages=kept)


class Measured:
    """One model and batch, run with and without a technique; ``peak_bytes`` is that of the plain step."""

    def __init__(self, workload: Workload) -> None:
        torch.manual_seed(0)
        self.workload = workload
        self.model, self.batch = workload.model().train(), workload.batch()
        self.plain = copy.deepcopy(self.model)
        self.gradients, self.peak_bytes = self._profiled(self.plain)

    def _step(self, model: nn.Module) -> list[Tensor]:
        """Forward and backward; the gradients."""
        self.workload.loss(model, self.batch).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        model.zero_grad(set_to_none=True)
        return gradients

    def _profiled(self, model: nn.Module) -> tuple[list[Tensor], int]:
        """A step's gradients, and the most that it holds over what was there before, by the profiler's
        allocation events."""
        with torch.profiler.profile(profile_memory=True) as profile:
            gradients = self._step(model)
        now = most = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                now += event.nbytes()
                most = max(most, now)
        return gradients, most

    def _seconds(self, model: nn.Module) -> float:
        """Processor time of one step."""
        started = time.process_time()
        self._step(model)
        return time.process_time() - started

    def run(self, technique: Technique, *, timed: bool) -> tuple[int, str, str]:
        """The profiler's reading with a technique, whether gradients stay, and processor time over plain."""
        technique.apply(self.model)
        if isinstance(technique, CompiledPartition):
            self._step(self.model)  # compiles
        gradients, peak = self._profiled(self.model)
        same = all(torch.equal(a, b) for a, b in zip(self.gradients, gradients, strict=True))
        pairs = [self._seconds(self.model) / self._seconds(self.plain) for _ in range(PAIRS if timed else 0)]
        undo(self.model)
        text = f"{100 * (statistics.median(pairs) - 1):+.0f} %" if pairs else "–"
        return peak, "bitwise" if same else "DIFFER", text


def main() -> None:
    """Reads the command line and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("--peaks", nargs="*", type=float, default=[], help="in MiB")
    parser.add_argument("--shares", nargs="*", type=float, default=[], help="of the plain step's peak")
    parser.add_argument("--seconds", action="store_true", help="time steps, plain and planned in turn")
    parser.add_argument("--compiled", action="store_true", help="and compiled steps, cut for each peak")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    workload = MODELS[arguments.model]()
    graph = without_optimizer(capture_step(workload, device="cpu"))
    measured = Measured(workload)
    resting = graph.resting_bytes
    plain = graph.peak_bytes - resting
    real = measured.peak_bytes
    sys.stdout.write(
        f"{arguments.model}: plain peak {plain / MIB:.1f} MiB, by the profiler {real / MIB:.1f} MiB\n"
        "| wanted | asked | profiler | FLOPs more | cannot be below | predicted time | gradients | time |\n"
        "|---|---|---|---|---|---|---|---|\n"
    )
    wanted = [p * MIB for p in arguments.peaks] + [share * plain for share in arguments.shares]
    table = Table(graph, measured)
    for peak in map(int, wanted):
        table.write_planned(peak, timed=arguments.seconds)
        if arguments.compiled:
            table.write_compiled({"peak": round(peak / real, 4)}, timed=arguments.seconds)
    if arguments.compiled:
        table.write_compiled({"budget": 1.0}, timed=arguments.seconds)


class Table:
    """The rows of one model."""

    def __init__(self, graph: StepGraph, measured: Measured) -> None:
        self.graph, self.measured = graph, measured
        self.flops = [float(op.flops) for op in graph.ops]
        self.seconds = [op_seconds(op, find_gpu("a100-80gb")) for op in graph.ops]
        self.program = DropProgram(
            RecomputedStep(graph, (*block_names(measured.model), "")),
            [float(op.flops) + 1e-3 * op.bytes_moved for op in graph.ops],
        )

    def write_planned(self, peak_bytes: int, *, timed: bool) -> None:
        """The choice whose reading is within a peak."""
        found = self._within(peak_bytes)
        if found is None:
            _write([f"{peak_bytes / MIB:.0f} MiB", "none found"])
            return
        asked_bytes, drops, reading, gradients = found
        again = drops.played.run_again
        bound = lower_bound(self.graph, self.flops, peak_bytes + self.graph.resting_bytes)
        ratio = self.measured.run(self._technique(drops), timed=True)[2] if timed else "–"
        _write(
            [
                f"{peak_bytes / MIB:.0f} MiB",
                f"{asked_bytes / MIB:.1f} MiB",
                f"{reading / MIB:.1f} MiB",
                f"{100 * sum(self.flops[op] for op in again) / sum(self.flops):.1f} %",
                f"{100 * bound.cost / sum(self.flops):.1f} %",
                f"{100 * sum(self.seconds[op] for op in again) / sum(self.seconds):.1f} %",
                gradients,
                ratio,
            ]
        )

    def _technique(self, drops: Drops) -> Rematerialization:
        return Rematerialization(blocks=self.program.keeps(drops.kept))

    def _within(self, peak_bytes: int) -> tuple[int, Drops, int, str] | None:
        """What to ask for so that the profiler reads no more than ``peak_bytes``, the choice, the reading,
        and whether gradients stay."""
        asked, too_much = peak_bytes, 0
        best: tuple[int, Drops, int, str] | None = None
        for _ in range(ROUNDS):
            drops = self.program.solve(asked + self.graph.resting_bytes)
            if drops is None:
                break
            reading, gradients, _ = self.measured.run(self._technique(drops), timed=False)
            if reading > peak_bytes:
                too_much = asked
                asked = (best[0] + asked) // 2 if best else asked - (reading - peak_bytes)
                continue
            if best is None or drops.seconds <= best[1].seconds:
                best = (asked, drops, reading, gradients)
            if reading >= TIGHT_SHARE * peak_bytes or not drops.played.run_again:
                break
            asked = (asked + too_much) // 2 if too_much else asked + (peak_bytes - reading)
        return best

    def write_compiled(self, setting: dict[str, float], *, timed: bool) -> None:
        """A compiled step: operators run one by one as in the plain step."""
        technique = CompiledPartition(backend="aot_eager", gpu="a100-80gb", **setting)  # type: ignore[arg-type]
        reading, gradients, ratio = self.measured.run(technique, timed=timed)
        (key, value), *_ = setting.items()
        _write([f"compiled, {key} {value:g}", "", f"{reading / MIB:.1f} MiB", "", "", "", gradients, ratio])


def _write(cells: list[str]) -> None:
    sys.stdout.write("| " + " | ".join(cells) + " |\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
