"""Checkpoints on disk: whole or not there, each file with its hash, the newest good one found again.

checkpoints/step-0000000200/checkpoint.json     the marker, written last: step, ranks, hash of each file
                           /.metadata, *.distcp  PyTorch's distributed checkpoint: all tensors
                           /rank-00000.json      random generators and data position of each rank
           /step-0000000300.partial/             being written; becomes step-0000000300 by one rename
           /step-0000000100.corrupt/             a file's hash was wrong when it was to be read
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.core.errors import InputError

MARKER = "checkpoint.json"
SCHEMA_VERSION = 1
_NAME = re.compile(r"step-(\d{10})")
_PARTIAL, _CORRUPT, _REPLACED = ".partial", ".corrupt", ".replaced"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A whole checkpoint.

    Attributes:
        folder: that it lies in.
        step: how many steps had been made.
        world_size: how many ranks wrote it.
        hashes: SHA-256 of each file but the marker, by name.
        state: the skeleton of the state, and what is no tensor.
    """

    folder: Path
    step: int
    world_size: int
    hashes: Mapping[str, str]
    state: Mapping[str, Any]

    def wrong_file(self, part: int = 0, parts: int = 1) -> str | None:
        """The first file that is missing or not as it was written; None when all are.

        Of ``parts`` readers, the one with the number ``part`` looks at its share only.
        """
        for name in sorted(self.hashes)[part::parts]:
            path = self.folder / name
            if not path.is_file() or file_hash(path) != self.hashes[name]:
                return name
        return None


def file_hash(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def partial_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of a step is written."""
    return root / f"step-{step:010d}{_PARTIAL}"


def whole_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies when it is whole."""
    return root / f"step-{step:010d}"


def complete(partial: Path, marker: Mapping[str, Any]) -> Path:
    """Turn a folder that has all files into a checkpoint: the marker, then one rename.

    An older checkpoint of the same step is put aside and taken away after.
    """
    text = json.dumps({"schema_version": SCHEMA_VERSION, **marker})
    with (partial / MARKER).open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    target = partial.with_name(partial.name.removesuffix(_PARTIAL))
    aside = target.with_name(target.name + _REPLACED)
    shutil.rmtree(aside, ignore_errors=True)
    if target.exists():
        target.rename(aside)
    partial.rename(target)
    _sync_folder(target.parent)
    shutil.rmtree(aside, ignore_errors=True)
    return target


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not every file system can
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def newest_first(root: Path) -> list[Path]:
    """The folders of whole checkpoints."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: path.name, reverse=True)


def read_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in a folder. Raises InputError where its marker is missing or broken."""
    try:
        marker = json.loads((folder / MARKER).read_bytes())
        if marker["schema_version"] != SCHEMA_VERSION:
            raise InputError(
                f"{folder}: schema_version is {marker['schema_version']!r}, not {SCHEMA_VERSION}"
            )
        return Checkpoint(
            folder=folder,
            step=int(marker["step"]),
            world_size=int(marker["world_size"]),
            hashes=dict(marker["hashes"]),
            state=marker["state"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder / MARKER}: no marker of a checkpoint: {error}") from error


def clear_unfinished(root: Path) -> list[str]:
    """Take away what a crash in the middle of a save left; the names of what was there.

    A checkpoint that was put aside and not yet replaced is put back.
    """
    gone = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        if path.name.endswith(_REPLACED):
            target = path.with_name(path.name.removesuffix(_REPLACED))
            if target.exists():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.rename(target)
        elif path.name.endswith(_PARTIAL):
            shutil.rmtree(path, ignore_errors=True)
            gone.append(path.name)
    return gone


def set_aside(folder: Path) -> None:
    """Mark a checkpoint as corrupt: it is kept for who wants to look, and never read again."""
    aside = folder.with_name(folder.name + _CORRUPT)
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)


def keep_newest(root: Path, count: int) -> None:
    """Take away all whole checkpoints but the ``count`` newest."""
    for folder in newest_first(root)[count:]:
        doomed = folder.with_name(folder.name + _PARTIAL)  # never half a checkpoint under a whole one's name
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
