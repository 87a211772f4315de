"""State dicts in one compressed file: a JSON table in front, the parts of each tensor behind it.

    8 bytes   b"MEMFITC1"
    8 bytes   length of the table, little-endian
    table     JSON: ``tree`` (the nesting, tensors by number) and ``tensors`` (type, shape, codec, and of each
              part its type, place, length and CRC-32)
    parts     bytes, each part aligned to 64

Nothing is executed on reading, and a file that was cut or changed is noticed.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from memfit.core.errors import InputError, UsageError
from memfit.core.files import write_atomically
from memfit.techniques.codecs import CODECS
from memfit.techniques.codecs.base import from_bytes, raw_bytes
from memfit.techniques.compressed_tensor import RAW, CompressedTensor, plain_tensor

if TYPE_CHECKING:
    from memfit.techniques.compression import MemoryCompression

MAGIC = b"MEMFITC1"
_ALIGNMENT = 64
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype.itemsize
}


def save_checkpoint(compression: MemoryCompression, state: Any, path: str | os.PathLike[str]) -> Path:
    """See `MemoryCompression.save`."""
    writer = _Writer(compression)
    tree = writer.tree(state, "state")
    table = json.dumps({"version": 1, "tree": tree, "tensors": writer.tensors}).encode()
    head = MAGIC + len(table).to_bytes(8, "little") + table
    return write_atomically(path, b"".join([head, bytes(-len(head) % _ALIGNMENT), *writer.pieces]))


class _Writer:
    """Collects tensors, each storage with the same view once."""

    def __init__(self, compression: MemoryCompression) -> None:
        self._compression = compression
        self._known: dict[tuple[Any, ...], int] = {}
        self._held: list[Tensor] = []
        self._end = 0
        self.tensors: list[dict[str, Any]] = []
        self.pieces: list[bytes] = []

    def tree(self, value: Any, place: str) -> Any:
        """The JSON form of a value."""
        if isinstance(value, Tensor):
            return {"tensor": self._number(value, place)}
        if isinstance(value, Mapping):
            pairs = [[_key(key, place), self.tree(item, f"{place}[{key!r}]")] for key, item in value.items()]
            return {"dict": pairs}
        if isinstance(value, (list, tuple)):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [self.tree(item, f"{place}[{n}]") for n, item in enumerate(value)]}
        if value is None or isinstance(value, (bool, int, str)):
            return {"value": value}
        if isinstance(value, float):
            return {"float": value.hex()}
        raise UsageError(
            f"{place} is a {type(value).__name__}: a compressed checkpoint holds tensors, dicts, lists, "
            "tuples, numbers, texts and None; leave it out or store it beside"
        )

    def _number(self, tensor: Tensor, place: str) -> int:
        try:
            plain = plain_tensor(tensor)
        except UsageError as error:
            raise UsageError(f"{place}: {error}") from error
        key = (
            plain.untyped_storage().data_ptr(),
            plain.storage_offset(),
            plain.shape,
            plain.stride(),
            plain.dtype,
        )
        if plain.numel() and key in self._known:
            return self._known[key]
        self._held.append(plain)  # its address must not be another's later
        packed = self._compression.compress(plain)
        self.tensors.append(
            {
                "dtype": _name(packed.dtype),
                "shape": list(packed.shape),
                "codec": packed.codec,
                "parts": [self._part(part) for part in packed.parts],
            }
        )
        self._known[key] = len(self.tensors) - 1
        return len(self.tensors) - 1

    def _part(self, part: Tensor) -> dict[str, Any]:
        data = raw_bytes(part.cpu().contiguous()).numpy().tobytes()
        place = self._end
        self.pieces += [data, bytes(-len(data) % _ALIGNMENT)]
        self._end += len(data) + len(self.pieces[-1])
        return {"dtype": _name(part.dtype), "at": place, "bytes": len(data), "crc32": zlib.crc32(data)}


def load_checkpoint(path: str | os.PathLike[str], *, device: Any = "cpu") -> Any:
    """See `MemoryCompression.load`."""
    try:
        data = np.fromfile(path, np.uint8)
    except OSError as error:
        raise InputError(f"{path}: cannot read it: {error.strerror or error}") from error
    if data[:8].tobytes() != MAGIC:
        raise InputError(f"{path}: not a compressed checkpoint of memfit (it does not start with {MAGIC!r})")
    length = int.from_bytes(data[8:16].tobytes(), "little")
    try:
        table = json.loads(data[16 : 16 + length].tobytes())
        start = 16 + length + -(16 + length) % _ALIGNMENT
        tensors = [_read(entry, data[start:]).to(device) for entry in table["tensors"]]
        return _value(table["tree"], tensors)
    except (KeyError, TypeError, IndexError, ValueError, RuntimeError) as error:
        raise InputError(f"{path}: broken: {type(error).__name__}: {error}; save it again") from error
    except InputError as error:
        raise InputError(f"{path}: broken: {error}; save it again") from error


def _read(entry: Mapping[str, Any], data: Any) -> Tensor:
    parts = []
    for part in entry["parts"]:
        piece = data[part["at"] : part["at"] + part["bytes"]]
        if len(piece) != part["bytes"] or zlib.crc32(piece) != part["crc32"]:
            raise InputError("a part is cut off or changed")
        parts.append(from_bytes(torch.from_numpy(piece.copy()), _DTYPES[part["dtype"]]))
    if entry["codec"] != RAW and entry["codec"] not in CODECS:
        raise InputError(f"made with a codec {entry['codec']!r} that this memfit has not")
    packed = CompressedTensor(
        codec=entry["codec"],
        parts=tuple(parts),
        shape=tuple(entry["shape"]),
        dtype=_DTYPES[entry["dtype"]],
        device=torch.device("cpu"),
    )
    return packed.flat().view(packed.shape)


def _value(tree: Mapping[str, Any], tensors: list[Tensor]) -> Any:
    ((kind, content),) = tree.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _value(item, tensors) for key, item in content}
    if kind in ("list", "tuple"):
        items = [_value(item, tensors) for item in content]
        return items if kind == "list" else tuple(items)
    return float.fromhex(content) if kind == "float" else content


def _key(key: Any, place: str) -> str | int:
    if isinstance(key, (str, int)) and not isinstance(key, bool):
        return key
    raise UsageError(
        f"{place} has the key {key!r}: keys of a compressed checkpoint are texts or whole numbers"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
