"""Stages of a pipeline that know all shapes need not ask the other stages whether they do.

PyTorch lets all stages vote, one after another, on whether shapes are passed on at run time. Ranks that are
absent do not vote, and a chain of them would have to be started for it. A stage that was given all shapes
takes the others to have been given theirs, as PyTorch itself does in a fake group; one that was not asks on.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


def install(module: Any) -> None:
    """Let stages decide so; ``module``: ``torch.distributed.pipelining.stage``. Older versions of it ask
    nobody."""
    stage = module.PipelineStage
    vote = getattr(stage, "_warmup_forward_vote", None)
    answer = getattr(stage, "_warmup_backward_result", None)
    if vote is None or answer is None:
        return

    @functools.wraps(vote)
    def own_vote(self: Any, has_backward: bool, received_acc: Any = None) -> Any:
        self._memfit_knows = not module.InferenceMode.needs_dynamic(self._user_meta, has_backward)
        return _yes() if self._memfit_knows else vote(self, has_backward, received_acc)

    @functools.wraps(answer)
    def own_answer(self: Any, received_result: Any = None) -> Any:
        return _yes() if self._memfit_knows else answer(self, received_result)

    stage._warmup_forward_vote = own_vote
    stage._warmup_backward_result = own_answer


def _yes() -> torch.Tensor:
    return torch.ones(1, dtype=torch.int32)
