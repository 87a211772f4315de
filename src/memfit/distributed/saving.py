"""One save: tensors and the rest to a folder in a thread, while training goes on; whole on all ranks or not
at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from memfit.distributed.checkpoint_folder import complete, file_hash, keep_newest, partial_folder
from memfit.distributed.groups import Group, exchanged, rank, world_size
from memfit.distributed.tensor_files import save_tensors


class Save:
    """A save that is under way. Every rank makes one, for the same step, in the same order.

    Its thread is the only one that uses ``group`` until `finish` returns.
    """

    def __init__(
        self,
        root: Path,
        step: int,
        *,
        tensors: Mapping[str, torch.Tensor],
        marker: Mapping[str, Any],
        of_rank: Mapping[str, Any],
        keep: int,
        group: Group,
    ) -> None:
        self.step = step
        self.failure: str | None = None
        self._root, self._keep, self._group = root, keep, group
        self._partial = partial_folder(root, step)
        self._marker, self._of_rank = marker, of_rank
        self._future: Future[Any] | None = None
        self.failure = self._first_failure(self._prepare())
        if self.failure is None:
            self._future = save_tensors(tensors, self._partial, group)
        self._thread = threading.Thread(target=self._work, name="memfit-checkpoint", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Waits until the checkpoint is whole, or known not to be."""
        self._thread.join()

    def _prepare(self) -> str | None:
        if rank() != 0:
            return None
        try:
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial.mkdir(parents=True)
        except OSError as error:
            return _cause(error)
        return None

    def _work(self) -> None:
        if self._future is None:
            return
        try:
            self._write_and_agree(self._future)
        except RuntimeError as error:  # another rank is gone; the training itself finds that out, too
            self.failure = f"another rank was lost: {_cause(error)}"

    def _write_and_agree(self, future: Future[Any]) -> None:
        failure, hashes = None, {}
        try:
            future.result()
            hashes = self._written()
        except (Exception, CheckpointException) as error:  # noqa: BLE001  # said, and training goes on
            failure = _cause(error)
        self.failure = self._first_failure(failure)
        everyone = exchanged(hashes, self._group)
        if self.failure is None:
            merged = {name: value for part in everyone for name, value in part.items()}
            self.failure = self._first_failure(self._complete(merged))
        if self.failure is not None and rank() == 0:
            shutil.rmtree(self._partial, ignore_errors=True)

    def _written(self) -> dict[str, str]:
        """Writes this rank's own file; the hashes of all that it wrote."""
        name = rank_file(rank())
        with (self._partial / name).open("w", encoding="utf-8") as file:
            json.dump(self._of_rank, file)
            file.flush()
            os.fsync(file.fileno())
        mine = [path for path in self._partial.iterdir() if path.name.startswith(f"__{rank()}_")]
        mine += [self._partial / ".metadata"] if rank() == 0 else []
        return {path.name: file_hash(path) for path in [*mine, self._partial / name]}

    def _complete(self, hashes: Mapping[str, str]) -> str | None:
        if rank() != 0:
            return None
        try:
            complete(
                self._partial,
                {"step": self.step, "world_size": world_size(), "hashes": hashes, "state": self._marker},
            )
        except OSError as error:
            return _cause(error)
        keep_newest(self._root, self._keep)
        return None

    def _first_failure(self, own: str | None) -> str | None:
        found = exchanged(own, self._group)
        return next((f"rank {number}: {text}" for number, text in enumerate(found) if text), None)


def rank_file(number: int) -> str:
    """The name of a rank's own file in a checkpoint."""
    return f"rank-{number:05d}.json"


def _cause(error: BaseException) -> str:
    """The first system error behind a failure, in words; else the failure's own text."""
    for one in _chain(error):
        if isinstance(one, OSError) and one.errno is not None:
            full = " (the disk is full)" if one.errno in (errno.ENOSPC, errno.EDQUOT) else ""
            return f"{os.strerror(one.errno)}{full}"
    text = str(error).strip()
    return (text.splitlines() or [type(error).__name__])[-1][:300]


def _chain(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        inner = [one[0] for one in error.failures.values()] if isinstance(error, CheckpointException) else []
        for one in inner:
            found += [other for other in _chain(one) if other not in found]
        error = error.__cause__ or error.__context__
    return found
