"""General compressors on the bytes of a tensor, in host memory: gzip, zstd, lz4.

On dense floating-point numbers they gain little (1.08× for float32, since mantissas are noise): what they
are for is bytes, text, indices, masks and tensors with many equal values.
"""

from __future__ import annotations

import threading
import zlib
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import zstandard
from torch import Tensor

from memfit.core.errors import CannotRunHere, InputError
from memfit.techniques.codecs.base import Codec, Parts, from_bytes, raw_bytes

_THREAD = threading.local()


class BytesCodec(Codec):
    """A compressor of byte strings."""

    @abstractmethod
    def shrink(self, data: Any) -> bytes:
        """The compressed form of a buffer."""

    @abstractmethod
    def grow(self, data: Any, size_bytes: int) -> bytes:
        """The ``size_bytes`` that ``shrink`` was given. InputError for anything else."""

    def encode(self, flat: Tensor) -> Parts:
        return (as_tensor(self.shrink(raw_bytes(flat.cpu()).numpy().data)),)

    def decode(self, parts: Sequence[Tensor], numel: int, dtype: torch.dtype) -> Tensor:
        data = self.grow(parts[0].numpy().data, numel * dtype.itemsize)
        return from_bytes(as_tensor(data), dtype)


def as_tensor(data: bytes) -> Tensor:
    """The bytes as uint8, in memory that a caller may write to."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


class Gzip(BytesCodec):
    """DEFLATE at level 6 in a gzip envelope: what any other program reads. Slow (30 MB/s)."""

    name = "gzip"
    mark = 1

    def shrink(self, data: Any) -> bytes:
        packer = zlib.compressobj(6, wbits=31)
        return packer.compress(data) + packer.flush()

    def grow(self, data: Any, size_bytes: int) -> bytes:
        try:
            return _sized(zlib.decompress(data, wbits=31, bufsize=max(size_bytes, 1)), size_bytes, self.name)
        except zlib.error as error:
            raise InputError(f"not what {self.name} wrote: {error}") from error


class Zstd(BytesCodec):
    """Zstandard at level 1."""

    name = "zstd"
    mark = 2
    parameters: ClassVar[zstandard.ZstdCompressionParameters] = (
        zstandard.ZstdCompressionParameters.from_level(1)
    )

    def shrink(self, data: Any) -> bytes:
        def make() -> zstandard.ZstdCompressor:
            return zstandard.ZstdCompressor(compression_params=self.parameters)

        return bytes(_of_thread(self.name, make).compress(data))

    def grow(self, data: Any, size_bytes: int) -> bytes:
        if size_bytes == 0:
            return b""
        try:
            grown = _of_thread("unzstd", zstandard.ZstdDecompressor).decompress(
                data, max_output_size=size_bytes
            )
        except zstandard.ZstdError as error:
            raise InputError(f"not what {self.name} wrote: {error}") from error
        return _sized(grown, size_bytes, self.name)


class ZstdLiterals(Zstd):
    """Zstandard with a tiny table of matches, so that it spends its time on Huffman codes: for bytes whose
    values are skewed but whose order is noise, as exponents are. Faster than level 1 there, and smaller."""

    name = "zstd-literals"
    parameters = zstandard.ZstdCompressionParameters(
        strategy=zstandard.STRATEGY_FAST, window_log=17, chain_log=6, hash_log=6, search_log=1, min_match=7
    )


class LZ4(BytesCodec):
    """LZ4 blocks: the fastest; finds repeats only, none of which dense numbers have."""

    name = "lz4"
    mark = 3

    def shrink(self, data: Any) -> bytes:
        return _lz4().compress(data, store_size=False)  # type: ignore[no-any-return]

    def grow(self, data: Any, size_bytes: int) -> bytes:
        block = _lz4()
        try:
            return _sized(block.decompress(data, uncompressed_size=size_bytes), size_bytes, self.name)
        except block.LZ4BlockError as error:
            raise InputError(f"not what {self.name} wrote: {error}") from error


def _lz4() -> Any:
    try:
        import lz4.block
    except ImportError as error:
        raise CannotRunHere(
            "the codec lz4 needs the package lz4: pip install 'memfit[compression]', or use zstd"
        ) from error
    return lz4.block


def _of_thread(key: str, make: Any) -> Any:
    """Contexts of zstd are not for several threads at once, and the backward pass has a thread of its own."""
    if not hasattr(_THREAD, key):
        setattr(_THREAD, key, make())
    return getattr(_THREAD, key)


def _sized(data: bytes, size_bytes: int, name: str) -> bytes:
    if len(data) != size_bytes:
        raise InputError(f"not what {name} wrote: {len(data)} bytes where {size_bytes} are expected")
    return data
