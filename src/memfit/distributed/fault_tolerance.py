"""`FaultTolerance`: training that loses at most the steps since its last checkpoint, and goes on bit for
bit."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from memfit.core.errors import InputError, UsageError
from memfit.distributed import groups
from memfit.distributed.checkpoint_folder import (
    Checkpoint,
    clear_unfinished,
    newest_first,
    read_checkpoint,
    set_aside,
)
from memfit.distributed.events import Event, EventLog
from memfit.distributed.saving import Save, rank_file
from memfit.distributed.tensor_files import load_tensors, saved_names
from memfit.distributed.training_state import TrainingState
from memfit.distributed.watchdog import Watchdog, read_hangs

NO_CHECKPOINT = -1


class FaultTolerance:
    """Saves all that training depends on every ``checkpoint_frequency`` steps, and takes it up again.

    Made to run under ``memfit launch`` (or torchrun), which starts all ranks again when one is lost. A
    process without a launcher is one rank. A save copies the state to the host and writes it in a thread,
    under another name until every rank's files are there and hashed; so what can be read is whole. A
    checkpoint whose hashes are wrong is set aside and the one before is taken. A save that fails (a full
    disk) is said, and training goes on.

    Args:
        checkpoint_frequency: steps between saves.
        folder: of the checkpoints, one that all ranks can reach.
        keep_last: how many checkpoints to keep; two or more, so that there is one before a corrupt one.
        hang_timeout_seconds: a rank in which no step ends for so long (ten times as long for its first) ends
            itself; None: never. Longer than the longest step with its save.

    Raises:
        UsageError: a value that cannot be meant.

    Examples:
        >>> ft = FaultTolerance(checkpoint_frequency=100, folder="checkpoints")      # doctest: +SKIP
        >>> order = DataOrder(len(data), batch_size=64)                              # doctest: +SKIP
        >>> ft.protect(model, optimizer, data=order)                                 # doctest: +SKIP
        >>> for step in ft.steps(10_000):                                            # doctest: +SKIP
        ...     train_step(data[order.indices(step)])
    """

    def __init__(
        self,
        checkpoint_frequency: int = 100,
        *,
        folder: str | PathLike[str] = "checkpoints",
        keep_last: int = 2,
        hang_timeout_seconds: float | None = None,
    ) -> None:
        for name, value in (("checkpoint_frequency", checkpoint_frequency), ("keep_last", keep_last)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"{name} must be a number of 1 or more, not {value!r}")
        if hang_timeout_seconds is not None and not 0 < hang_timeout_seconds < math.inf:
            raise UsageError(f"hang_timeout_seconds must be above 0, not {hang_timeout_seconds!r}")
        self.checkpoint_frequency = checkpoint_frequency
        self.folder = Path(folder)
        self.keep_last = keep_last
        self.hang_timeout_seconds = hang_timeout_seconds
        self.step = 0
        self.last_saved_step = NO_CHECKPOINT
        self._state: TrainingState | None = None
        self._save: Save | None = None
        self._group: groups.Group = None
        self._watchdog: Watchdog | None = None
        self._log = EventLog(self.folder, keep=True)

    @property
    def events(self) -> Sequence[Event]:
        """What happened in this process: saved, resumed, fell back, could not save."""
        return tuple(self._log.events)

    def protect(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        scheduler: Any = None,
        scaler: Any = None,
        data: Any = None,
        generators: Mapping[str, torch.Generator] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> int:
        """Say what training depends on, and take up the newest good checkpoint; every rank must call this.

        Random generators of Python, numpy and PyTorch are saved without being named.

        Args:
            model: plain, or wrapped by DDP or FSDP2 (`wrap`).
            optimizer: of its parameters, made after wrapping.
            scheduler: with ``state_dict`` and ``load_state_dict``.
            scaler: the same.
            data: a `DataOrder`, or a loader of this rank with ``state_dict`` (``StatefulDataLoader``).
            generators: random generators of your own, by name.
            extra: anything else with ``state_dict``, the same on all ranks, by name.

        Returns:
            the step at which training goes on; 0 where there is no checkpoint.

        Raises:
            UsageError: the checkpoint is of another model, or the folder cannot be written.
        """
        shared = {"scheduler": scheduler, "scaler": scaler, **(extra or {})}
        self._state = TrainingState(
            model=model,
            optimizers=(optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer),
            shared={name: thing for name, thing in shared.items() if thing is not None},
            data=data,
            generators=dict(generators or {}),
        )
        groups.join()
        if groups.in_group() and self._group is None:
            self._group = dist.new_group(backend="gloo")
        self._log = EventLog(self.folder, keep=groups.rank() == 0)
        self._make_folder()
        self.step = self._restore()
        return self.step

    def steps(self, total: int) -> Iterator[int]:
        """The steps from where training stands to ``total``; saves after every ``checkpoint_frequency`` of
        them, and after the last."""
        if self._state is None:
            raise UsageError("steps() needs protect(model, optimizer) before it")
        if self.hang_timeout_seconds is not None:
            self._watchdog = Watchdog(
                self.folder / "hangs", rank=groups.rank(), timeout_seconds=self.hang_timeout_seconds
            )
        try:
            while self.step < total:
                self._beat()
                yield self.step
                self.step += 1
                if self.step % self.checkpoint_frequency == 0 or self.step == total:
                    self.save()
            self.wait()
            groups.barrier()
        finally:
            if self._watchdog is not None:
                self._watchdog.stop()
                self._watchdog = None

    def save(self) -> None:
        """Begin to save the state as it is now; every rank must call this. Waits for the save before it."""
        if self._state is None:
            raise UsageError("save() needs protect(model, optimizer) before it")
        self.wait()
        skeleton, tensors = self._state.sharded()
        self._save = Save(
            self.folder,
            self.step,
            tensors=tensors,
            marker={"sharded": skeleton, **self._state.of_all()},
            of_rank=self._state.of_rank(),
            keep=self.keep_last,
            group=self._group,
        )

    def wait(self) -> None:
        """Wait until the save that is under way has ended; what became of it is in `events`."""
        save, self._save = self._save, None
        if save is None:
            return
        save.finish()
        if save.failure is None:
            self.last_saved_step = save.step
            self._log.tell("saved", save.step, f"step {save.step} is saved")
            return
        last = (
            "there is none before it"
            if self.last_saved_step < 0
            else f"the last good one is of step {self.last_saved_step}"
        )
        self._log.tell(
            "not_saved",
            save.step,
            f"the checkpoint of step {save.step} could not be written to {self.folder}: {save.failure}; "
            f"{last}; training goes on",
        )

    def close(self) -> None:
        """Wait for the last save. May be called twice."""
        self.wait()
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None

    def __enter__(self) -> FaultTolerance:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:  # else other ranks may be gone, and waiting for them would be for ever
            self.close()

    def _beat(self) -> None:
        if self._watchdog is not None:
            self._watchdog.beat()

    def _make_folder(self) -> None:
        failure = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            failure = error.strerror
        if any(failures := groups.exchanged(failure, self._group)):
            raise UsageError(f"the folder {self.folder} cannot be made: {next(filter(None, failures))}")
        if groups.rank() == 0:
            for name in clear_unfinished(self.folder):
                self._log.tell(
                    "unfinished", 0, f"{name} was being written when training ended; it is taken away"
                )
            for number, where in read_hangs(self.folder / "hangs").items():
                self._log.tell("hung", 0, f"rank {number} was ended by its watchdog: it {where}")
            shutil.rmtree(self.folder / "hangs", ignore_errors=True)
        groups.exchanged(None, self._group)

    def _restore(self) -> int:
        for folder in [Path(path) for path in groups.exchanged(newest_first(self.folder), self._group)[0]]:
            checkpoint, wrong = self._checked(folder)
            if checkpoint is not None and wrong is None:
                self._take_up(checkpoint)
                return checkpoint.step
            if groups.rank() == 0:
                set_aside(folder)
            step = int(folder.name.removeprefix("step-"))
            text = f"the checkpoint of step {step} is corrupt ({wrong}); the one before it is taken"
            self._log.tell("corrupt", step, text)
            groups.exchanged(None, self._group)
        return 0

    def _checked(self, folder: Path) -> tuple[Checkpoint | None, str | None]:
        """A checkpoint, and what is wrong with it; the ranks share the hashing."""
        checkpoint, wrong = None, None
        try:
            checkpoint = read_checkpoint(folder)
            name = checkpoint.wrong_file(groups.rank(), groups.world_size())
            wrong = name and f"{name} is missing or not as it was written"
        except InputError as error:
            wrong = str(error)
        found = groups.exchanged(wrong, self._group)
        return checkpoint, next(filter(None, found), None)

    def _take_up(self, checkpoint: Checkpoint) -> None:
        assert self._state is not None
        _, tensors = self._state.sharded()
        _check_names(set(tensors), saved_names(checkpoint.folder), checkpoint)
        load_tensors(tensors, checkpoint.folder, self._group)
        self._state.set_sharded(checkpoint.state["sharded"], tensors)
        self._state.set_of_all(checkpoint.state, checkpoint.step)
        self._set_of_rank(checkpoint)
        self.last_saved_step = checkpoint.step
        ranks = groups.world_size()
        self._log.tell("resumed", checkpoint.step, f"training goes on after step {checkpoint.step}")
        if checkpoint.world_size != ranks:
            kind: Any = "fewer_ranks" if ranks < checkpoint.world_size else "more_ranks"
            text = f"the checkpoint of {checkpoint.world_size} ranks is cut anew for {ranks}"
            self._log.tell(kind, checkpoint.step, text)

    def _set_of_rank(self, checkpoint: Checkpoint) -> None:
        assert self._state is not None
        number = groups.rank()
        if number >= checkpoint.world_size:
            self._state.begin_new_rank(checkpoint.step * 1_000_003 + number)
            return
        state = json.loads((checkpoint.folder / rank_file(number)).read_bytes())
        if state["data"] is not None and checkpoint.world_size != groups.world_size():
            raise UsageError(
                f"the checkpoint has the positions of {checkpoint.world_size} ranks' own loaders, which "
                f"cannot be divided over {groups.world_size()}: give protect(data=DataOrder(...)), which can"
            )
        self._state.set_of_rank(state)


def _check_names(own: set[str], saved: set[str], checkpoint: Checkpoint) -> None:
    if own != saved:
        lacking, foreign = sorted(saved - own)[:3], sorted(own - saved)[:3]
        raise UsageError(
            f"the checkpoint {checkpoint.folder} is of another model or optimizer: it has "
            f"{', '.join(lacking) or 'nothing more'}, and lacks {', '.join(foreign) or 'nothing'}; choose "
            "another folder, or build what it was made of"
        )
