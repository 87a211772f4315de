"""The step graph: every operator of one training step, and the storages that it makes, reads and gives back.

Pure values, no torch: a graph is captured in one process (see `memfit.capture.tracker`) and read in another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.core.errors import InputError
from memfit.core.trace import Trace, TraceBuilder

SCHEMA_VERSION = 1
PHASES = ("forward", "recompute", "backward", "optimizer", "other")


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One operator call of the step, in the order of execution.

    Attributes:
        index: position in `StepGraph.ops`.
        name: the dispatcher's name with overload, ``"aten.mm.default"``.
        module: name of the module whose forward ran it, or, in the backward pass, of the module whose
            forward it is the derivative of; ``""`` is the root and code outside of every module.
        phase: one of `PHASES`.
        inputs: ids of the storages it reads, in argument order, without repeats.
        outputs: ids of the storages of its results (a view's result is a storage that it reads).
        mutates: ids of the storages it writes in place.
        is_view: makes no storage and moves no bytes.
        random: draws from the device's generator.
        flops: floating-point operations of matrix products, convolutions and attention; 0 for everything
            else. Counted as `torch.utils.flop_counter` does: causal attention counts the whole square.
        work: the share of ``flops`` that the kernel really does: 0.5 for causal attention, which skips half
            of the square.
        bytes_moved: bytes read and written once each; 0 for views.
        dtype: the type that it computes in: that of its first floating-point operand, or ``"tf32"``.
        temporary_bytes: taken beside its results and given back before it ends, where that was measured (see
            `memfit.capture.temporaries`).
    """

    index: int
    name: str
    module: str = ""
    phase: str = "forward"
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    mutates: tuple[int, ...] = ()
    is_view: bool = False
    random: bool = False
    flops: int = 0
    work: float = 1.0
    bytes_moved: int = 0
    dtype: str = "float32"
    temporary_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """Memory that operators share: tensors and their views.

    Attributes:
        id: position in `StepGraph.storages`.
        size_bytes: what was asked for, before any rounding.
        category: one of `memfit.core.trace.CATEGORIES`.
        born: index of the operator that made it; -1 when it was there before the step.
        died: index of the last operator that ran while it was alive; -1 when it outlives the step.
        saved: made in a forward pass and still alive when that pass ended, so kept for the backward pass.
        name: of the parameter or buffer that it holds, or that its gradient or state belongs to; else ``""``.
    """

    id: int
    size_bytes: int
    category: str
    born: int
    died: int = -1
    saved: bool = False
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class StepGraph:
    """One training step: operators in order, and the life of each storage on the step's device.

    Examples:
        >>> graph = StepGraph(
        ...     ops=(Op(index=0, name="aten.relu.default", inputs=(0,), outputs=(1,)),),
        ...     storages=(
        ...         Storage(id=0, size_bytes=400, category="input", born=-1),
        ...         Storage(id=1, size_bytes=400, category="activation", born=0, died=0),
        ...     ),
        ... )
        >>> graph.peak_bytes, graph.resting_bytes
        (800, 400)
    """

    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    name: str = ""
    device: str = ""
    modules: Mapping[str, str] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def live_bytes(self) -> npt.NDArray[np.int64]:
        """Bytes alive while each operator runs, its results and temporaries included, its last readings still
        held."""
        change = np.zeros(len(self.ops) + 1, np.int64)
        for storage in self.storages:
            change[max(storage.born, 0)] += storage.size_bytes
            if storage.died >= 0:
                change[storage.died + 1] -= storage.size_bytes
        temporary = np.array([op.temporary_bytes for op in self.ops], np.int64)
        curve: npt.NDArray[np.int64] = np.cumsum(change)[: len(self.ops)] + temporary
        return curve

    def live_bytes_curve(self) -> npt.NDArray[np.int64]:
        """`live_bytes`: one number for each operator."""
        return self.live_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at once, as requested: no rounding, no library workspaces, no context."""
        return int(self.live_bytes.max()) if self.ops else self.resting_bytes

    @property
    def peak_index(self) -> int:
        """Index of the operator at which `peak_bytes` is first reached; -1 for a graph without operators."""
        return int(self.live_bytes.argmax()) if self.ops else -1

    @property
    def resting_bytes(self) -> int:
        """Bytes there before the step: parameters, buffers, optimizer state, inputs."""
        return sum(storage.size_bytes for storage in self.storages if storage.born < 0)

    @property
    def beside_bytes(self) -> int:
        """Bytes that are allocated before the step and after it and that no operator shows (workspaces of
        cuBLAS), where that was measured; not in `live_bytes`."""
        return int(self.meta.get("beside_bytes", 0))

    @property
    def saved_bytes(self) -> int:
        """Bytes that forward passes leave for their backward passes (all micro-batches together)."""
        return sum(storage.size_bytes for storage in self.storages if storage.saved)

    @property
    def flops(self) -> int:
        """Floating-point operations of the whole step, recomputation included."""
        return sum(op.flops for op in self.ops)

    @property
    def recompute_flops(self) -> int:
        """Floating-point operations spent on running forward parts again."""
        return sum(op.flops for op in self.ops if op.phase == "recompute")

    def live_at(self, index: int) -> tuple[Storage, ...]:
        """Storages alive while operator ``index`` runs."""
        return tuple(s for s in self.storages if s.born <= index and (s.died < 0 or s.died >= index))

    def by_category(self, index: int | None = None) -> dict[str, int]:
        """Bytes of each category alive while operator ``index`` (default: the peak) runs, largest first."""
        total: dict[str, int] = defaultdict(int)
        at = self.peak_index if index is None else index
        for storage in self.live_at(at):
            total[storage.category] += storage.size_bytes
        if 0 <= at < len(self.ops) and self.ops[at].temporary_bytes:
            total["temporary"] += self.ops[at].temporary_bytes
        return dict(sorted(total.items(), key=lambda item: -item[1]))

    def phase_peaks(self) -> dict[str, int]:
        """Most bytes alive in each phase."""
        peaks: dict[str, int] = {}
        for op, live in zip(self.ops, self.live_bytes.tolist(), strict=True):
            peaks[op.phase] = max(peaks.get(op.phase, 0), live)
        return peaks

    def by_module(self, depth: int | None = None) -> dict[str, ModuleTotal]:
        """Totals for each module, in order of first use.

        Args:
            depth: parts of the module's name to keep; ``None`` keeps the whole name (each operator counts
                once either way).
        """
        totals: dict[str, ModuleTotal] = {}
        for op in self.ops:
            name = _shortened(op.module, depth)
            totals[name] = totals.get(name, ModuleTotal()) + ModuleTotal(
                ops=1,
                flops=op.flops,
                bytes_moved=op.bytes_moved,
                forward_flops=op.flops if op.phase == "forward" else 0,
                recompute_flops=op.flops if op.phase == "recompute" else 0,
            )
        for storage in self.storages:
            if storage.saved:
                name = _shortened(self.ops[storage.born].module, depth)
                totals[name] += ModuleTotal(saved_bytes=storage.size_bytes)
        return totals

    def under(self, module: str, phases: Iterable[str] = PHASES) -> tuple[Op, ...]:
        """Operators of ``module`` and everything inside it, of the given phases."""
        wanted, prefix = set(phases), f"{module}." if module else ""
        return tuple(
            op
            for op in self.ops
            if op.phase in wanted and (op.module == module or op.module.startswith(prefix))
        )

    @property
    def event_count(self) -> int:
        """Allocations and frees, those before the step included."""
        temporaries = sum(op.temporary_bytes > 0 for op in self.ops)
        return len(self.storages) + sum(storage.died >= 0 for storage in self.storages) + 2 * temporaries

    def to_trace(self) -> Trace:
        """The same lives as a trace; what was there before the step is allocated first, in phase ``init``.
        What an operator takes inside comes and goes after its results."""
        builder = TraceBuilder(
            meta={"name": self.name, "device": self.device, "source": "capture", **self.meta}
        )
        died: dict[int, list[int]] = defaultdict(list)
        born: dict[int, list[int]] = defaultdict(list)
        for storage in self.storages:
            born[storage.born].append(storage.id)
            if storage.died >= 0:
                died[storage.died].append(storage.id)
        for op in (_BEFORE, *self.ops):
            place = {"phase": op.phase, "module": op.module, "op": op.name}
            for number in born[op.index]:
                storage = self.storages[number]
                module = storage.name.rpartition(".")[0] if op is _BEFORE else op.module
                builder.alloc(
                    storage.size_bytes, block=number, category=storage.category, **place | {"module": module}
                )
            if op.temporary_bytes:
                inside = len(self.storages) + op.index
                builder.alloc(op.temporary_bytes, block=inside, category="temporary", **place)
                builder.free(inside, category="temporary", **place)
            for number in died[op.index]:
                builder.free(number, category=self.storages[number].category, **place)
        return builder.build()

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dictionary, columns rather than rows: `from_json` reads it back equal."""
        return {
            "schema_version": SCHEMA_VERSION,
            "name": self.name,
            "device": self.device,
            "modules": dict(self.modules),
            "meta": dict(self.meta),
            "ops": _columns(Op, self.ops, skip="index"),
            "storages": _columns(Storage, self.storages, skip="id"),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StepGraph:
        """Reads what `to_json` wrote. Raises InputError on another schema or broken columns."""
        if data.get("schema_version") != SCHEMA_VERSION:
            raise InputError(
                f"step graph with schema_version {data.get('schema_version')!r}; this memfit reads "
                f"{SCHEMA_VERSION}"
            )
        try:
            return cls(
                ops=tuple(Op(index=i, **row) for i, row in enumerate(_rows(data["ops"]))),
                storages=tuple(Storage(id=i, **row) for i, row in enumerate(_rows(data["storages"]))),
                name=data["name"],
                device=data["device"],
                modules=data["modules"],
                meta=data["meta"],
            )
        except (KeyError, TypeError, ValueError) as problem:
            raise InputError(f"step graph is broken: {type(problem).__name__}: {problem}") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleTotal:
    """What one module costs in a step; ``saved_bytes`` is what it leaves for the backward pass."""

    ops: int = 0
    flops: int = 0
    bytes_moved: int = 0
    saved_bytes: int = 0
    forward_flops: int = 0
    recompute_flops: int = 0

    def __add__(self, other: ModuleTotal) -> ModuleTotal:
        mine, its = asdict(self), asdict(other)
        return ModuleTotal(**{key: mine[key] + its[key] for key in mine})


# Stands for everything that happened before the step.
_BEFORE = Op(index=-1, name="", phase="init")


def _shortened(module: str, depth: int | None) -> str:
    return module if depth is None else ".".join(module.split(".")[:depth])


def _columns(kind: type, rows: Sequence[Any], *, skip: str) -> dict[str, list[Any]]:
    return {name: [getattr(row, name) for row in rows] for name in kind.__slots__ if name != skip}  # type: ignore[attr-defined]


def _rows(columns: Mapping[str, Sequence[Any]]) -> Iterable[dict[str, Any]]:
    lengths = {len(column) for column in columns.values()}
    if len(lengths) != 1:
        raise ValueError(f"columns of different lengths {sorted(lengths)}")
    for values in zip(*columns.values(), strict=True):
        yield {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in zip(columns, values, strict=True)
        }
