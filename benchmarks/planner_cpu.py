"""Plans of single operators on the meter of CPU operators: what PyTorch's own profiler sees allocated in a
real forward and backward pass, parameters not counted, and floating-point operations run again.

    python benchmarks/planner_cpu.py resnet50 --peaks 766 599 501
    python benchmarks/planner_cpu.py gpt2-scaled --shares 0.5 0.38 --seconds

For each peak (MiB, or a share of the plain one) the choice is solved on the step captured on the CPU, run,
and measured: the peak by the profiler's allocation events, the gradients against the plain ones bit by bit.
With ``--seconds`` plain and planned steps are timed in turn, in processor time. The models are written in
plain torch: fp32, no dropout, no optimizer, gradients None at the start.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from memfit.capture import capture_step
from memfit.capture.graph import StepGraph
from memfit.core.workload import Workload
from memfit.planning.bound import lower_bound
from memfit.planning.drops import DropProgram
from memfit.techniques import Rematerialization, undo
from memfit.techniques.blocks import block_names
from memfit.techniques.recomputed_steps import RecomputedStep

MIB = 2**20


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
    """One model and batch, run with and without a choice."""

    def __init__(self, workload: Workload) -> None:
        torch.manual_seed(0)
        self.workload = workload
        self.model, self.batch = workload.model().train(), workload.batch()

    def step(self) -> list[Tensor]:
        """Forward and backward; the gradients."""
        self.workload.loss(self.model, self.batch).backward()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.model.zero_grad(set_to_none=True)
        return gradients

    def peak_bytes(self) -> int:
        """The most that a step holds over what was there before, by the profiler's allocation events."""
        with torch.profiler.profile(profile_memory=True) as profile:
            self.step()
        now = most = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                now += event.nbytes()
                most = max(most, now)
        return most

    def seconds(self) -> float:
        """Processor time of one step."""
        started = time.process_time()
        self.step()
        return time.process_time() - started


def main() -> None:
    """Reads the command line and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("--peaks", nargs="*", type=float, default=[], help="in MiB")
    parser.add_argument("--shares", nargs="*", type=float, default=[], help="of the plain step's peak")
    parser.add_argument("--seconds", action="store_true", help="time steps, plain and planned in turn")
    parser.add_argument("--solve-only", action="store_true", help="no real step: figures of the step played")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    workload = MODELS[arguments.model]()
    graph = without_optimizer(capture_step(workload, device="cpu"))
    measured = Measured(workload)
    flops = [float(op.flops) for op in graph.ops]
    program = DropProgram(
        RecomputedStep(graph, (*block_names(measured.model), "")),
        [float(op.flops) + 1e-3 * op.bytes_moved for op in graph.ops],
    )
    resting = graph.resting_bytes
    plain = graph.peak_bytes - resting
    real = "" if arguments.solve_only else f", by the profiler {measured.peak_bytes() / MIB:.1f} MiB"
    sys.stdout.write(f"{arguments.model}: plain peak {plain / MIB:.1f} MiB{real}\n")
    sys.stdout.write("| asked | played | profiler | FLOPs more | cannot be below | gradients | time |\n")
    sys.stdout.write("|---|---|---|---|---|---|---|\n")
    wanted = [p * MIB for p in arguments.peaks] + [share * plain for share in arguments.shares]
    for peak in wanted:
        found = program.solve(int(peak) + resting)
        if found is None:
            sys.stdout.write(f"| {peak / MIB:.0f} MiB | none | | | | | |\n")
            continue
        bound = lower_bound(graph, flops, found.peak_bytes)
        more = 100 * sum(flops[op] for op in found.played.run_again) / sum(flops)
        cells = [f"{peak / MIB:.0f} MiB", f"{(found.peak_bytes - resting) / MIB:.1f} MiB"]
        cells += ["–"] if arguments.solve_only else [""]
        cells += [f"{more:.1f} %", f"{100 * bound.cost / sum(flops):.1f} %", "–", "–"]
        if not arguments.solve_only:
            cells[2], cells[5], cells[6] = _run(measured, program.keeps(found.kept), arguments.seconds)
        sys.stdout.write("| " + " | ".join(cells) + " |\n")
        sys.stdout.flush()


def _run(measured: Measured, keeps: dict[str, tuple[str, ...]], timed: bool) -> tuple[str, str, str]:
    technique = Rematerialization(blocks=keeps)
    plain = measured.step()
    technique.apply(measured.model)
    planned = measured.step()
    same = all(torch.equal(a, b) for a, b in zip(plain, planned, strict=True))
    peak = measured.peak_bytes()
    undo(measured.model)
    ratio = "–"
    if timed:
        pairs = []
        for _ in range(5):
            first = measured.seconds()
            technique.apply(measured.model)
            pairs.append(measured.seconds() / first)
            undo(measured.model)
        ratio = f"{100 * (statistics.median(pairs) - 1):+.0f} %"
    return f"{peak / MIB:.1f} MiB", "bitwise" if same else "DIFFER", ratio


if __name__ == "__main__":
    main()
