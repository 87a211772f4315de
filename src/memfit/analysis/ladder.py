"""`ladder`: techniques one after another on the user's own workload, and what each does to memory, time and
quality.

Peaks come from the dry run unless a real device is asked for; seconds are measured where the device is there
and predicted where it is not; quality is real training on the CPU, beside the plain model, over several
seeds. A technique that cannot join the chain is a rung with its reason, and the chain goes on without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from memfit.analysis.advice import settings_text
from memfit.analysis.capturing import PLAIN_GPU, opened_oracle, reference_of
from memfit.analysis.ladder_order import (
    Asked,
    default_techniques,
    in_order,
    in_order_of_application,
    read_techniques,
)
from memfit.analysis.ladder_times import no_time_term
from memfit.analysis.ladder_values import PLAIN, Ladder, Quality, Rung
from memfit.capture.costs import step_seconds
from memfit.core.devices import GPU, find_gpu
from memfit.core.errors import CannotRunHere, MemfitError, UsageError
from memfit.core.exactness import Exactness, checked_grade
from memfit.planning.figures import Settings

if TYPE_CHECKING:
    from memfit.core.workload import Workload
    from memfit.planning.oracle import Engine, StepOracle

Device = Literal["dryrun", "cpu", "cuda"]
DEVICES: tuple[Device, ...] = ("dryrun", "cpu", "cuda")
STEPS, SEEDS = 20, 3
MOST_FLOPS = 2e13
"""Real steps of a whole ladder may take as much: about ten minutes on one core."""
BYTES_A_PARAMETER = 16
"""Weights, gradients and Adam's two moments in fp32."""
CUT_SAMPLES = 2

Progress = Callable[[str, int, int], None]


def ladder(
    workload: Workload | str,
    *,
    techniques: str | Sequence[Asked] | None = None,
    device: Device = "dryrun",
    gpu: GPU | str | None = None,
    allow: Exactness = "approximate",
    engine: Engine = "auto",
    steps: int = STEPS,
    seeds: int = SEEDS,
    quality: bool = True,
    progress: Progress | None = None,
    seed: int = 0,
) -> Ladder:
    """Applies techniques one after another and says what each does to peak memory, step time and quality.

    Args:
        workload: a `Workload`, or its text: ``"hf:gpt2,batch=8,seq=1024"``, ``"train.py:workload"``.
        techniques: what to climb, in this order: texts (``"micro_batching:micro_batches=4"``), settings or
            technique objects. Default: every technique that ``allow`` allows, the most exact first.
        device: ``"dryrun"``: peaks of the made-up GPU, predicted seconds; ``"cpu"`` and ``"cuda"``: both
            measured on that device.
        gpu: the GPU of a dry run, or its name; default: an A100 80 GB.
        allow: how far results may move, for the default list of techniques.
        engine: of the dry run: ``"dryrun"``, ``"portable"`` or ``"auto"``.
        steps: real optimizer steps for each loss.
        seeds: how many seeds each loss is taken with.
        quality: whether to train for real at all.
        progress: called with ``(what, done, total)`` as it goes on.
        seed: the first seed.

    Raises:
        UsageError: an unknown technique, setting, device or GPU.
        WorkloadFailed: the plain step fails.
        CannotRunHere: the device is not there.
    """
    if device not in DEVICES:
        raise UsageError(f"device {device!r}: use one of {', '.join(DEVICES)}")
    checked_grade(allow)
    for name, value in (("steps", steps), ("seeds", seeds)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{name} must be a whole number of at least 1, not {value!r}")
    begun = time.perf_counter()
    target = find_gpu(gpu or PLAIN_GPU) if gpu is None or isinstance(gpu, str) else gpu
    asked = None if techniques is None else _read(techniques, workload)
    with ExitStack() as stack:
        real = stack.enter_context(opened_oracle(workload, target, "portable"))
        oracle = None if device != "dryrun" else real
        if device == "dryrun" and engine != "portable":
            oracle = stack.enter_context(opened_oracle(workload, target, engine))
        climb = _Climb(
            real=real,
            oracle=oracle,
            device=device,
            target=target,
            steps=steps,
            seeds=seeds,
            wants_quality=quality,
            show=progress or _silent,
        )
        result = climb.run(asked, allow, _name(workload))
    return replace(result, wall_seconds=time.perf_counter() - begun)


def _read(techniques: str | Sequence[Asked], workload: Workload | str) -> Sequence[Settings]:
    try:
        return read_techniques(techniques)
    except UsageError:
        if not isinstance(workload, str):
            raise
    from memfit.capture.workloads import load_workload

    load_workload(workload)  # its file may have techniques of its own
    return read_techniques(techniques)


def _silent(what: str, done: int, total: int) -> None:
    """Shows nothing."""


def _name(workload: Workload | str) -> str:
    return workload if isinstance(workload, str) else reference_of(workload)[1] or workload.name


@dataclass(frozen=True, kw_only=True)
class _Form:
    """In which form the workload runs for real; ``reason`` says why not at all."""

    size: str = "full"
    samples: int | None = None
    text: str = "full size"
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {"size": self.size, "samples": self.samples}


@dataclass(frozen=True, kw_only=True)
class _Climb:
    """One ladder being climbed: where steps run, and how."""

    real: StepOracle
    oracle: StepOracle | None
    device: Device
    target: GPU
    steps: int
    seeds: int
    wants_quality: bool
    show: Progress

    def run(self, asked: Sequence[Settings] | None, allow: Exactness, name: str) -> Ladder:
        """All rungs, from the plain step up."""
        if self.device == "cuda" and not self.real.call("memfit.analysis.ladder_run:has_gpu"):
            raise CannotRunHere("--device cuda: PyTorch finds no GPU here; --device dryrun needs none")
        graph = self._where.graph(())
        candidates = list(default_techniques() if asked is None else asked)
        grades = self._where.call(
            "memfit.analysis.trials:grades", candidates=candidates, graph=graph.to_json()
        )
        exactness = {repr(s): grade["exactness"] for s, grade in zip(candidates, grades, strict=True)}
        notes: list[str] = []
        if asked is None:
            candidates, notes = in_order(candidates, grades, allow)
        form = self._form(graph.flops, len(candidates) + 1)
        self.show(PLAIN, 0, len(candidates) + 1)
        plain = self._rung(PLAIN, (), form, None)
        if plain.skipped is not None:  # the plain step itself: the user's to mend
            raise UsageError(plain.skipped)
        rungs, unseen = [plain], []
        chain: list[Settings] = []
        for number, settings in enumerate(candidates):
            self.show(settings_text(settings), number + 1, len(candidates) + 1)
            tried = in_order_of_application((*chain, settings))
            rung = self._rung(str(settings["technique"]), tried, form, plain)
            rung = replace(rung, settings=settings, exactness=exactness[repr(settings)])
            if rung.skipped is None:
                chain.append(settings)
                unseen += [f"{rung.name}: {reason}"] if (reason := no_time_term(settings)) else []
                rung = self._without_unseen(self._with_alone(rung), unseen)
            rungs.append(rung)
        return Ladder(
            workload=name,
            device=self.device,
            device_name=self._device_name(form),
            engine=self._where.engine if self.device == "dryrun" else self.device,
            engine_reason=self._where.engine_reason if self.device == "dryrun" else None,
            rungs=tuple(rungs),
            notes=(*notes, *self._form_notes(form)),
        )

    @property
    def _where(self) -> StepOracle:
        return self.real if self.oracle is None else self.oracle

    def _device_name(self, form: _Form) -> str:
        if self.device == "dryrun":
            return self.target.name
        return (
            "this machine's GPU" if self.device == "cuda" else f"this machine's CPU, one thread, {form.text}"
        )

    def _form_notes(self, form: _Form) -> list[str]:
        if form.text == "full size" or form.reason is not None:
            return []
        what = "Quality and times are" if self.device == "cpu" else "Quality is"
        return [f"{what} measured on {form.text}: the whole workload is too large for this machine's CPU."]

    def _form(self, flops: int, runs: int) -> _Form:
        """The largest form that the CPU can train in about ten minutes, by operations and memory."""
        facts = self.real.call("memfit.analysis.ladder_run:size_facts")
        budget = MOST_FLOPS / (runs * self.steps * self.seeds)
        room = facts["available_bytes"] / 2
        if flops <= budget and BYTES_A_PARAMETER * facts["parameters"] < room:
            return _Form()
        if facts["has_small_form"]:
            return _Form(size="small", text="the workload's small form")
        samples = min(CUT_SAMPLES, facts["samples"])
        share = samples / facts["samples"]
        if flops * share <= budget and BYTES_A_PARAMETER * facts["parameters"] < room:
            return _Form(samples=samples, text=f"batches cut to {samples} samples")
        return _Form(
            reason=f"{facts['parameters']:,} parameters and {flops * share:.1e} operations a step for "
            f"{samples} samples are too much for real steps on this CPU; let the workload's factories take "
            "size='small'"
        )

    def _rung(self, name: str, chain: Sequence[Settings], form: _Form, plain: Rung | None) -> Rung:
        """The chain measured; a rung that says why where it cannot be."""
        try:
            rung = self._dry(name, chain) if self.oracle is not None else self._real(name, chain, form)
        except MemfitError as failure:
            return Rung(name=name, skipped=_short(str(failure)))
        if not self.wants_quality:
            return replace(rung, quality_reason="it was not asked for")
        if form.reason is not None:
            return replace(rung, quality_reason=form.reason)
        try:
            return replace(rung, quality=self._trained(chain, form, plain))
        except MemfitError as failure:
            return replace(rung, quality_reason=f"the step cannot run on the CPU: {_short(str(failure))}")

    def _trained(self, chain: Sequence[Settings], form: _Form, plain: Rung | None) -> Quality | None:
        if plain is not None and plain.quality is None:
            raise UsageError(plain.quality_reason or "the plain step was not trained")
        result = self.real.call(
            "memfit.analysis.ladder_run:trained",
            techniques=list(chain),
            form=form.to_json(),
            steps=self.steps,
            seeds=self.seeds,
        )
        losses = tuple(float(loss) for loss in result["losses"])
        before = losses if plain is None or plain.quality is None else plain.quality.losses
        return Quality(
            losses=losses,
            plain_losses=before,
            steps=self.steps,
            step_seconds=float(result["step_seconds"]),
            scale=form.text,
        )

    def _dry(self, name: str, chain: Sequence[Settings]) -> Rung:
        """Peaks by the made-up GPU's allocator, seconds by the roofline over the operators that ran."""
        assert self.oracle is not None
        peaks = self.oracle.evaluate(chain)
        if peaks.failure is not None:
            raise UsageError(peaks.failure)
        rung = Rung(
            name=name,
            peak_requested_bytes=peaks.requested_bytes,
            peak_allocated_bytes=peaks.allocated_bytes,
            peak_reserved_bytes=peaks.reserved_bytes,
        )
        try:
            seconds = step_seconds(self.oracle.graph(chain).ops, self.target)
        except MemfitError as failure:
            return replace(
                rung, step_seconds_reason=f"the step could not be captured: {_short(str(failure))}"
            )
        return replace(rung, step_seconds=seconds, step_seconds_kind="predicted", operator_seconds=seconds)

    def _real(self, name: str, chain: Sequence[Settings], form: _Form) -> Rung:
        if self.device == "cpu" and form.reason is not None:
            raise UsageError(form.reason)
        result: Mapping[str, Any] = self.real.call(
            "memfit.analysis.ladder_run:measured",
            techniques=list(chain),
            form=(form if self.device == "cpu" else _Form()).to_json(),
            device=self.device,
            steps=self.steps,
        )
        return Rung(
            name=name,
            peak_requested_bytes=result["peak_requested_bytes"],
            peak_allocated_bytes=result.get("peak_allocated_bytes"),
            peak_reserved_bytes=result.get("peak_reserved_bytes"),
            step_seconds=float(result["step_seconds"]),
            step_seconds_kind="measured",
        )

    def _with_alone(self, rung: Rung) -> Rung:
        """The technique by itself as well: whether savings add up is seen against that."""
        assert rung.settings is not None
        if self.oracle is None:
            return rung
        peaks = self.oracle.evaluate((rung.settings,))
        return rung if peaks.failure is not None else replace(rung, alone_reserved_bytes=peaks.reserved_bytes)

    def _without_unseen(self, rung: Rung, unseen: Sequence[str]) -> Rung:
        """No seconds where a technique of the chain does something that the time model does not know."""
        if not unseen or rung.step_seconds_kind != "predicted":
            return rung
        return replace(rung, step_seconds=None, step_seconds_kind=None, step_seconds_reason="; ".join(unseen))


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else f"{line[:300]} …"
