"""`PerformanceAnalyzer`: each operator of a step against a GPU's roofline, and against what was measured.

An operator is *compute-bound* where its FLOPs take longer than its bytes, *bandwidth-bound* where its bytes
do, and *overhead-bound* where launching it takes longer than both. The step is *input-bound* where the
program waits for its data for longer than anything else (that is measured, never predicted). Seconds are
those of `memfit.capture.costs`, whose sources are said there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from memfit.analysis.results import SCHEMA_VERSION, Result, Table, share_text, without_number
from memfit.analysis.subject import Subject, graph_of
from memfit.capture.costs import LAUNCH_SECONDS, op_class, op_seconds, peak_flops
from memfit.capture.graph import Op, StepGraph
from memfit.core.devices import GPU
from memfit.core.errors import UsageError
from memfit.core.units import format_bytes, format_seconds
from memfit.formats.operator_times import OperatorTimes, read_operator_times

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Bound = Literal["compute", "bandwidth", "overhead"]
BOUNDS: tuple[Bound, ...] = ("compute", "bandwidth", "overhead")
MOST_ROWS = 10
INPUT_SHARE = 0.2
"""Waiting for data counts as a limit from this share of a step on."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What operators of one name, class, module or phase cost together.

    Attributes:
        name: theirs.
        calls: how many.
        flops: that the kernels really do (half of causal attention's square is skipped).
        bytes_moved: read and written.
        seconds: predicted, one after another.
        possible_seconds: at the GPU's nominal peaks, without any launch: what no kernel can beat.
        bound: what most of the seconds are spent on.
        measured_seconds: per step, where a profile was given that has them.
    """

    name: str
    calls: int
    flops: int
    bytes_moved: int
    seconds: float
    possible_seconds: float
    bound: Bound
    measured_seconds: float | None = None

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes_moved if self.bytes_moved else 0.0

    @property
    def achieved(self) -> float | None:
        """The share of what is possible that the measured time reaches; None where nothing was measured."""
        return self.possible_seconds / self.measured_seconds if self.measured_seconds else None


@dataclass(frozen=True, kw_only=True)
class PerformanceAnalysis(Result):
    """A step's operators under the roofline. ``print(analysis)`` shows them.

    Attributes:
        name, gpu: of what, and for which GPU.
        op_count, flops, bytes_moved: of the whole step.
        seconds: predicted; the sum over the operators.
        seconds_by_bound: how much of it is compute-, bandwidth- and overhead-bound.
        mfu: model FLOPs utilisation: the time that the FLOPs take at the nominal peak of their types, over
            the step's (measured, or else predicted); recomputation does not count as the model's.
        operators, classes, modules, phases: the costs, the slowest first; the modules of a model's repeated
            layers are one (``h.*.mlp``).
        measured: what torch.profiler saw; None where nothing was given.
        peak_flops_per_second, bandwidth_bytes_per_second: the roof that the figure shows.
        input_share: share of a measured step in which the program waited for data.
    """

    title: ClassVar[str] = "Performance"

    name: str
    gpu: str
    op_count: int
    flops: int
    bytes_moved: int
    seconds: float
    seconds_by_bound: Mapping[str, float]
    mfu: float
    operators: tuple[Cost, ...]
    classes: tuple[Cost, ...]
    modules: tuple[Cost, ...]
    phases: tuple[Cost, ...]
    peak_flops_per_second: float
    bandwidth_bytes_per_second: float
    measured: OperatorTimes | None = None
    input_share: float | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def ridge(self) -> float:
        """FLOPs per byte from which on the GPU's arithmetic is the limit."""
        return self.peak_flops_per_second / self.bandwidth_bytes_per_second

    @property
    def bound(self) -> str:
        """What the step is bound by: ``compute``, ``bandwidth``, ``overhead`` or ``input``."""
        if self.input_share is not None and self.input_share >= max(INPUT_SHARE, self._largest_share()):
            return "input"
        return max(self.seconds_by_bound, key=lambda bound: self.seconds_by_bound[bound])

    def _largest_share(self) -> float:
        """Share of the measured step of the largest predicted part, as far as both are comparable."""
        if self.measured is None or not self.measured.step_seconds:
            return 0.0
        return min(max(self.seconds_by_bound.values()) / self.measured.step_seconds, 1.0)

    def sentences(self) -> Sequence[str]:
        parts = ", ".join(
            f"{share_text(self.seconds_by_bound[bound], self.seconds)} {bound}-bound" for bound in BOUNDS
        )
        said = [
            f"A step takes {format_seconds(self.seconds)} on {self.gpu}, predicted: {parts}.",
            f"{self.flops / 1e12:.3g} TFLOP and {format_bytes(self.bytes_moved)} moved by "
            f"{self.op_count:,} operators.",
            f"Model FLOPs utilisation: {100 * self.mfu:.1f} % "
            f"({'of the measured step' if self.measured is not None else 'predicted'}).",
        ]
        if self.measured is not None:
            took = format_seconds(self.measured.step_seconds)
            said.append(
                f"Measured: {took} a step, {self.measured.step_seconds / max(self.seconds, 1e-12):.2f} times "
                "the prediction."
            )
        if self.bound == "input":
            said.insert(
                0, f"The step is input-bound: {100 * (self.input_share or 0):.0f} % of it waits for data."
            )
        return [*said, *self.notes]

    def tables(self) -> Sequence[Table]:
        return (
            _cost_table("By class of operator", "class", self.classes, self.seconds),
            _cost_table("By phase", "phase", self.phases, self.seconds),
            _cost_table("Slowest modules", "module", self.modules[:MOST_ROWS], self.seconds),
            _cost_table("Slowest operators", "operator", self.operators[:MOST_ROWS], self.seconds),
        )

    def to_json(self) -> dict[str, Any]:
        measured = self.measured
        return {
            "schema_version": SCHEMA_VERSION,
            "name": self.name,
            "gpu": self.gpu,
            "bound": self.bound,
            "op_count": self.op_count,
            "flops": self.flops,
            "bytes_moved": self.bytes_moved,
            "seconds": self.seconds,
            "seconds_by_bound": dict(self.seconds_by_bound),
            "mfu": self.mfu,
            "ridge_flops_per_byte": self.ridge,
            "input_share": self.input_share,
            "measured_step_seconds": None if measured is None else measured.step_seconds,
            **{
                key: [asdict(cost) for cost in getattr(self, key)]
                for key in ("operators", "classes", "modules", "phases")
            },
            "notes": list(self.notes),
        }

    def figure(self) -> Figure | None:
        from memfit.analysis.pictures import roofline_figure

        return roofline_figure(self)


def _cost_table(title: str, label: str, costs: Sequence[Cost], whole: float) -> Table:
    measured = any(cost.measured_seconds is not None for cost in costs)
    heads = (label, ">calls", ">FLOP/byte", ">predicted", ">share", "bound by")
    rows = []
    for cost in costs:
        row = (
            cost.name or "–",
            f"{cost.calls:,}",
            f"{cost.intensity:.1f}",
            format_seconds(cost.seconds),
            share_text(cost.seconds, whole),
            cost.bound,
        )
        rows.append((*row, *_measured_cells(cost)) if measured else row)
    return Table(
        title=title, heads=(*heads, ">measured", ">of possible") if measured else heads, rows=tuple(rows)
    )


def _measured_cells(cost: Cost) -> tuple[str, str]:
    if cost.measured_seconds is None:
        return "", ""
    return format_seconds(cost.measured_seconds), f"{100 * (cost.achieved or 0):.0f} %"


class PerformanceAnalyzer:
    """Says what each operator of a step is bound by on a GPU, and how near to the possible it comes.

    Args:
        source: a `StepGraph`, a `Workload` or its text (its step is captured then), or a file with one.
        gpu: the GPU, or its name.
        measured: a Chrome trace of torch.profiler of the same step on that GPU: path, or `OperatorTimes`.

    Examples:
        >>> from memfit.capture.graph import Op, StepGraph
        >>> product = Op(index=0, name="aten.mm.default", flops=2 * 4096**3, bytes_moved=3 * 4 * 4096**2)
        >>> analysis = PerformanceAnalyzer(StepGraph(ops=(product,), storages=()), gpu="a100").analyze()
        >>> analysis.operators[0].bound
        'compute'
    """

    def __init__(
        self, source: Any, *, gpu: GPU | str | None = None, measured: OperatorTimes | Any = None
    ) -> None:
        subject = Subject.of(source, gpu=gpu)
        if subject.gpu is None:
            raise UsageError("a roofline is that of a GPU: name one with gpu=, like a100-80gb")
        times = measured if isinstance(measured, OperatorTimes | None) else read_operator_times(measured)
        self.subject, self.measured = subject, times if times is not None else subject.times

    def analyze(self) -> PerformanceAnalysis:
        """Cost every operator.

        Raises:
            UsageError: there is neither a captured step nor a workload.
        """
        assert self.subject.gpu is not None
        return analyze_performance(
            graph_of(self.subject), self.subject.gpu, self.measured, name=self.subject.name
        )


def analyze_performance(
    graph: StepGraph, gpu: GPU, measured: OperatorTimes | None = None, *, name: str = ""
) -> PerformanceAnalysis:
    """The performance analysis of a captured step; see `PerformanceAnalyzer`."""
    ops = [op for op in graph.ops if op_seconds(op, gpu)]
    seconds = sum(op_seconds(op, gpu) for op in ops)
    by_bound: dict[str, float] = dict.fromkeys(BOUNDS, 0.0)
    for op in ops:
        by_bound[bound_of(op, gpu)] += op_seconds(op, gpu)
    model_seconds = sum(
        op.flops * op.work / peak_flops(op.dtype, gpu) for op in ops if op.phase != "recompute"
    )
    widest = max(ops, key=lambda op: op.flops * op.work, default=None)
    taken = measured.step_seconds if measured is not None and measured.step_seconds else seconds

    def grouped(key: Callable[[Op], str], times: Mapping[str, float] | None = None) -> tuple[Cost, ...]:
        return _grouped(ops, gpu, key, times or {})

    own = _measured_by_operator(measured)
    return PerformanceAnalysis(
        name=name or graph.name,
        gpu=gpu.name,
        op_count=len(ops),
        flops=sum(round(op.flops * op.work) for op in ops),
        bytes_moved=sum(op.bytes_moved for op in ops),
        seconds=seconds,
        seconds_by_bound=by_bound,
        mfu=model_seconds / taken if taken else 0.0,
        operators=grouped(_plain_name, own),
        classes=grouped(lambda op: op_class(op.name).name, _measured_by_class(own)),
        modules=grouped(lambda op: without_number(op.module)),
        phases=grouped(lambda op: op.phase),
        peak_flops_per_second=peak_flops("float32" if widest is None else widest.dtype, gpu),
        bandwidth_bytes_per_second=gpu.bandwidth_bytes_per_second,
        measured=measured,
        input_share=_input_share(measured),
    )


def bound_of(op: Op, gpu: GPU) -> Bound:
    """What an operator is bound by on a GPU, by the same shares of its peaks as the prediction."""
    cls = op_class(op.name)
    compute = op.flops * op.work / (peak_flops(op.dtype, gpu) * cls.compute_share)
    memory = op.bytes_moved / (gpu.bandwidth_bytes_per_second * cls.bandwidth_share)
    if max(compute, memory) < LAUNCH_SECONDS:
        return "overhead"
    return "compute" if compute >= memory else "bandwidth"


def _plain_name(op: Op) -> str:
    """``aten.mm.default`` as torch.profiler writes it: ``aten::mm``."""
    return "::".join(op.name.split(".")[:2])


def _grouped(
    ops: Iterable[Op], gpu: GPU, key: Callable[[Op], str], times: Mapping[str, float]
) -> tuple[Cost, ...]:
    groups: dict[str, list[Op]] = defaultdict(list)
    for op in ops:
        groups[key(op)].append(op)
    costs = [_cost(name, members, gpu, times.get(name)) for name, members in groups.items()]
    return tuple(sorted(costs, key=lambda cost: (-cost.seconds, cost.name)))


def _cost(name: str, ops: Sequence[Op], gpu: GPU, measured: float | None) -> Cost:
    by_bound: dict[Bound, float] = dict.fromkeys(BOUNDS, 0.0)
    possible = 0.0
    for op in ops:
        by_bound[bound_of(op, gpu)] += op_seconds(op, gpu)
        possible += max(
            op.flops * op.work / peak_flops(op.dtype, gpu), op.bytes_moved / gpu.bandwidth_bytes_per_second
        )
    return Cost(
        name=name,
        calls=len(ops),
        flops=sum(round(op.flops * op.work) for op in ops),
        bytes_moved=sum(op.bytes_moved for op in ops),
        seconds=sum(by_bound.values()),
        possible_seconds=possible,
        bound=max(by_bound, key=lambda bound: by_bound[bound]),
        measured_seconds=measured,
    )


def _measured_by_operator(measured: OperatorTimes | None) -> dict[str, float]:
    """Seconds of a step by operator: of the device's kernels, or of the host in a profile of the CPU."""
    if measured is None:
        return {}
    return {
        row.name: (row.device_seconds if measured.on_device else row.host_seconds) / measured.step_count
        for row in measured.operators
        if (row.device_seconds if measured.on_device else row.host_seconds)
    }


def _measured_by_class(own: Mapping[str, float]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for name, seconds in own.items():
        if name.startswith(("aten::", "_")):
            sums[op_class(name.replace("::", ".") + ".default").name] += seconds
    return dict(sums)


def _input_share(measured: OperatorTimes | None) -> float | None:
    if measured is None or not measured.wall_seconds:
        return None
    return min(measured.loader_seconds / measured.wall_seconds, 1.0)
