"""Tensors of all ranks to and from a folder, by PyTorch's distributed checkpoint, without its unsafe reading.

PyTorch reads the file ``.metadata`` with a plain unpickler, which runs what a forged file tells it to. Here
only the names that such a file has are let through; tensors are read with ``weights_only``, by PyTorch
itself.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from memfit.core.errors import InputError
from memfit.distributed.groups import Group

_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
}  # fmt: skip


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype) or found is torch.Size:
            return found
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong in it")


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(str(self.path)) / ".metadata"
        try:
            metadata = _Restricted(io.BytesIO(path.read_bytes())).load()
        except (OSError, pickle.UnpicklingError, AttributeError, EOFError, ValueError) as error:
            raise InputError(f"{path} is no metadata of a checkpoint: {error}") from error
        if not isinstance(metadata, Metadata):
            raise InputError(f"{path} is no metadata of a checkpoint, but a {type(metadata).__name__}")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def save_tensors(tensors: Mapping[str, torch.Tensor], folder: Path, group: Group) -> Future[Any]:
    """Copy the tensors to the host at once, and write them in a thread; every rank must call this."""
    _quiet_without_group()
    writer = FileSystemWriter(str(folder), single_file_per_rank=True, sync_files=True, thread_count=1)
    future: Any = async_save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)
    return future  # type: ignore[no-any-return]


def _quiet_without_group() -> None:
    """PyTorch warns in each save of a process that is alone; it warns in its thread, so for good."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def load_tensors(tensors: Mapping[str, torch.Tensor], folder: Path, group: Group) -> None:
    """Fill tensors with what a checkpoint has under their names; shards may be cut otherwise than saved."""
    _quiet_without_group()
    load(dict(tensors), storage_reader=_Reader(str(folder)), process_group=group, no_dist=group is None)


def saved_names(folder: Path) -> set[str]:
    """The names of the tensors that a checkpoint has."""
    return set(_Reader(str(folder)).read_metadata().state_dict_metadata)
