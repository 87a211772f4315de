"""An oracle without torch: a chain of blocks whose step is written down operator by operator, with plans
applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memfit.capture.graph import Op, StepGraph, Storage
from memfit.core.devices import GPU, find_gpu
from memfit.planning.bench import Final, ModelFacts, Peaks
from memfit.planning.figures import StepFigures

MIB = 2**20
GPU_KEY = "rtx3060-12gb"


def gpu() -> GPU:
    return find_gpu(GPU_KEY)


@dataclass
class Writer:
    """Writes a step's operators down; a storage dies where it is last used, or where it is dropped."""

    ops: list[Op] = field(default_factory=list)
    sizes: list[tuple[int, str, int]] = field(default_factory=list)
    saved: set[int] = field(default_factory=set)
    last: dict[int, int] = field(default_factory=dict)
    stays: set[int] = field(default_factory=set)

    def there(self, size_bytes: int, category: str) -> int:
        self.sizes.append((size_bytes, category, -1))
        self.stays.add(len(self.sizes) - 1)
        return len(self.sizes) - 1

    def op(
        self, name: str, module: str, phase: str, reads: Sequence[int], size_bytes: int, flops: int = 0
    ) -> int:
        index = len(self.ops)
        self.sizes.append((size_bytes, "activation", index))
        made = len(self.sizes) - 1
        for storage in (*reads, made):
            self.last[storage] = index
        moved = size_bytes + sum(self.sizes[s][0] for s in reads)
        self.ops.append(
            Op(
                index=index,
                name=name,
                module=module,
                phase=phase,
                inputs=tuple(dict.fromkeys(reads)),
                outputs=(made,),
                flops=flops,
                bytes_moved=moved,
            )
        )
        return made

    def graph(self) -> StepGraph:
        storages = tuple(
            Storage(
                id=n,
                size_bytes=size,
                category=category,
                born=born,
                died=-1 if n in self.stays else self.last.get(n, born),
                saved=n in self.saved,
            )
            for n, (size, category, born) in enumerate(self.sizes)
        )
        return StepGraph(ops=tuple(self.ops), storages=storages, name="imitation", device="none")


def step(
    blocks: int,
    plan: Mapping[str, Sequence[str]],
    *,
    loss_bytes: int = 24 * MIB,
    offloaded: Sequence[str] = (),
) -> StepGraph:
    """One step of ``blocks`` blocks (linear, gelu, linear), those in ``plan`` recomputed but for what they
    save, those ``offloaded`` copied back for their backward pass."""
    w = Writer()
    weight = w.there(8 * MIB, "parameter")
    x = w.there(2 * MIB, "input")
    kept: list[tuple[int, int | None, int | None]] = []
    for i in range(blocks):
        name = f"h.{i}"
        a = w.op("aten.mm.default", f"{name}.up", "forward", [x, weight], 8 * MIB, flops=2 * 10**11)
        g = w.op("aten.gelu.default", f"{name}.act", "forward", [a], 8 * MIB)
        y = w.op("aten.mm.default", f"{name}.down", "forward", [g, weight], 2 * MIB, flops=10**11)
        w.saved.add(y)
        saves = plan.get(name)
        if name in offloaded:
            pass
        elif saves is None:
            w.saved |= {a, g}
        elif "linear:0" in saves:
            w.saved.add(a)
        kept.append((x, a if a in w.saved else None, g if g in w.saved else None))
        x = y
    loss = w.op("aten.log_softmax.default", "head", "forward", [x], loss_bytes)
    w.saved.add(loss)
    d = w.op("aten.log_softmax_backward.default", "head", "backward", [loss], loss_bytes)
    d = w.op("aten.mm.default", "head", "backward", [d, weight], 2 * MIB)
    for i in reversed(range(blocks)):
        name = f"h.{i}"
        x, a, g = kept[i]
        if name in offloaded:
            a = w.op("aten._to_copy.default", f"{name}.up", "backward", [], 8 * MIB)
            g = w.op("aten._to_copy.default", f"{name}.act", "backward", [], 8 * MIB)
        if a is None:
            a = w.op("aten.mm.default", f"{name}.up", "recompute", [x, weight], 8 * MIB, flops=2 * 10**11)
        if g is None:
            g = w.op("aten.gelu.default", f"{name}.act", "recompute", [a], 8 * MIB)
        d = w.op("aten.mm.default", f"{name}.down", "backward", [d, g], 8 * MIB, flops=2 * 10**11)
        d = w.op("aten.gelu_backward.default", f"{name}.act", "backward", [d, a], 8 * MIB)
        d = w.op("aten.mm.default", f"{name}.up", "backward", [d, x, weight], 2 * MIB, flops=4 * 10**11)
    gradient = w.op("aten.mm.default", "", "backward", [d], 8 * MIB)
    w.op("aten._fused_adamw_.default", "", "optimizer", [gradient, weight], 0)
    return w.graph()


@dataclass
class Imitation:
    """An oracle over `step`. ``surprise`` is added to the reserved bytes of every plan that a fresh process
    runs; ``offloads``: blocks can be offloaded."""

    blocks: int = 6
    surprise: int = 0
    offloads: bool = False
    engine: str = "imitation"
    engine_reason: str | None = None
    asked: list[Any] = field(default_factory=list)

    def facts(self) -> ModelFacts:
        return ModelFacts(blocks=tuple(f"h.{i}" for i in range(self.blocks)), samples=1)

    def graph(self, techniques: Sequence[Mapping[str, Any]]) -> StepGraph:
        plan: dict[str, Sequence[str]] = {}
        offloaded: Sequence[str] = ()
        for settings in techniques:
            if settings["technique"] == "activation_offload":
                offloaded = settings["blocks"]
            else:
                plan |= settings.get("blocks", {})
        return step(self.blocks, plan, offloaded=offloaded)

    def evaluate(self, techniques: Sequence[Mapping[str, Any]]) -> Peaks:
        self.asked.append(techniques)
        if not self.offloads and any(s["technique"] == "activation_offload" for s in techniques):
            return Peaks(
                requested_bytes=0, allocated_bytes=0, reserved_bytes=0, failure="nothing is offloaded"
            )
        peak = self.graph(techniques).peak_bytes
        return Peaks(requested_bytes=peak, allocated_bytes=peak, reserved_bytes=reserved(peak))

    def final(self, techniques: Sequence[Mapping[str, Any]], *, trace: str | None = None) -> Final:
        from memfit.capture.costs import op_seconds

        graph = self.graph(techniques)
        extra = self.surprise if techniques else 0
        return Final(
            figures=StepFigures(
                peak_requested_bytes=graph.peak_bytes,
                peak_allocated_bytes=graph.peak_bytes,
                peak_reserved_bytes=reserved(graph.peak_bytes) + extra,
                step_seconds=sum(op_seconds(op, gpu()) for op in graph.ops),
                flops=graph.flops,
            )
        )


def reserved(peak_bytes: int) -> int:
    """A little more than what is live, in whole segments of 2 MiB."""
    return -(-int(peak_bytes * 1.04) // (2 * MIB)) * 2 * MIB
