"""What a dry run found out: one frozen value, and its JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from memfit.core.errors import InputError
from memfit.dryrun.accounts import (
    DeviceAccount,
    GroupShape,
    RankAccount,
    device_from_json,
    group_from_json,
    imbalance,
    rank_from_json,
)
from memfit.dryrun.uncertainty import Uncertain

SCHEMA_VERSION = 1

Engine = Literal["dryrun", "portable"]
Confidence = Literal["exact", "high", "medium", "low"]
Ended = Literal["steps", "end", "exit", "error", "out_of_memory", "interrupted", "timeout"]
ENDINGS: tuple[Ended, ...] = get_args(Ended)


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """The first time that an operation got no memory.

    Args:
        file, line, function: the innermost frame of the user's own code; for an operation of the backward
            pass, the frame that called it. ``None`` and 0 where no such frame is known.
        op: the operation that asked (``"aten.mm"``), or the autograd node that ran.
        module: the module in whose forward (or whose backward) it was, as its name in the model.
        phase: forward, backward, recompute, optimizer …
        asked_bytes: what was asked for.
        free_bytes: what the device had left.
        reserved_bytes: what PyTorch held at that moment.
        caught: whether the script caught the error and went on.
        message: PyTorch's own text.
    """

    file: str | None
    line: int
    function: str
    op: str
    module: str
    phase: str
    asked_bytes: int
    free_bytes: int
    reserved_bytes: int
    caught: bool
    message: str

    @property
    def where(self) -> str:
        """``"train.py:12 in main"``."""
        return f"{self.file}:{self.line} in {self.function}" if self.file else "unknown place"


@dataclass(frozen=True, kw_only=True)
class ValueRead:
    """A place where the script read a value from the device that the dry run does not know.

    Args:
        file, line, function: the innermost frame of the user's own code; of a library, where there is none.
        op: the operation that read.
        answer: what the script was told instead.
        count: how many times.
        kind: what was asked: ``boolean``, ``check`` (of finiteness), ``overflow`` (the gradient scaler's),
            ``number``, ``whole``, ``copy`` (of a tensor to the host), ``size``, ``routing`` (of experts).
        steers: whether the value can change what the script does, by its source.
        other_answer: what it was told in repeated runs instead; None: none was tried.
        peak_change_bytes: what that changed of the requested peak; None: not tried, or the end not reached.
        why: why no other answer was tried, or what came of it.
        site: names the place, for repeating the run.
    """

    file: str
    line: int
    function: str
    op: str
    answer: str
    count: int
    kind: str = ""
    steers: Literal["yes", "perhaps", "no"] = "perhaps"
    other_answer: str | None = None
    peak_change_bytes: int | None = None
    why: str = ""
    site: str = ""


@dataclass(frozen=True, kw_only=True)
class Range:
    """The lowest and the highest of a figure over the runs with other answers."""

    low_bytes: int
    high_bytes: int


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The peaks over all runs: the expected answers, and one place answered otherwise in each repeat.

    Args:
        requested, allocated, reserved: the peaks.
        repeats: runs with another answer.
        seconds: what these took.
        left_out: places that may steer the script, whose other answers were not (all) tried.
        may_run_out: whether memory ran out in one of them.
    """

    requested: Range
    allocated: Range
    reserved: Range
    repeats: int = 0
    seconds: float = 0.0
    left_out: int = 0
    may_run_out: bool = False


@dataclass(frozen=True, kw_only=True)
class ScriptError:
    """The exception that ended the script: its type and text, and the innermost frame of the user's own
    code."""

    type: str
    message: str
    file: str | None = None
    line: int = 0
    function: str = ""


@dataclass(frozen=True, kw_only=True)
class DryRunResult:
    """The outcome of one dry run. Sizes are whole bytes.

    Where a process uses several GPUs, the figures are those of the fullest one, and ``devices`` has each.
    Where several ranks of a job were run, they are those of the fullest rank (or of the first that failed),
    and ``ranks`` has each.

    Args:
        engine: ``"dryrun"`` (PyTorch's real allocator on the made-up GPU) or ``"portable"``.
        gpu: key of the GPU.
        torch: version of PyTorch.
        peak_requested_bytes: most that the operations had asked for at once.
        peak_allocated_bytes: most in blocks that hold it (what ``max_memory_allocated`` says).
        peak_reserved_bytes: most in segments taken from the device (what ``max_memory_reserved`` says).
        context_bytes: what the CUDA context takes before the first tensor.
        device_total_bytes: context + reserved + what libraries took directly; what nvidia-smi would show at
            the peak.
        nvml_total_bytes: what nvidia-smi calls the GPU's total.
        runtime_total_bytes: what ``mem_get_info`` calls the GPU's total.
        oom: the first time that memory ran out, or None.
        event_count: allocator events (allocations, frees, segments) of the whole run.
        value_reads: reads of device values that were answered with a plausible value instead of the true one.
        interval: the peaks where values that are not known were answered otherwise; None: not repeated.
        not_modelled: what the run met that the made-up GPU does not have.
        estimates: sizes that came from a rule and not from the library that a GPU would ask, by name; the
            largest bytes of each. What is "beside the peaks" is no part of them.
        device_memory: the device total as low, expected and high, with the parts that make the difference:
            what libraries and drivers decide, and values that nobody knows.
        confidence: how far the peaks can be trusted, by the rule of `memfit.dryrun.confidence`.
        confidence_reasons: why it is no better.
        wall_seconds: from the start of the process to its end.
        exit_code: the script's own.
        ended: how the run came to its end; ``"steps"``: stopped after the steps that were asked for.
        steps_done: optimizer steps of the busiest optimizer.
        step_peaks: peak requested bytes of each step.
        peak_by_category: who is alive when the requested bytes are at their peak; adds up to it.
        peak_by_phase: the same by the phase in which it was allocated.
        scratch_folder: where the script's files went, if it wrote any.
        error: the exception that ended the script, if one did.
        devices: the account of each GPU of the process.
        rank: which rank of its job this is; None: the job has one.
        world_size: ranks in the job.
        ranks: the account of each rank that was run, where several were.
        groups: the process groups that the rank is in.
    """

    engine: Engine = "dryrun"
    gpu: str
    torch: str
    peak_requested_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    context_bytes: int
    device_total_bytes: int
    nvml_total_bytes: int
    runtime_total_bytes: int
    oom: OutOfMemory | None = None
    event_count: int
    value_reads: tuple[ValueRead, ...] = ()
    interval: Interval | None = None
    not_modelled: tuple[str, ...] = ()
    estimates: Mapping[str, int] = field(default_factory=dict)
    device_memory: Uncertain | None = None
    confidence: Confidence = "medium"
    confidence_reasons: tuple[str, ...] = ()
    wall_seconds: float
    exit_code: int = 0
    ended: Ended = "end"
    steps_done: int = 0
    step_peaks: tuple[int, ...] = ()
    peak_by_category: Mapping[str, int] = field(default_factory=dict)
    peak_by_phase: Mapping[str, int] = field(default_factory=dict)
    scratch_folder: str | None = None
    error: ScriptError | None = None
    devices: tuple[DeviceAccount, ...] = ()
    rank: int | None = None
    world_size: int = 1
    ranks: tuple[RankAccount, ...] = ()
    groups: tuple[GroupShape, ...] = ()

    @property
    def fits(self) -> bool:
        """Nothing ran out of memory, and each device total is within what the GPU has."""
        return (
            self.oom is None
            and self.device_total_bytes <= self.nvml_total_bytes
            and all(rank.fits for rank in self.ranks)
        )

    @property
    def imbalance(self) -> float | None:
        """How much more the fullest rank reserves than the ranks do on average; None for one rank."""
        return imbalance(self.ranks) if self.ranks else None

    @property
    def libraries_bytes(self) -> int:
        """What was taken from the device past PyTorch's allocator, beyond the context."""
        return max(0, self.device_total_bytes - self.context_bytes - self.peak_reserved_bytes)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, with ``schema_version`` first and ``fits`` included."""
        head = {"schema_version": SCHEMA_VERSION, "fits": self.fits, "imbalance": self.imbalance}
        body = asdict(self)
        for device, account in zip(body["devices"], self.devices, strict=True):
            device["fits"] = account.fits
        return {**head, **{key: _plain(value) for key, value in body.items()}}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> DryRunResult:
        """The value that `to_json` wrote.

        Raises:
            InputError: another schema version, or keys that are missing.
        """
        version = value.get("schema_version")
        if version != SCHEMA_VERSION:
            raise InputError(
                f"schema_version of this dry-run result is {version!r}; this memfit reads {SCHEMA_VERSION}"
            )
        known = {name.name for name in fields(cls)}
        kept = {key: part for key, part in value.items() if key in known}
        try:
            return cls(**{**kept, **_nested(kept)})
        except TypeError as error:
            raise InputError(f"not a whole dry-run result: {error}") from error

    @classmethod
    def from_measure(cls, figures: Mapping[str, Any]) -> DryRunResult:
        """The result of a workload's step, from the figures that the part which measures steps gives."""
        ending = "steps" if figures["oom"] is None else "out_of_memory"
        events = figures.get("event_count", 0)
        return cls.from_json(
            {**figures, "schema_version": SCHEMA_VERSION, "ended": ending, "event_count": events}
        )


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value


def _nested(value: Mapping[str, Any]) -> dict[str, Any]:
    """The parts that are values themselves, built from their JSON."""
    oom, error, interval = value.get("oom"), value.get("error"), value.get("interval")
    memory = value.get("device_memory")
    return {
        "device_memory": None if memory is None else Uncertain.from_json(memory),
        "oom": None if oom is None else OutOfMemory(**oom),
        "error": None if error is None else ScriptError(**error),
        "value_reads": tuple(ValueRead(**read) for read in value.get("value_reads", ())),
        "interval": None if interval is None else _interval(interval),
        "not_modelled": tuple(value.get("not_modelled", ())),
        "confidence_reasons": tuple(value.get("confidence_reasons", ())),
        "step_peaks": tuple(value.get("step_peaks", ())),
        "devices": tuple(map(device_from_json, value.get("devices", ()))),
        "ranks": tuple(map(rank_from_json, value.get("ranks", ()))),
        "groups": tuple(map(group_from_json, value.get("groups", ()))),
    }


def _interval(value: Mapping[str, Any]) -> Interval:
    ranges = {name: Range(**value[name]) for name in ("requested", "allocated", "reserved")}
    return Interval(**{**value, **ranges})
