"""A plan: techniques with settings, chosen for a budget, as a value and as a file; and what a fit found."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from memfit.core.errors import InputError, MemfitError, UsageError
from memfit.core.exactness import EXACTNESS_ORDER, Exactness
from memfit.core.files import write_atomically
from memfit.dryrun.result import Confidence, Interval
from memfit.dryrun.uncertainty import Uncertain
from memfit.planning.figures import Advice, Candidate, Settings, StepFigures, Verified

SCHEMA_VERSION = 1
MOST_DIFFERENCES = 3


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Techniques with their settings, chosen so that a workload's step fits a budget.

    Examples:
        >>> plan = Plan.load("plan.json")                      # doctest: +SKIP
        >>> model, optimizer = plan.apply(model, optimizer)    # doctest: +SKIP
    """

    workload: str
    gpu: str
    budget_bytes: int
    techniques: tuple[Settings, ...]
    exactness: Exactness
    plain: StepFigures
    planned: StepFigures
    recompute_percent: float
    lower_bound_percent: float | None = None
    workload_spec: str | None = None
    engine: str = "dryrun"
    torch: str | None = None
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0

    @property
    def micro_batch_count(self) -> int:
        """Into how many micro-batches the plan cuts a batch; 1 when it does not."""
        return micro_batch_count(self.techniques)

    def to_json(self) -> dict[str, Any]:
        """JSON form, with ``schema_version``."""
        return {
            "schema_version": SCHEMA_VERSION,
            "workload": self.workload,
            "workload_spec": self.workload_spec,
            "gpu": self.gpu,
            "budget_bytes": self.budget_bytes,
            "techniques": [dict(settings) for settings in self.techniques],
            "exactness": self.exactness,
            "plain": self.plain.to_json(),
            "planned": self.planned.to_json(),
            "recompute_percent": self.recompute_percent,
            "lower_bound_percent": self.lower_bound_percent,
            "engine": self.engine,
            "torch": self.torch,
            "fingerprint": dict(self.fingerprint),
            "seed": self.seed,
        }

    @classmethod
    def from_json(cls, data: Any, *, source: str = "plan") -> Plan:
        """The plan in a JSON object. InputError names ``source`` and the key that is missing or wrong."""
        if not isinstance(data, dict):
            raise InputError(f"{source}: a plan is a JSON object, not {type(data).__name__}")
        version = data.get("schema_version")
        if version != SCHEMA_VERSION:
            raise InputError(
                f"{source}: schema_version is {version!r}; this memfit reads {SCHEMA_VERSION}: "
                "make the plan anew"
            )
        read = _Reader(data, source)
        return cls(
            workload=read("workload", str),
            workload_spec=read("workload_spec", _optional(str)),
            gpu=read("gpu", str),
            budget_bytes=read("budget_bytes", _count),
            techniques=read("techniques", _techniques),
            exactness=read("exactness", _exactness),
            plain=read("plain", StepFigures.from_json),
            planned=read("planned", StepFigures.from_json),
            recompute_percent=read("recompute_percent", float),
            lower_bound_percent=read("lower_bound_percent", _optional(float)),
            engine=read("engine", str),
            torch=read("torch", _optional(str)),
            fingerprint=read("fingerprint", _fingerprint) if "fingerprint" in data else {},
            seed=read("seed", int),
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan file. InputError says what is wrong with it: file, and line or key."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: cannot read the plan: {error}") from error
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
        return cls.from_json(data, source=str(path))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the plan as JSON, whole or not at all. UsageError where the place cannot be written."""
        return write_atomically(path, json.dumps(self.to_json(), indent=2) + "\n")

    def apply(self, model: Any, optimizer: Any = None) -> Any:
        """Change ``model`` (and ``optimizer``) in place so that they run the plan.

        Returns the model, or ``(model, optimizer)`` when an optimizer was given. `memfit.undo(model)` takes
        the techniques back, one a call. UsageError when it is another model than the plan was made for,
        by names and shapes of its parameters, or has not the blocks that the plan names; the model is then
        as it was.
        """
        self._check_model(model)
        self._check_blocks(model)
        apply_settings(self.techniques, model, optimizer)
        return model if optimizer is None else (model, optimizer)

    def _check_model(self, model: Any) -> None:
        """The parameters are those of the model that was planned for, or UsageError says what differs."""
        from memfit.techniques.base import bare_model

        differences = differences_of(self.fingerprint, parameter_shapes(bare_model(model)))
        if self.fingerprint and differences:
            shown = "; ".join(differences[:MOST_DIFFERENCES])
            more = len(differences) - MOST_DIFFERENCES
            raise UsageError(
                f"the plan for {self.workload!r} was made for another model: {shown}"
                f"{f', and {more} more' if more > 0 else ''}; apply it to the model that it was made for, "
                "before other techniques, or make a plan for this one"
            )

    def _check_blocks(self, model: Any) -> None:
        """Each block that the plan names exists in the model, or UsageError names the first that does not."""
        from memfit.techniques.blocks import get_block

        for settings in self.techniques:
            for name in settings.get("blocks") or ():
                try:
                    get_block(model, name)
                except UsageError as error:
                    raise UsageError(
                        f"the plan for {self.workload!r} does not fit this model: {error}; apply it to the "
                        "model that it was made for, or make a plan for this one"
                    ) from error

    def micro_batches(
        self, batch: Any, loss_weight: Callable[[Any], float] | None = None
    ) -> Iterator[tuple[Any, float]]:
        """Cut ``batch`` as the plan says: yields ``(micro_batch, weight)``, weights adding up to 1.

        Multiply each micro-batch's mean loss by its weight before ``backward()``. ``loss_weight(batch)`` says
        over how many samples or tokens the loss takes its mean; without it, the size of dimension 0. One
        piece of weight 1 when the plan does not cut.
        """
        if self.micro_batch_count == 1:
            yield batch, 1.0
            return
        from memfit.techniques import MicroBatching

        yield from MicroBatching(micro_batches=self.micro_batch_count).split(batch, loss_weight)


def parameter_shapes(model: Any) -> dict[str, str]:
    """What tells a model from another: ``{"h.0.mlp.weight": "768x3072"}``."""
    return {name: "x".join(map(str, tensor.shape)) for name, tensor in model.named_parameters()}


def differences_of(planned: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """What differs between two models' parameters, in words."""
    found = []
    for name in dict.fromkeys((*planned, *here)):
        there, now = planned.get(name), here.get(name)
        if there is None or now is None:
            found.append(f"{name} is {'only here' if there is None else 'missing'}")
        elif there != now:
            found.append(f"{name} is {now} here and was {there or 'a number'}")
    return found


def apply_settings(techniques: Sequence[Settings], model: Any, optimizer: Any = None) -> None:
    """Apply techniques given as settings, first to last; when one refuses, those before it are taken back."""
    from memfit.techniques import technique_from_settings, undo

    applied = 0
    try:
        for settings in techniques:
            technique_from_settings(settings).apply(model, optimizer)
            applied += 1
    except MemfitError:
        for _ in range(applied):
            undo(model)
        raise


def micro_batch_count(techniques: Sequence[Settings]) -> int:
    """Into how many micro-batches these techniques cut a batch; 1 when they do not."""
    return next((int(s.get("micro_batches", 2)) for s in techniques if s["technique"] == "micro_batching"), 1)


def sample_count(batch: Any) -> int:
    """The size of dimension 0, which all tensors of a batch share."""
    from torch.utils._pytree import tree_leaves

    return next(int(leaf.shape[0]) for leaf in tree_leaves(batch) if getattr(leaf, "ndim", 0) > 0)


@dataclass(frozen=True)
class _Reader:
    """Takes keys out of a plan's JSON object and says which one is wrong."""

    data: Mapping[str, Any]
    source: str

    def __call__(self, key: str, convert: Callable[[Any], Any]) -> Any:
        if key not in self.data:
            raise InputError(f"{self.source}: key {key!r} is missing: this is not a whole plan")
        try:
            return convert(self.data[key])
        except KeyError as error:
            raise InputError(f"{self.source}: key {key!r} lacks {error.args[0]!r}") from error
        except (TypeError, ValueError, AttributeError, UsageError) as error:
            raise InputError(f"{self.source}: key {key!r}: {error}") from error


def _fingerprint(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(shape, str) for shape in value.values()):
        raise TypeError("must be an object of parameter names and shapes")
    return value


def _optional(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else convert(value)


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a number of bytes")
    return value


def _exactness(value: Any) -> Any:
    if value not in EXACTNESS_ORDER:
        raise ValueError(f"{value!r} is none of {', '.join(EXACTNESS_ORDER)}")
    return value


def _techniques(value: Any) -> tuple[Settings, ...]:
    """Settings objects, each of a technique that exists; their values are checked when they are applied."""
    from memfit.techniques import TECHNIQUES

    if not isinstance(value, list):
        raise TypeError(f"must be a list, not {type(value).__name__}")
    for settings in value:
        name = settings["technique"] if isinstance(settings, dict) else settings
        if not isinstance(name, str) or name not in TECHNIQUES:
            raise ValueError(f"technique {name!r} is unknown: this memfit has {', '.join(TECHNIQUES)}")
    return tuple(value)


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """What `plan` found: the plain step, the planned step, what it costs, how it was checked.

    ``planned`` is None only when no plan fits; ``least_budget_bytes`` then is the least reserved peak that
    any plan which was tried needs, in bytes, and ``advice`` what other trainings would need. ``candidates``
    are the points of the time–memory front that were tried. ``value_reads``, ``interval``, ``estimates``,
    ``device_memory``, ``confidence`` and ``not_modelled`` are those of the dry run of the chosen plan, or of
    the plain step where there is none (see `memfit.dryrun.result.DryRunResult`).
    """

    workload: str
    workload_spec: str | None
    gpu: str
    engine: str
    engine_reason: str | None
    torch: str | None
    budget_bytes: int
    device_total_bytes: int | None
    context_bytes: int
    plain: StepFigures
    plain_fits: bool
    planned: StepFigures | None
    fits: bool
    plan_name: str
    techniques: tuple[Settings, ...]
    exactness: Exactness
    recompute_percent: float | None
    lower_bound_percent: float | None
    lower_bound_at_peak_percent: float | None
    best_named: str | None
    verified: Verified | None
    least_budget_bytes: int | None
    candidates: tuple[Candidate, ...]
    evaluations: int
    planning_seconds: float
    wall_seconds: float
    value_reads: tuple[Any, ...] = ()
    interval: Interval | None = None
    estimates: Mapping[str, int] = field(default_factory=dict)
    device_memory: Uncertain | None = None
    confidence: Confidence | None = None
    confidence_reasons: tuple[str, ...] = ()
    not_modelled: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    advice: tuple[Advice, ...] = ()
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0

    @property
    def plan(self) -> Plan | None:
        """The plan to save and apply; None when none fits."""
        if self.planned is None:
            return None
        return Plan(
            workload=self.workload,
            workload_spec=self.workload_spec,
            gpu=self.gpu,
            budget_bytes=self.budget_bytes,
            techniques=self.techniques,
            exactness=self.exactness,
            plain=self.plain,
            planned=self.planned,
            recompute_percent=self.recompute_percent or 0.0,
            lower_bound_percent=self.lower_bound_percent,
            engine=self.engine,
            torch=self.torch,
            fingerprint=self.fingerprint,
            seed=self.seed,
        )

    def to_json(self) -> dict[str, Any]:
        """The one JSON object that `memfit fit --json` prints; bytes are integers, seconds floats."""
        return {
            "schema_version": SCHEMA_VERSION,
            "workload": self.workload,
            "workload_spec": self.workload_spec,
            "gpu": self.gpu,
            "engine": self.engine,
            "engine_reason": self.engine_reason,
            "torch": self.torch,
            "budget_bytes": self.budget_bytes,
            "device_total_bytes": self.device_total_bytes,
            "context_bytes": self.context_bytes,
            "plain": self.plain.to_json(),
            "plain_fits": self.plain_fits,
            "planned": None if self.planned is None else self.planned.to_json(),
            "fits": self.fits,
            "plan_name": self.plan_name,
            "techniques": [dict(settings) for settings in self.techniques],
            "exactness": self.exactness,
            "recompute_percent": self.recompute_percent,
            "lower_bound_percent": self.lower_bound_percent,
            "lower_bound_at_peak_percent": self.lower_bound_at_peak_percent,
            "best_named": self.best_named,
            "verified": None if self.verified is None else self.verified.to_json(),
            "least_budget_bytes": self.least_budget_bytes,
            "candidates": [candidate.to_json() for candidate in self.candidates],
            "evaluations": self.evaluations,
            "planning_seconds": self.planning_seconds,
            "wall_seconds": self.wall_seconds,
            "value_reads": list(self.value_reads),
            "interval": None if self.interval is None else asdict(self.interval),
            "estimates": dict(self.estimates),
            "device_memory": None if self.device_memory is None else asdict(self.device_memory),
            "confidence": self.confidence,
            "confidence_reasons": list(self.confidence_reasons),
            "not_modelled": list(self.not_modelled),
            "notes": list(self.notes),
            "advice": [one.to_json() for one in self.advice],
            "seed": self.seed,
        }
