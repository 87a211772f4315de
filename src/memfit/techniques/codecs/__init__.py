"""Codecs: ways to make tensors smaller, one idea a file, and the table of them all."""

from __future__ import annotations

from collections.abc import Mapping

from memfit.core.errors import UsageError
from memfit.techniques.codecs.base import Codec
from memfit.techniques.codecs.bitmap import Bitmap
from memfit.techniques.codecs.bytewise import LZ4, Gzip, Zstd
from memfit.techniques.codecs.exponent_split import ExponentSplit
from memfit.techniques.codecs.floats import FP8E4M3, FP8E5M2, BFloat16
from memfit.techniques.codecs.int4 import Int4
from memfit.techniques.codecs.int8 import Int8

CODECS: Mapping[str, Codec] = {
    codec.name: codec
    for codec in (
        Gzip(),
        Zstd(),
        LZ4(),
        ExponentSplit(),
        Bitmap(),
        BFloat16(),
        FP8E4M3(),
        FP8E5M2(),
        Int8(),
        Int4(),
    )
}
RAW_MARK = 0
"""The mark of data that no codec made smaller."""

__all__ = ["CODECS", "RAW_MARK", "Codec", "codec_called"]


def codec_called(name: str) -> Codec:
    """The codec of that name. UsageError with the names that there are."""
    if name not in CODECS:
        raise UsageError(f"no codec is called {name!r}; there are {', '.join(CODECS)}")
    return CODECS[name]
