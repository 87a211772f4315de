"""One engine that makes tensors smaller: data, saved activations, gradients, weights and checkpoints."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from memfit.core.errors import InputError, UsageError
from memfit.core.exactness import Exactness
from memfit.techniques.base import Technique, Undo, refuse_second, whole_number

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from memfit.capture.graph import StepGraph
    from memfit.techniques.codecs import Codec
    from memfit.techniques.compressed_tensor import CompressedTensor
    from memfit.techniques.compression_gradients import GradientAccumulator, GradientHook, Method
    from memfit.techniques.compression_report import CompressionReport
    from memfit.techniques.saving import Saving

Use = Literal["data", "activations"]

_CANDIDATES: Mapping[Use, tuple[str, ...]] = {
    "data": ("exponent-split", "zstd", "lz4", "bitmap", "bf16", "int8", "fp8", "int4"),
    "activations": ("exponent-split", "bitmap", "bf16", "int8", "fp8", "fp8-e5m2", "int4"),
}
_FOR_BYTES = ("zstd", "lz4", "gzip")
_ACTIVATION_ERROR = 0.01
"""What "auto" may do to saved activations: int8's error on them, a third of a percent of the gradients'."""
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, kw_only=True)
class MemoryCompression(Technique):
    """Keeps tensors in fewer bytes.

    ``compress`` and ``decompress`` are for data. ``apply`` keeps what a model's blocks save for the backward
    pass compressed until it is used. ``save`` and ``load`` are for state dicts. ``compress_gradients`` and
    ``gradient_accumulator`` are for gradients. ``report()`` holds it all against ``compression_ratio``.

    Args:
        compression_ratio: bytes after / bytes before to aim for, in (0, 1]. "auto" takes the codec with the
            least error that reaches it; what cannot reach it within ``max_error`` is made as small as can be.
        compression_algorithm: ``"auto"``, or a codec: lossless ``"gzip"``, ``"zstd"``, ``"lz4"``,
            ``"exponent-split"``, ``"bitmap"`` (zeros); lossy ``"bf16"``, ``"int8"``, ``"int4"``, ``"fp8"``,
            ``"fp8-e5m2"``. A lossy codec leaves what is no float (indices, masks) to a lossless one.
        max_error: the relative error (2-norms, measured on a sample) that "auto" may make; ``None`` is 0 for
            data and weights, 0.01 for saved activations.
        blocks: modules whose saved activations are compressed; by default the repeated blocks of the model.
        min_elements: smaller saved tensors stay as they are.

    Examples:
        >>> import torch
        >>> compression = MemoryCompression(compression_algorithm="int8")
        >>> small = compression.compress(torch.linspace(-1, 1, 6400))
        >>> small.nbytes, small.original_nbytes
        (6800, 25600)
        >>> bool((compression.decompress(small) - torch.linspace(-1, 1, 6400)).abs().max() < 1 / 254)
        True
    """

    name: ClassVar[str] = "memory_compression"

    compression_ratio: float = 0.8
    compression_algorithm: str = "auto"
    max_error: float | None = None
    blocks: Sequence[str] | None = None
    min_elements: int = 4096

    def __post_init__(self) -> None:
        from memfit.techniques.compression_report import Ledger
        from memfit.techniques.saved_tensors_blocks import checked_block_names

        check_algorithm(self.compression_algorithm, technique=self.name, others=("auto",))
        if not _is_number(self.compression_ratio) or not 0 < self.compression_ratio <= 1:
            raise UsageError(
                f"{self.name}: compression_ratio is bytes after / bytes before, above 0 and at most 1, not "
                f"{self.compression_ratio!r}"
            )
        if self.max_error is not None and (not _is_number(self.max_error) or self.max_error < 0):
            raise UsageError(f"{self.name}: max_error is a relative error from 0 on, not {self.max_error!r}")
        whole_number(self.min_elements, key="min_elements", technique=self.name)
        object.__setattr__(self, "blocks", checked_block_names(self.blocks, technique=self.name))
        object.__setattr__(self, "_ledger", Ledger())

    # -- data ------------------------------------------------------------------------------------------------

    def compress(self, data: Any) -> Any:
        """``data`` in fewer bytes.

        Args:
            data: a tensor or numpy array of any shape and type, or bytes.

        Returns:
            a `CompressedTensor` for tensors and arrays; for bytes, bytes, of which the first says how they
            were made. Never larger than the data, but for that one byte.

        Raises:
            UsageError: something else, or a lossy algorithm for bytes.
            CannotRunHere: the algorithm needs a package that is missing.
        """
        import numpy as np
        import torch

        from memfit.techniques.compressed_tensor import compressed_by, plain_tensor

        if isinstance(data, (bytes, bytearray, memoryview)):
            return self._compress_bytes(bytes(data))
        is_array = isinstance(data, np.ndarray)
        tensor = plain_tensor(torch.from_numpy(np.array(data, order="C")) if is_array else data)
        flat = tensor.contiguous().view(-1)
        codec, error = self.codec_for(flat, use="data")
        packed = compressed_by(codec, tensor, is_array=is_array)
        self._ledger.add(packed.codec, packed.original_nbytes, packed.nbytes, error)
        return packed

    def decompress(self, packed: CompressedTensor | bytes) -> Any:
        """What was compressed: a tensor on its device, an array, or bytes."""
        from memfit.techniques.compressed_tensor import CompressedTensor

        if isinstance(packed, CompressedTensor):
            tensor = packed.tensor()
            return tensor.numpy() if packed.is_array else tensor
        if not isinstance(packed, (bytes, bytearray, memoryview)):
            raise UsageError(f"decompress takes what compress gave, not a {type(packed).__name__}")
        return _decompress_bytes(bytes(packed))

    def _compress_bytes(self, data: bytes) -> bytes:
        import torch

        from memfit.techniques.codecs import CODECS, RAW_MARK
        from memfit.techniques.codecs.bytewise import BytesCodec
        from memfit.techniques.compression_choice import choose, sample_of

        name: str | None = self.compression_algorithm
        if name == "auto" and data:
            sample = sample_of(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            best = choose(sample, _FOR_BYTES, target=self.compression_ratio, max_error=0.0)
            name = best.codec if best is not None else None
        codec = CODECS.get(name or "")
        if codec is not None and not isinstance(codec, BytesCodec):
            raise UsageError(f"{name} is for tensors; bytes take auto, {', '.join(_FOR_BYTES)}")
        result = bytes([RAW_MARK]) + data
        if codec is not None:
            shrunk = bytes([codec.mark]) + _LENGTH.pack(len(data)) + codec.shrink(data)
            result = min(result, shrunk, key=len)
        self._ledger.add(codec.name if codec and result[0] else "raw", len(data), len(result))
        return result

    def codec_for(self, flat: Tensor, *, use: Use) -> tuple[Codec | None, float]:
        """The codec for these values, and its relative error where that was measured."""
        from memfit.techniques.codecs import CODECS
        from memfit.techniques.compression_choice import choose, sample_of

        if not flat.numel():
            return None, 0.0
        if self.compression_algorithm != "auto":
            codec = CODECS[self.compression_algorithm]
            if codec.takes(flat.dtype):
                return codec, 0.0
            return _for_no_floats(flat, use), 0.0
        candidates: Sequence[str] = [n for n in _CANDIDATES[use] if _can_run(CODECS[n], flat, use)]
        best = choose(
            sample_of(flat), candidates, target=self.compression_ratio, max_error=self._allowed_error(use)
        )
        return (CODECS[best.codec], best.error) if best is not None else (None, 0.0)

    def _allowed_error(self, use: Use) -> float:
        if self.max_error is not None:
            return self.max_error
        return _ACTIVATION_ERROR if use == "activations" else 0.0

    # -- state dicts -----------------------------------------------------------------------------------------

    def save(self, state: Any, path: str | os.PathLike[str]) -> Path:
        """Writes a state dict (of a model, an optimizer, or a nested one) compressed, whole or not at all.

        Tensors that share memory are stored once. UsageError for values that are neither tensors nor plain.
        """
        from memfit.techniques.compressed_checkpoint import save_checkpoint

        return save_checkpoint(self, state, path)

    @staticmethod
    def load(path: str | os.PathLike[str], *, device: Any = "cpu") -> Any:
        """Reads what `save` wrote. InputError says what is wrong with a file that is broken or another's."""
        from memfit.techniques.compressed_checkpoint import load_checkpoint

        return load_checkpoint(path, device=device)

    # -- gradients -------------------------------------------------------------------------------------------

    def compress_gradients(self, model: nn.Module, method: Method = "fp16", **settings: Any) -> GradientHook:
        """Sends the gradients of a DistributedDataParallel model in fewer bytes.

        Args:
            method: ``"fp16"``, ``"bf16"``, ``"powersgd"`` (``rank=``), or ``"topk"`` (``share=``), the last
                two with error feedback.
            settings: of the method.
        """
        from memfit.techniques.compression_gradients import register_hook

        return register_hook(model, method, **settings)

    def gradient_accumulator(self, model: nn.Module) -> GradientAccumulator:
        """Adds up the gradients of several backward passes in compressed form, with error feedback."""
        from memfit.techniques.compression_gradients import GradientAccumulator

        return GradientAccumulator(self, model)

    # -- saved activations -----------------------------------------------------------------------------------

    def exactness(self, model: nn.Module) -> Exactness:
        """``exact`` with a lossless codec (or "auto" with ``max_error=0``), else ``approximate``."""
        from memfit.techniques.codecs import CODECS

        if self.compression_algorithm == "auto":
            return "exact" if self.max_error == 0 else "approximate"
        return "exact" if CODECS[self.compression_algorithm].lossless else "approximate"

    def estimate(self, graph: StepGraph, model: nn.Module | None = None) -> Saving:
        """Without the model and ``blocks``, for all that the step saves."""
        from memfit.techniques.saved_tensors_blocks import chosen_blocks, kept_otherwise
        from memfit.techniques.saving import saving_of

        names = self.blocks if model is None else [name for name, _ in chosen_blocks(model, self.blocks)]
        ratio, note = (
            self._nominal_ratio,
            "by the codec's bytes for an element; decoded tensors count in full",
        )
        if self.compression_algorithm in ("gzip", "zstd", "lz4", "exponent-split", "bitmap"):
            note = "how far values shrink without loss is known from values only: a typical ratio"
        return saving_of(graph, kept_otherwise(graph, names, self.min_elements, ratio), note=note)

    def _nominal_ratio(self, dtype: str) -> float:
        import torch

        from memfit.techniques.codecs import CODECS
        from memfit.techniques.compression_choice import choose, try_codec

        kind = getattr(torch, "float32" if dtype == "tf32" else dtype, torch.float32)
        sample = torch.empty(0, dtype=kind, device="meta")
        if self.compression_algorithm == "auto":
            allowed = self._allowed_error("activations")
            names = [name for name in _CANDIDATES["activations"] if CODECS[name].bits is not None]
            best = choose(sample, names, target=self.compression_ratio, max_error=allowed)
            return best.ratio if best is not None else 1.0
        codec = CODECS[self.compression_algorithm]
        return min(try_codec(codec, sample).ratio, 1.0) if codec.takes(kind) else 1.0

    def change(self, model: nn.Module, optimizer: Optimizer | None) -> Undo:
        from memfit.techniques.combinations import refuse_combination
        from memfit.techniques.compressed_activations import ActivationPacker
        from memfit.techniques.saved_tensors import keep_in_blocks
        from memfit.techniques.saved_tensors_blocks import chosen_blocks

        refuse_second(model, MemoryCompression)
        refuse_combination(model, self)
        return keep_in_blocks(chosen_blocks(model, self.blocks), ActivationPacker(self), self.name)

    def report(self) -> CompressionReport:
        """What these settings did so far, on data and in models."""
        report: CompressionReport = self._ledger.report(self.compression_ratio)
        return report

    def reset_report(self) -> None:
        """Starts the report anew."""
        self._ledger.clear()

    @property
    def ledger(self) -> Any:
        """Where what is compressed is added up."""
        return self._ledger

    _ledger: ClassVar[Any]


def check_algorithm(name: Any, *, technique: str, others: tuple[str, ...]) -> None:
    """UsageError unless ``name`` is a codec's or one of ``others``."""
    from memfit.techniques.codecs import CODECS

    if name not in CODECS and name not in others:
        raise UsageError(
            f"{technique}: compression_algorithm is one of {', '.join((*others, *CODECS))}, not {name!r}"
        )


def _can_run(codec: Codec, flat: Tensor, use: Use) -> bool:
    """Codecs of the host stay off a GPU's activations; so does counting zeros, which waits for the GPU."""
    if flat.device.type == "cpu" or use == "data":
        return True
    return codec.on_device and (codec.bits is not None or _is_mask(flat))


def _for_no_floats(flat: Tensor, use: Use) -> Codec | None:
    """For what a lossy codec does not take: bits for masks; indices stay as they are on a GPU."""
    from memfit.techniques.codecs import CODECS

    if _is_mask(flat):
        return CODECS["bitmap"]
    return CODECS["exponent-split"] if flat.device.type == "cpu" else None


def _is_mask(flat: Tensor) -> bool:
    return str(flat.dtype) == "torch.bool"


def _decompress_bytes(packed: bytes) -> bytes:
    from memfit.techniques.codecs import CODECS, RAW_MARK
    from memfit.techniques.codecs.bytewise import BytesCodec

    by_mark = {codec.mark: codec for codec in CODECS.values()}
    codec = by_mark.get(packed[0]) if packed else None
    if packed and packed[0] == RAW_MARK:
        return packed[1:]
    if not isinstance(codec, BytesCodec) or len(packed) < 1 + _LENGTH.size:
        raise InputError("not what compress made of bytes: the first byte names no codec")
    (size_bytes,) = _LENGTH.unpack_from(packed, 1)
    return codec.grow(packed[1 + _LENGTH.size :], size_bytes)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value  # noqa: PLR0124
