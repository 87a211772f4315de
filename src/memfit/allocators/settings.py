"""The settings string of PyTorch's CUDA allocator (``PYTORCH_ALLOC_CONF``), read as PyTorch 2.14 reads it.

Verdicts are PyTorch's own, also where they are lenient (separators between entries are not looked at, text
behind a number is ignored); what it misreads in silence comes back as a warning.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from memfit.core.errors import UsageError

MIB = 1 << 20
SMALL_LIMIT_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
LARGE_SEGMENT_LIMIT_BYTES = 10 * MIB
BLOCK_BYTES = 512
UNLIMITED_BYTES = 1 << 62

ROUNDUP_INTERVALS = 16  # powers of two from 1 MiB to 64 GiB

_NUMBER = re.compile(r"[+-]?\d+")
_REAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


@dataclass(frozen=True, kw_only=True)
class CachingSettings:
    """Settings of the caching allocator; the defaults are PyTorch's.

    ``roundup_power2_divisions[i]`` holds for sizes from 2^i MiB to 2^(i+1) MiB (the first also for all
    below, the last for all above); 0 and 1 mean no rounding beyond 512 bytes.
    """

    max_split_size_bytes: int = UNLIMITED_BYTES
    max_non_split_rounding_bytes: int | None = None
    roundup_power2_divisions: tuple[int, ...] = (0,) * ROUNDUP_INTERVALS
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False
    large_segment_bytes: int = LARGE_SEGMENT_BYTES
    per_process_memory_fraction: float = 1.0
    throw_on_cudamalloc_oom: bool = False
    backend: str = "native"

    @property
    def non_split_rounding_bytes(self) -> int:
        """By how much an unsplittable block may exceed a request (PyTorch's default: one large segment)."""
        if self.max_non_split_rounding_bytes is None:
            return self.large_segment_bytes
        return self.max_non_split_rounding_bytes


@dataclass(frozen=True, kw_only=True)
class ParsedSettings:
    """What a settings string means, and what PyTorch would have misread in silence."""

    settings: CachingSettings
    warnings: tuple[str, ...] = ()


def parse_settings(text: str) -> ParsedSettings:
    """Read a value of ``PYTORCH_ALLOC_CONF`` (or ``PYTORCH_CUDA_ALLOC_CONF``).

    Raises:
        UsageError: PyTorch would refuse the value; the message says why and, if it can, what was meant.

    Examples:
        >>> parse_settings("max_split_size_mb:128,expandable_segments:True").settings.expandable_segments
        True
    """
    return _Reader(text).read()


class _Reader:
    """One pass over the tokens of a settings string."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = _tokens(text)
        self.at = 0
        self.values: dict[str, Any] = {}
        self.warnings: list[str] = []

    def read(self) -> ParsedSettings:
        self.values["large_segment_bytes"] = self._large_segment_bytes()
        while self.at < len(self.tokens):
            key = self.tokens[self.at]
            reader = KEYS.get(key)
            if reader is None:
                self._refuse_key(key)
            self.at += 2  # PyTorch steps over the ':' without a look
            reader(self, key)
            self.at += 2  # and over the ','
        settings = replace(CachingSettings(), **self.values)
        self._warn_of_pairs(settings)
        return ParsedSettings(settings=settings, warnings=tuple(self.warnings))

    def _large_segment_bytes(self) -> int:
        """The other limits depend on this one, so PyTorch reads it before them, wherever it stands."""
        if "large_segment_size_mb" not in self.tokens:
            return LARGE_SEGMENT_BYTES
        self.at = self.tokens.index("large_segment_size_mb") + 2
        size_mib = self.whole("large_segment_size_mb")
        self.at = 0
        if size_mib * MIB <= LARGE_SEGMENT_LIMIT_BYTES:
            self.refuse(f"large_segment_size_mb must be above 10, not {size_mib}")
        return size_mib * MIB

    def token(self, key: str) -> str:
        if self.at >= len(self.tokens):
            self.refuse(f"{key} has no value; write {key}:VALUE")
        return self.tokens[self.at]

    def whole(self, key: str) -> int:
        token = self.token(key)
        found = _NUMBER.match(token)
        if found is None:
            self.refuse(f"{key} needs a whole number, not {token!r}")
        value = int(found.group())
        rest = token[found.end() :]
        if abs(value) >= 1 << 64:
            self.refuse(f"{key} is far too large: {token!r}")
        if rest:
            self.warnings.append(f"{key}:{token} is read as {value}; {rest!r} is ignored")
        if value < 0:
            self.warnings.append(f"{key}:{token} wraps around to a huge number, which is no limit at all")
            value += 1 << 64
        return value

    def real(self, key: str) -> float:
        token = self.token(key)
        found = _REAL.match(token)
        if found is None:
            self.refuse(f"{key} needs a number, not {token!r}")
        if rest := token[found.end() :]:
            self.warnings.append(f"{key}:{token} is read as {found.group()}; {rest!r} is ignored")
        return float(found.group())

    def boolean(self, key: str) -> bool:
        token = self.token(key)
        if token not in ("True", "False"):
            meant = {"true": "True", "1": "True", "on": "True", "yes": "True"}.get(token.lower(), "False")
            self.refuse(f"{key} takes True or False, spelt so, not {token!r}; write {key}:{meant}")
        return token == "True"

    def refuse(self, why: str) -> NoReturn:
        raise UsageError(f"allocator settings {self.text!r}: {why}")

    def _refuse_key(self, key: str) -> NoReturn:
        bare = key.strip("\"'")
        if bare != key:
            self.refuse(
                f"the quotation marks became part of the value; write {self.text.strip(chr(34) + chr(39))}"
            )
        name, _, value = key.partition("=")
        if name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            self.refuse("the variable's name is repeated inside its value; leave it out")
        if value and name in KEYS:
            self.refuse(f"'=' stands where ':' should; write {name}:{value}")
        if self.at and not key.strip(","):
            self.refuse("there is an empty entry; write one comma between entries")
        if self.at:
            self.refuse(f"{key!r} stands where a key should; entries are separated by one comma")
        close = difflib.get_close_matches(name, KEYS, n=1)
        self.refuse(
            f"unknown key {key!r}" + (f"; did you mean {close[0]}?" if close else "; entries are KEY:VALUE")
        )

    def _warn_of_pairs(self, settings: CachingSettings) -> None:
        if settings.expandable_segments and settings.max_split_size_bytes < UNLIMITED_BYTES:
            self.warnings.append("max_split_size_mb and expandable_segments work against each other; use one")
        if settings.backend == "cudaMallocAsync" and self.text.count(":") > 1:
            self.warnings.append("backend:cudaMallocAsync ignores the other settings")


def _tokens(text: str) -> list[str]:
    return [token for token in re.split(r"([,:\[\]])", "".join(text.split())) if token]


def _max_split_size(reader: _Reader, key: str) -> None:
    reader.values["max_split_size_bytes"] = min(_at_least_a_segment(reader, key) * MIB, UNLIMITED_BYTES)


def _max_non_split_rounding(reader: _Reader, key: str) -> None:
    reader.values["max_non_split_rounding_bytes"] = min(
        _at_least_a_segment(reader, key) * MIB, UNLIMITED_BYTES
    )


def _at_least_a_segment(reader: _Reader, key: str) -> int:
    value = reader.whole(key)
    least: int = reader.values["large_segment_bytes"] // MIB
    if value < least:
        reader.refuse(f"{key} must be at least {least} (one large segment), not {value}")
    return value


def _garbage_collection(reader: _Reader, key: str) -> None:
    value = reader.real(key)
    if not 0.0 < value < 1.0:
        reader.refuse(f"{key} must lie between 0 and 1 (both excluded), not {value:g}")
    reader.values["garbage_collection_threshold"] = value


def _memory_fraction(reader: _Reader, key: str) -> None:
    value = reader.real(key)
    if not 0.0 <= value <= 1.0:
        reader.refuse(f"{key} must lie between 0 and 1, not {value:g}")
    reader.values["per_process_memory_fraction"] = value


def _roundup(reader: _Reader, key: str) -> None:
    if reader.token(key) != "[":
        divisions = reader.whole(key)
        if not _power_of_two(divisions):
            reader.refuse(f"{key} must be a power of two, not {divisions}")
        reader.values["roundup_power2_divisions"] = (divisions,) * ROUNDUP_INTERVALS
        return
    reader.values["roundup_power2_divisions"] = tuple(_roundup_list(reader, key))


def _roundup_list(reader: _Reader, key: str) -> list[int]:
    table = [0] * ROUNDUP_INTERVALS
    first, last = True, -1
    reader.at += 1
    while reader.token(f"the list of {key}") != "]":
        bound = reader.token(key)
        interval = 0 if bound == ">" else reader.whole(key)
        reader.at += 2
        divisions = reader.whole(key)
        if divisions and not _power_of_two(divisions):
            reader.refuse(f"{key}: {divisions} divisions; it must be a power of two, or 0 for none")
        if bound == ">":
            table[last + 1 :] = [divisions] * (ROUNDUP_INTERVALS - last - 1)
        else:
            if not _power_of_two(interval):
                reader.refuse(f"{key}: interval {interval} must be a power of two (MiB)")
            last = min(interval.bit_length() - 1, ROUNDUP_INTERVALS - 1)
            table[: last if first else 0] = [divisions] * (last if first else 0)
            table[last] = divisions
            first = False
        reader.at += 1
        if reader.at < len(reader.tokens) and reader.tokens[reader.at] != "]":
            reader.at += 1
    return table


def _power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def _backend(reader: _Reader, key: str) -> None:
    name = reader.token(key)
    if name not in ("native", "cudaMallocAsync"):
        reader.refuse(f"unknown backend {name!r}; it is native or cudaMallocAsync, spelt so")
    reader.values["backend"] = name


def _flag(name: str) -> Callable[[_Reader, str], None]:
    def read(reader: _Reader, key: str) -> None:
        reader.values[name] = reader.boolean(key)

    return read


def _ignored_flag(reader: _Reader, key: str) -> None:
    reader.boolean(key)


def _ignored_size(reader: _Reader, key: str) -> None:
    if reader.whole(key) == 0:
        reader.refuse(f"{key} must be above 0")


def _ignored_number(reader: _Reader, key: str) -> None:
    reader.whole(key)


def _register_threads(reader: _Reader, key: str) -> None:
    value = reader.whole(key)
    if not _power_of_two(value) or value > 128:
        reader.refuse(f"{key} must be a power of two up to 128, not {value}")


KEYS: dict[str, Callable[[_Reader, str], None]] = {
    "max_split_size_mb": _max_split_size,
    "max_non_split_rounding_mb": _max_non_split_rounding,
    "large_segment_size_mb": _ignored_number,  # read beforehand
    "garbage_collection_threshold": _garbage_collection,
    "roundup_power2_divisions": _roundup,
    "expandable_segments": _flag("expandable_segments"),
    "per_process_memory_fraction": _memory_fraction,
    "throw_on_cudamalloc_oom": _flag("throw_on_cudamalloc_oom"),
    "backend": _backend,
    # These concern host memory, locks and graphs: checked, and of no effect on where a block lies.
    "release_lock_on_cudamalloc": _ignored_flag,
    "release_lock_on_hipmalloc": _ignored_flag,
    "graph_capture_record_stream_reuse": _ignored_flag,
    "pinned_use_cuda_host_register": _ignored_flag,
    "pinned_use_hip_host_register": _ignored_flag,
    "pinned_use_background_threads": _ignored_flag,
    "pinned_num_register_threads": _register_threads,
    "pinned_reserve_segment_size_mb": _ignored_size,
    "pinned_max_cached_size_mb": _ignored_number,
    "pinned_max_round_threshold_mb": _ignored_number,
}
"""Every key that PyTorch 2.14 knows."""


def round_size(size_bytes: int, settings: CachingSettings) -> int:
    """The block size in bytes for a request: 512-byte steps, or fractions of a power of two if so set.

    Examples:
        >>> round_size(1, CachingSettings()), round_size(513, CachingSettings())
        (512, 1024)
    """
    if size_bytes < BLOCK_BYTES:
        return BLOCK_BYTES
    interval = min(max(size_bytes.bit_length() - 21, 0), ROUNDUP_INTERVALS - 1)
    divisions = settings.roundup_power2_divisions[interval]
    if divisions > 1 and size_bytes > BLOCK_BYTES * divisions:
        step = (1 << (size_bytes.bit_length() - 1)) // divisions
        return -(-size_bytes // step) * step
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def segment_bytes(size_bytes: int, settings: CachingSettings) -> int:
    """What is taken from the device for a (rounded) ``size_bytes`` that no cached block serves."""
    if size_bytes <= SMALL_LIMIT_BYTES:
        return SMALL_SEGMENT_BYTES
    if size_bytes < LARGE_SEGMENT_LIMIT_BYTES:
        return settings.large_segment_bytes
    return -(-size_bytes // SMALL_SEGMENT_BYTES) * SMALL_SEGMENT_BYTES
