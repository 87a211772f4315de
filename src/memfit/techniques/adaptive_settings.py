"""The ladder that an out-of-memory guard steps down: what it may do, in order, and what is in force."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import nn

from memfit.core.errors import UsageError
from memfit.techniques.base import Undo
from memfit.techniques.gradient_checkpointing import GradientCheckpointing

Rung = Literal["empty_cache", "micro_batch", "checkpoint", "offload"]
LADDER: tuple[Rung, ...] = get_args(Rung)
"""What is tried, in this order: the cache emptied and the same again, once for a step; 2, 4, 8 …
micro-batches; every second block recomputed, then every block; saved activations in host memory."""


@dataclass(frozen=True, kw_only=True)
class GuardSetting:
    """How a guarded step runs.

    Attributes:
        micro_batches: into how many pieces the batch is cut.
        checkpoint: every how many blocks one is recomputed; 0: none is.
        offload: whether what the forward pass saves waits in host memory.
    """

    micro_batches: int = 1
    checkpoint: int = 0
    offload: bool = False

    def depth(self) -> tuple[bool, int, int]:
        """How far down it is."""
        return self.offload, {0: 0, 2: 1, 1: 2}[self.checkpoint], self.micro_batches

    def __str__(self) -> str:
        parts = [f"{self.micro_batches} micro-batches"] if self.micro_batches > 1 else []
        if self.checkpoint:
            parts.append(
                "every block recomputed" if self.checkpoint == 1 else "every second block recomputed"
            )
        parts += ["activations on the host"] if self.offload else []
        return ", ".join(parts) or "as it is"


def next_setting(
    now: GuardSetting, ladder: Sequence[Rung], samples: int, closed: Mapping[str, str]
) -> GuardSetting | None:
    """The next step down the ladder; ``None`` at its foot.

    Args:
        samples: of the batch: no more pieces than that.
        closed: rungs that cannot be used, with the reason.
    """
    for rung in ladder:
        if rung in closed:
            continue
        if rung == "micro_batch" and 2 * now.micro_batches <= samples:
            return replace(now, micro_batches=2 * now.micro_batches)
        if rung == "micro_batch" and now.micro_batches < samples:
            return replace(now, micro_batches=samples)
        if rung == "checkpoint" and now.checkpoint != 1:
            return replace(now, checkpoint=2 if now.checkpoint == 0 else 1)
        if rung == "offload" and not now.offload:
            return replace(now, offload=True)
    return None


def check_ladder(ladder: Sequence[str]) -> tuple[Rung, ...]:
    """The ladder as a tuple; UsageError for a rung that there is not."""
    for rung in ladder:
        if rung not in LADDER:
            raise UsageError(f"guard: no rung is called {rung!r}; there are {', '.join(LADDER)}")
    return tuple(ladder)  # type: ignore[arg-type]


class Applied:
    """Keeps the model as the setting in force wants it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._checkpoint = 0
        self._undo: Undo | None = None

    def set(self, setting: GuardSetting) -> None:
        """Recomputes as many blocks as ``setting`` says. UsageError where the model has none."""
        if setting.checkpoint == self._checkpoint:
            return
        if self._undo is not None:
            self._undo()
        self._undo, self._checkpoint = None, 0
        if setting.checkpoint:
            technique = GradientCheckpointing(checkpoint_frequency=setting.checkpoint)
            self._undo = technique.change(self._model, None)
            self._checkpoint = setting.checkpoint

    @contextlib.contextmanager
    def around(self, setting: GuardSetting) -> Iterator[None]:
        """The context of a step."""
        if not setting.offload:
            yield
            return
        pinned = any(parameter.is_cuda for parameter in self._model.parameters())
        with torch.autograd.graph.save_on_cpu(pin_memory=pinned):
            yield


def closed_rungs(model: nn.Module, step: Callable[..., Any], takes_pieces: bool) -> dict[str, str]:
    """Rungs that cannot be used for this step, with the reason."""
    closed: dict[str, str] = {}
    if not takes_pieces:
        name = getattr(step, "__name__", type(step).__name__)
        closed["micro_batch"] = (
            f"{name} has no parameter micro_batches; give it one and loop over "
            "MicroBatching(micro_batches=micro_batches).split(batch), or use memfit.training_step"
        )
    try:
        GradientCheckpointing().change(model, None)()
    except UsageError as error:
        closed["checkpoint"] = str(error)
    return closed
