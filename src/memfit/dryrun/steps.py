"""Counting optimizer steps, and ending the run after so many."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class StepCounter:
    """Counts the steps of every optimizer of the script.

    With several optimizers, the run ends when all that have stepped have done ``most`` steps, or when the
    busiest would begin one more. Inside the backward pass (an optimizer per parameter, stepped from hooks) it
    ends only in the second way, so that the last step is whole.

    Args:
        most: after how many steps to end; None: never.
        before, after: called around each step, with the optimizer.
        end: ends the run; does not return.
    """

    def __init__(
        self,
        most: int | None,
        *,
        before: Callable[[torch.optim.Optimizer], None],
        after: Callable[[torch.optim.Optimizer], None],
        end: Callable[[], None],
    ) -> None:
        self._most = most
        self._before = before
        self._after = after
        self._end = end
        self._counts: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self.done = 0

    def install(self) -> None:
        """Hook into every optimizer, also those that are made later."""
        register_optimizer_step_pre_hook(self._pre)
        register_optimizer_step_post_hook(self._post)

    def _pre(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._most is not None and self._counts.get(optimizer, 0) >= self._most:
            self._end()
        self._before(optimizer)

    def _post(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        count = self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        self.done = max(self.done, count)
        self._after(optimizer)
        in_backward = torch._C._current_graph_task_id() != -1
        if self._most is not None and not in_backward and min(self._counts.values()) >= self._most:
            self._end()
