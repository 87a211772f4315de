"""What the ``distributed`` section of a configuration does: one function a key, which says in a line what it
did.

Steps are counted by a hook of the optimizer, so that a training loop needs no line for them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from memfit.distributed import FaultTolerance, LoadBalancing, MemorySynchronization

if TYPE_CHECKING:
    from memfit.configuring.configured import Configured


class CheckpointedSteps(FaultTolerance):
    """Saves after every so many steps of the optimizer; a loop over `steps` counts by itself instead."""

    _counted_by_loop = False

    def steps(self, total: int) -> Iterator[int]:
        self._counted_by_loop = True
        return super().steps(total)

    def count(self) -> None:
        """One step of the optimizer is done."""
        if self._counted_by_loop:
            return
        self.step += 1
        if self.step % self.checkpoint_frequency == 0:
            self.save()


def balance(configured: Configured) -> Iterator[str]:
    """``distributed.load_balancing``: `Configured.balancing` deals by the strategy."""
    wanted = configured.configuration.settings.distributed.load_balancing
    if wanted.enabled:
        configured.balancing = LoadBalancing(wanted.strategy)  # type: ignore[arg-type]
        yield f"load balancing: {wanted.strategy} (distributed.load_balancing)"


def synchronize(configured: Configured) -> Iterator[str]:
    """``distributed.memory_synchronization``: after every so many steps of the optimizer."""
    wanted = configured.configuration.settings.distributed.memory_synchronization
    if not wanted.enabled:
        return
    repair: Any = wanted.repair  # the reader has seen to its values
    synchronization = MemorySynchronization(sync_frequency=wanted.sync_frequency, repair=repair)
    configured.synchronization = synchronization
    model, optimizer = configured.model, configured.optimizer
    _after_steps(configured, functools.partial(synchronization.step, model, optimizer))
    by_hand = "" if optimizer is not None else ", where synchronization.step(model) is called"
    yield (
        f"ranks are compared every {wanted.sync_frequency} steps{by_hand} "
        "(distributed.memory_synchronization)"
    )


def protect(configured: Configured) -> Iterator[str]:
    """``distributed.fault_tolerance``: takes up the newest good checkpoint, and saves new ones."""
    wanted = configured.configuration.settings.distributed.fault_tolerance
    if not wanted.enabled:
        return
    protection = CheckpointedSteps(wanted.checkpoint_frequency, folder=wanted.folder)
    configured.fault_tolerance = protection
    if configured.optimizer is None:
        yield "checkpoints: none without an optimizer (distributed.fault_tolerance)"
        return
    step = protection.protect(configured.model, configured.optimizer, scaler=configured.mixed_precision)
    _after_steps(configured, protection.count)
    resumed = f"; the state of step {step} is taken up" if step else ""
    yield (
        f"checkpoints: every {wanted.checkpoint_frequency} steps in {wanted.folder}{resumed} "
        "(distributed.fault_tolerance)"
    )


def _after_steps(configured: Configured, function: Any) -> None:
    if configured.optimizer is not None:
        hook = configured.optimizer.register_step_post_hook(
            lambda optimizer, words, named: function() and None
        )
        configured.hooks.append(hook)
