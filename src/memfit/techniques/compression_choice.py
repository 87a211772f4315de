"""Which codec for these values: measured on a sample, by ratio and error first and by speed last.

The speed decides between codecs without an error only, so that what is computed never depends on how busy
the machine was.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from memfit.core.errors import CannotRunHere
from memfit.techniques.codecs import CODECS, Codec
from memfit.techniques.codecs.groups import GROUP

SAMPLE_RUNS, RUN_ELEMENTS = 4, 256 * GROUP
NOMINAL_ERRORS = {"bf16": 0.0017, "int8": 0.0061, "fp8": 0.026, "fp8-e5m2": 0.051, "int4": 0.091}
"""Relative errors (2-norms) on normally distributed values: for where there are no values to measure on."""
NOMINAL_RATIOS = {"gzip": 0.93, "zstd": 0.92, "lz4": 1.0, "exponent-split": 0.83, "bitmap": 0.5}
"""Bytes after / before on dense float32 (bitmap: half zeros): for the same."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What a codec did on a sample.

    Attributes:
        codec: its name.
        ratio: bytes after / bytes before.
        error: 2-norm of the difference / 2-norm of the finite values; 0 for lossless codecs.
        seconds: to encode and decode the sample.
    """

    codec: str
    ratio: float
    error: float
    seconds: float


def values_are_real(device: torch.device) -> bool:
    """Not on meta tensors, nor on a made-up GPU."""
    return device.type == "cpu" or (device.type == "cuda" and "MEMFIT_GPU_NAME" not in os.environ)


def sample_of(flat: Tensor) -> Tensor:
    """Four runs of neighbours, spread over the tensor; all of it when it is small."""
    if flat.numel() <= SAMPLE_RUNS * RUN_ELEMENTS:
        return flat
    step = (flat.numel() - RUN_ELEMENTS) // (SAMPLE_RUNS - 1)
    return torch.cat([flat[n * step :][:RUN_ELEMENTS] for n in range(SAMPLE_RUNS)])


def try_codec(codec: Codec, sample: Tensor) -> Trial:
    """Ratio, error and time of one codec on one sample; nominal figures where values are not real."""
    if not values_are_real(sample.device):
        width = 8 * sample.dtype.itemsize
        ratio = codec.bits / width if codec.bits is not None else NOMINAL_RATIOS[codec.name]
        return Trial(codec=codec.name, ratio=ratio, error=NOMINAL_ERRORS.get(codec.name, 0.0), seconds=0.0)
    start = _now(sample.device)
    parts = codec.encode(sample)
    back = codec.decode(parts, sample.numel(), sample.dtype)
    seconds = _now(sample.device) - start
    ratio = sum(part.nbytes for part in parts) / max(sample.nbytes, 1)
    error = 0.0 if codec.lossless else relative_error(sample, back)
    return Trial(codec=codec.name, ratio=ratio, error=error, seconds=seconds)


def choose(sample: Tensor, candidates: Iterable[str], *, target: float, max_error: float) -> Trial | None:
    """The candidate to use for values like these.

    Among those whose error is at most ``max_error``: of those that reach the ratio ``target``, the one with
    the least error, the fastest where errors are equal; when none reaches it, the one of the least ratio.
    ``None`` when nothing makes the sample smaller.
    """
    trials = []
    for name in candidates:
        if CODECS[name].takes(sample.dtype):
            try:
                trials.append(try_codec(CODECS[name], sample))
            except CannotRunHere:
                continue  # a codec whose package is missing is no candidate
    fit = [trial for trial in trials if trial.error <= max_error and trial.ratio < 1.0]
    reaching = [trial for trial in fit if trial.ratio <= target]
    if reaching:
        return min(reaching, key=lambda trial: (trial.error, trial.seconds, trial.codec))
    return min(fit, key=lambda trial: (trial.ratio, trial.codec), default=None)


def relative_error(values: Tensor, back: Tensor) -> float:
    """2-norm of the difference over the 2-norm, of the finite values."""
    finite = values.isfinite()
    true = torch.where(finite, values, 0).double()
    norm = float(true.norm())
    return float((torch.where(finite, back, 0).double() - true).norm()) / norm if norm else 0.0


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
