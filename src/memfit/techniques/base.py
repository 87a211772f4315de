"""What a technique is: frozen settings that can change a model in place, and a record that takes the change
back.

    Technique            settings; ``apply`` changes the model in place, ``exactness`` says how far results
    may move applied_techniques   what was applied to a model, in order
    undo                 takes the last one back, bitwise

The record is kept per model, weakly, outside of the model: ``state_dict`` keys, module identity and pickles
of the model do not see it. A model that is wrapped later (DistributedDataParallel, ``torch.compile``) keeps
its record.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Self

from memfit.core.errors import UsageError
from memfit.core.exactness import Exactness

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from memfit.capture.graph import StepGraph
    from memfit.techniques.saving import Saving

Undo = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Technique(ABC):
    """A change to how a training step runs. The instance is its settings; what it changed lives in the
    record."""

    name: ClassVar[str]

    @abstractmethod
    def exactness(self, model: nn.Module) -> Exactness:
        """How far the results of a step on ``model`` may differ from the plain step."""

    @abstractmethod
    def change(self, model: nn.Module, optimizer: Optimizer | None) -> Undo:
        """Changes the model (or optimizer) in place; gives back what takes the change back. Raises before it
        changes anything."""

    @abstractmethod
    def estimate(self, graph: StepGraph, model: nn.Module | None = None) -> Saving:
        """What the technique is expected to save on a captured step, without being applied.

        Args:
            graph: the plain step (`memfit.capture_step`).
            model: the model of that step, for what depends on shapes or modules that the graph does not
                have; techniques that need it and do not get it say so.

        Raises:
            UsageError: the settings do not fit this model, or the model is needed.
        """

    def apply(self, model: nn.Module, optimizer: Optimizer | None = None) -> Any:
        """Changes ``model`` in place.

        Returns:
            the model; with an optimizer, the pair of both.

        Raises:
            UsageError: the settings do not fit this model, or the technique is already applied to it.
        """
        record = _record(model)
        undo_this = self.change(model, optimizer)
        record.append(Applied(technique=self, undo=undo_this))
        return model if optimizer is None else (model, optimizer)

    def to_settings(self) -> dict[str, Any]:
        """The JSON form: ``{"technique": name, …}`` with the settings that differ from their defaults."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != _default(f)}
        return {"technique": self.name, **{key: _as_json(value) for key, value in given.items()}}

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        """Reads the JSON form back.

        Raises:
            UsageError: an unknown key, or a value that the technique refuses.
        """
        values = {key: value for key, value in settings.items() if key != "technique"}
        known = [f.name for f in fields(cls)]
        for key in values:
            if key not in known:
                raise UsageError(f"{cls.name} has no setting {key!r}; it has {', '.join(known) or 'none'}")
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class Applied:
    """One entry of a model's record."""

    technique: Technique
    undo: Undo


_RECORDS: weakref.WeakKeyDictionary[nn.Module, list[Applied]] = weakref.WeakKeyDictionary()


def bare_model(model: nn.Module) -> nn.Module:
    """The model inside the wrappers that leave it whole: ``torch.compile`` and (Distributed)DataParallel."""
    while (inner := _inside_of_wrapper(model)) is not None:
        model = inner
    return model


def applied_techniques(model: nn.Module) -> tuple[Technique, ...]:
    """The techniques that are applied to ``model`` now, first to last."""
    return tuple(entry.technique for entry in _RECORDS.get(bare_model(model), ()))


def undo(model: nn.Module) -> Technique:
    """Takes back the technique that was applied to ``model`` last, and returns it.

    Raises:
        UsageError: nothing is applied to this model, or something was put on top of what is to be taken back,
            which stays applied then.
    """
    record = _RECORDS.get(bare_model(model))
    if not record:
        raise UsageError(
            f"nothing to undo: no technique is applied to this {type(model).__name__} "
            "(a copy of a model has no record of its own: undo before copying)"
        )
    entry = record[-1]
    entry.undo()
    record.pop()
    return entry.technique


def undo_all(model: nn.Module) -> tuple[Technique, ...]:
    """Takes back every technique that is applied to ``model``, last to first; none applied is no error."""
    taken = []
    while applied_techniques(model):
        taken.append(undo(model))
    return tuple(taken)


def refuse_second(model: nn.Module, kind: type[Technique]) -> None:
    """Raises UsageError when a technique of class ``kind`` is applied to ``model`` already."""
    for technique in applied_techniques(model):
        if isinstance(technique, kind):
            raise UsageError(
                f"{kind.name} is applied to this {type(bare_model(model)).__name__} already "
                f"({technique.to_settings()}); take it back with memfit.undo(model) first"
            )


def _record(model: nn.Module) -> list[Applied]:
    from torch import nn

    if not isinstance(model, nn.Module):
        raise UsageError(f"a technique is applied to a torch.nn.Module, not to a {type(model).__name__}")
    return _RECORDS.setdefault(bare_model(model), [])


def _inside_of_wrapper(model: nn.Module) -> nn.Module | None:
    from torch import nn
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    if isinstance(model, (DataParallel, DistributedDataParallel)):
        inner: nn.Module = model.module
        return inner
    compiled = model._modules.get("_orig_mod") if isinstance(model, nn.Module) else None
    return compiled


def _default(field: Any) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _as_json(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_as_json(inner) for inner in value]
    return value


def whole_number(value: Any, *, key: str, technique: str, least: int = 1) -> None:
    """Raises UsageError unless ``value`` is an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{technique}: {key} must be a whole number of at least {least}, not {value!r}")
