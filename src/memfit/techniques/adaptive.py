"""A training step that survives out of memory: the same step again, in less memory, with the same result."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from memfit.core.errors import UsageError
from memfit.techniques.adaptive_ranks import (
    BROKEN,
    SHORT,
    AnotherRankFailed,
    AnotherRankShort,
    GuardedRanks,
    ranks_of,
)
from memfit.techniques.adaptive_restore import StepState
from memfit.techniques.adaptive_settings import (
    LADDER,
    Applied,
    GuardSetting,
    Rung,
    check_ladder,
    closed_rungs,
    next_setting,
)
from memfit.techniques.adaptive_shortage import is_out_of_memory, release
from memfit.techniques.base import applied_techniques
from memfit.techniques.micro_batching import MicroBatching
from memfit.techniques.mixed_precision import mixed_precision_of

_LOG = logging.getLogger("memfit.guard")
CLIMB_AFTER, LONGEST_CLIMB = 50, 10_000
Happening = Literal["out of memory", "again", "down", "up", "gave up"]


@dataclass(frozen=True, kw_only=True)
class GuardEvent:
    """One thing that a guard did.

    Attributes:
        step: number of the step, from 0.
        what: ``"out of memory"``; ``"again"`` with the cache emptied; ``"down"`` or ``"up"`` the ladder;
            ``"gave up"``.
        setting: in force from then on.
        elements: of all tensors of the batch.
        reason: the error's first line, or why.
    """

    step: int
    what: Happening
    setting: GuardSetting
    elements: int
    reason: str = ""

    def __str__(self) -> str:
        return (
            f"step {self.step}: {self.what} ({self.setting}; {self.elements} elements) {self.reason}".rstrip()
        )


class Guard:
    """What `guard` makes: call it as the step. ``log`` tells what it did, ``setting`` what is in force."""

    def __init__(
        self,
        step: Callable[..., Any],
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        ladder: Sequence[str] = LADDER,
        climb_after: int = CLIMB_AFTER,
    ) -> None:
        self._step, self._model = step, model
        self.ladder: tuple[Rung, ...] = check_ladder(ladder)
        takes = inspect.signature(step).parameters
        self._takes_pieces, self._takes_synchronize = "micro_batches" in takes, "synchronize" in takes
        self._ranks: GuardedRanks | None = None
        self.closed = closed_rungs(model, step, self._takes_pieces)
        self.log: list[GuardEvent] = []
        self.steps = 0
        self.setting = GuardSetting()
        self._applied = Applied(model)
        self._state = StepState(model, optimizers)
        self._unwatch = self._state.watch()
        self._choices: list[tuple[int, list[GuardSetting]]] = []
        self._climb_after, self._good_steps, self._trial = climb_after, 0, False
        self._returned: Any = None

    def __call__(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs the step on ``batch``; on out of memory again, further down the ladder, until it goes.

        Raises:
            Exception: the out-of-memory error itself, at the foot of the ladder or where it cannot be undone;
                every other error as it is.
        """
        self._ranks = self._ranks or ranks_of(self._model, self._takes_synchronize)
        elements, samples = _elements(batch), _samples(batch)
        setting = self._setting_for(elements, samples)
        emptied = "empty_cache" not in self.ladder
        while True:
            error = self._try(setting, batch, args, kwargs)
            if error is None:
                self._went_well()
                return self._result()
            release(error)
            reason = str(error).split("\n")[0]
            self._note("out of memory", setting, elements, reason)
            lower = next_setting(setting, self.ladder, samples, self.closed)
            self._restore(error, elements, at_foot=emptied and lower is None)
            if not emptied:
                emptied = True
                self._note("again", setting, elements, "cache emptied")
                continue
            lower = lower or setting  # at the foot, and not the rank that ran out
            self._note("down", lower, elements, "")
            self._remember(elements, setting, lower)
            setting = lower

    def close(self) -> None:
        """Takes off what the guard put on model and optimizers."""
        self._applied.set(GuardSetting())
        self._unwatch()

    def state_dict(self) -> dict[str, Any]:
        """What was learnt, for a checkpoint: the settings by size of the batch."""
        return {
            "choices": [
                {"elements": elements, "path": [asdict(setting) for setting in path]}
                for elements, path in self._choices
            ]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with what `state_dict` gave."""
        self._choices = [
            (int(choice["elements"]), [GuardSetting(**setting) for setting in choice["path"]])
            for choice in state["choices"]
        ]

    # -- one try --------------------------------------------------------------------------------------------

    def _try(
        self, setting: GuardSetting, batch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> BaseException | None:
        """Runs the step once; the error where memory ran out."""
        self._applied.set(setting)
        self.setting = setting
        self._state.begin()
        if setting != GuardSetting() and torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()  # `_room_above` asks for the peak of this step
        ranks = self._ranks
        pieces: dict[str, Any] = {"micro_batches": setting.micro_batches} if self._takes_pieces else {}
        if ranks is not None:
            ranks.begin()
            pieces["synchronize"] = ranks.synchronize
        try:
            with self._applied.around(setting):
                self._returned = self._step(batch, *args, **pieces, **kwargs)
        except AnotherRankShort as error:
            return error
        except BaseException as error:
            short = isinstance(error, RuntimeError) and is_out_of_memory(error)
            if ranks is not None and not isinstance(error, AnotherRankFailed):
                ranks.tell(SHORT if short else BROKEN)
            if not short:
                self._state.forget()
                raise
            return error
        return None if ranks is None else _finished(ranks)

    def _restore(self, error: BaseException, elements: int, *, at_foot: bool) -> None:
        """Takes the step back; gives up where it cannot be run again, here or on any rank."""
        why = "foot of the ladder" if at_foot and not isinstance(error, AnotherRankShort) else None
        if self._state.stepped_without_backup:
            why = "the optimizer had stepped already"
        else:
            self._state.restore()
        if self._ranks is not None and self._ranks.hopeless(why is not None):
            why = why or "another rank cannot go on"
        if why is not None:
            self._give_up(error, elements, why)

    def _result(self) -> Any:
        returned, self._returned = self._returned, None
        return returned

    def _give_up(self, error: BaseException, elements: int, why: str) -> None:
        self._note("gave up", self.setting, elements, why)
        tried = "; ".join(f"{rung}: {reason}" for rung, reason in self.closed.items())
        error.add_note(
            f"memfit.guard gave up ({why}) at: {self.setting}. " + (f"Not usable: {tried}" if tried else "")
        )
        raise error

    # -- what is remembered ---------------------------------------------------------------------------------

    def _setting_for(self, elements: int, samples: int) -> GuardSetting:
        """The lowest that a batch of this size or a smaller one needed."""
        needed = [path[-1] for size, path in self._choices if size <= elements]
        setting = max(needed, key=GuardSetting.depth, default=GuardSetting())
        if setting.micro_batches > samples:
            setting = GuardSetting(**{**asdict(setting), "micro_batches": max(samples, 1)})
        return setting

    def _remember(self, elements: int, failed: GuardSetting, lower: GuardSetting) -> None:
        """Batches from this size on start lower; smaller ones as before."""
        path = next((path for size, path in self._choices if size == elements), [failed])
        others = [(size, way) for size, way in self._choices if size != elements]
        path = [*(s for s in path if s.depth() < lower.depth()), lower]
        self._choices = sorted([*others, (elements, path)], key=lambda choice: choice[0])
        self._climb_after = min(2 * self._climb_after, LONGEST_CLIMB) if self._trial else self._climb_after
        self._trial, self._good_steps = False, 0

    def _went_well(self) -> None:
        self._state.end()
        self.steps += 1
        self._good_steps += 1
        if self._choices and self._good_steps >= self._climb_after and self._room_above():
            self._climb()

    def _climb(self) -> None:
        """One rung up for the largest batches known, on trial: if it fails, the next climb is later."""
        elements, path = self._choices.pop()
        if len(path) > 2:
            self._choices.append((elements, path[:-1]))
        higher = path[-2] if len(path) > 1 else GuardSetting()
        self._good_steps, self._trial = 0, True
        self._note("up", higher, elements, f"{self._climb_after} good steps")

    def _room_above(self) -> bool:
        """Whether the device has room for pieces of twice the size, as far as that can be told."""
        devices = {p.device for p in self._model.parameters() if p.is_cuda}
        for device in devices:
            peak, now = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
            free, _ = torch.cuda.mem_get_info(device)
            if peak - now > free + torch.cuda.memory_reserved(device) - peak:
                return False
        return True

    def _note(self, what: Happening, setting: GuardSetting, elements: int, reason: str) -> None:
        event = GuardEvent(step=self.steps, what=what, setting=setting, elements=elements, reason=reason)
        self.log.append(event)
        _LOG.warning("%s", event)


def guard(
    step: Callable[..., Any],
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    ladder: Sequence[str] = LADDER,
    climb_after: int = CLIMB_AFTER,
) -> Guard:
    """Lets a training step survive out of memory.

    On out of memory, and on nothing else, what the error holds is freed and what the step did is taken back
    (random states, buffers, gradients, weights, optimizer state), and the step runs again: first as it was
    with the cache emptied, then further down the ladder. The setting stays for batches of that size and
    larger ones; after ``climb_after`` good steps the one before is tried again (twice as many after each
    vain try).

    On several ranks all do so together, and the guard averages the gradients, in the place of
    DistributedDataParallel.

    Args:
        step: ``step(batch, …)``: forward, backward, ``optimizer.step()``, best with
            ``zero_grad(set_to_none=True)`` at its end. For the micro-batch rung it takes ``micro_batches=``
            as well, and on several ranks ``synchronize=``, as `training_step` makes it.
        model: of the step; ``None``: the one that ``step`` uses, if there is only one.
        optimizer: of the step; ``None``: the one that ``step`` uses, if there is only one model.
        ladder: rungs in the order they are tried; see `LADDER`.
        climb_after: see above.

    Raises:
        UsageError: no model found, or a technique that steps in the backward pass.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> step = training_step(model, optimizer, lambda model, batch: model(batch).square().mean())
        >>> guarded = guard(step)
        >>> loss = guarded(torch.ones(8, 4))
        >>> guarded.log
        []
    """
    models = [model] if model is not None else _found_in(step, nn.Module)
    models = [m for m in models if not any(m is not o and m in set(o.modules()) for o in models)]
    if len(models) != 1:
        raise UsageError(f"guard: the step uses {len(models)} models; name one: guard(step, model=…)")
    if optimizer is None:
        optimizers = _found_in(step, Optimizer)
    else:
        optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    if any(t.name == "optimizer_in_backward" for t in applied_techniques(models[0])):
        raise UsageError(
            "guard: optimizer_in_backward changes weights before the step is over, so a step cannot be run "
            "again"
        )
    return Guard(step, models[0], optimizers, ladder, climb_after)


def training_step(
    model: nn.Module,
    optimizer: Optimizer,
    loss: Callable[[nn.Module, Any], Tensor],
    *,
    loss_weight: Callable[[Any], float] | None = None,
    max_grad_norm: float | None = None,
) -> Callable[..., Tensor]:
    """A step ``(batch, micro_batches=1) → loss``: pieces weighted, losses scaled where mixed precision is
    applied, gradients clipped, the optimizer stepped, gradients set to ``None``. On several ranks its guard
    averages the gradients, so the model is wrapped by nothing.

    Args:
        loss: ``(model, batch)`` → a mean over the batch's samples or tokens.
        loss_weight: over how many, where that differs between pieces of one size (padding).
        max_grad_norm: of the whole batch's gradient.
    """

    def step(batch: Any, micro_batches: int = 1, synchronize: Callable[[], None] | None = None) -> Tensor:
        mp = mixed_precision_of(model)
        total: Tensor | None = None
        for piece, weight in MicroBatching(micro_batches=micro_batches).split(batch, loss_weight):
            if mp is None:
                part = weight * loss(model, piece)
                part.backward()
            else:
                with mp.autocast():
                    part = weight * loss(model, piece)
                mp.scale_loss(part).backward()
            total = part.detach() if total is None else total + part.detach()
            del part
        if synchronize is not None:
            synchronize()
        if max_grad_norm is not None:
            clip = nn.utils.clip_grad_norm_ if mp is None else mp.clip_grad_norm_
            clip(model.parameters(), max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        assert total is not None
        return total

    return step


def _found_in(step: Callable[..., Any], kind: type[Any]) -> list[Any]:
    """Objects of ``kind`` that ``step`` uses: its object's attributes, its closure, its globals."""
    found: dict[int, Any] = {}
    for value in _used_by(step):
        if isinstance(value, kind):
            found[id(value)] = value
    return list(found.values())


def _used_by(step: Callable[..., Any]) -> Iterator[Any]:
    owner = getattr(step, "__self__", None)
    if owner is not None:
        yield from vars(owner).values()
    function = inspect.unwrap(step)
    function = getattr(function, "__func__", function)
    if inspect.isfunction(function):
        used = inspect.getclosurevars(function)
        yield from used.nonlocals.values()
        yield from used.globals.values()
    elif not inspect.isbuiltin(function) and hasattr(function, "__dict__"):
        yield from vars(function).values()


def _elements(batch: Any) -> int:
    return sum(leaf.numel() for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


def _samples(batch: Any) -> int:
    sizes = {leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()}
    return int(sizes.pop()) if len(sizes) == 1 else 1


def _finished(ranks: GuardedRanks) -> AnotherRankShort | None:
    """The others are told that the step is done here; the error where one of them ran out in its update."""
    try:
        ranks.finish()
    except AnotherRankShort as error:
        return error
    return None
