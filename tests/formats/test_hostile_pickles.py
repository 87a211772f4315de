"""Pickles made to run something, to exhaust memory, or to crash: one clear line, and nothing else."""

from __future__ import annotations

import os
import pickle
import pickletools
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from memfit.core.errors import InputError
from memfit.formats import read_trace
from memfit.formats.pickles import load_plain

from .made import simple

HEAD = b"\x80\x04"


class Runs:
    """An object whose pickle calls a function when it is read."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self._call


def refused(content: bytes, tmp_path: Path) -> str:
    path = tmp_path / "evil.pickle"
    path.write_bytes(content)
    with pytest.raises(InputError) as failure:
        read_trace(path)
    message = str(failure.value)
    assert "\n" not in message and message.startswith(str(path))
    return message


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    "function", [os.system, eval, exec, subprocess.check_output, getattr], ids=lambda f: f.__name__
)
def test_nothing_is_called(function: Callable[..., object], protocol: int, tmp_path: Path) -> None:
    """Whatever protocol and function: refused by name, before anything is called."""
    marker = tmp_path / "ran"
    evil = Runs(function, f"touch {marker}" if function is not eval else f"open({str(marker)!r}, 'w')")
    content = pickle.dumps({"segments": [], "device_traces": [], "x": evil}, protocol=protocol)
    path = tmp_path / "evil.pickle"
    path.write_bytes(content)
    with open(path, "rb") as file, pytest.raises(InputError, match=r"it names .*Nothing was run"):
        load_plain(file, "evil")
    assert not marker.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"(S'true'\nios\nsystem\n.",
        b"(cos\nsystem\nS'true'\no.",
        HEAD + b"\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
        HEAD + b"\x8c\x08builtins\x8c\x04eval\x93)\x81.",
        b"\x80\x02c__builtin__\neval\n)\x81}b.",
        b"(dp0\nS'segments'\ncbuiltins\nset\n(tRs.",
    ],
    ids=["GLOBAL REDUCE", "INST", "OBJ", "STACK_GLOBAL", "NEWOBJ", "BUILD", "set"],
)
def test_every_way_to_name_something_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(content)
    with open(tmp_path / "p", "rb") as file, pytest.raises(InputError, match="refused: it names"):
        load_plain(file, "p")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\x80\x02}Pan outside object\n.", "outside the file"),
        (b"\x80\x02}\x82\x01.", "not a whole pickle"),
        (b"\x80\x02}q\x00X\x01\x00\x00\x00aK\x01R.", "not a whole pickle"),
        (b"\x80\x02}(R.", "not a whole pickle"),
        (b"\x80\x02.", "not a whole pickle"),
        (b"\x80\x05}\x97.", "not a whole pickle"),
    ],
    ids=["persistent id", "extension", "call of a number", "empty stack", "nothing", "out-of-band buffer"],
)
def test_broken_programs(content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(content)
    with open(tmp_path / "p", "rb") as file, pytest.raises(InputError, match=reason):
        load_plain(file, "p")


def deep_key() -> bytes:
    """A dictionary whose key is a tuple half a million levels deep: to hash it overflows the stack."""
    return HEAD + b"}" + b")" + b"\x85" * 500_000 + b"K\x01s."


BOMBS = {
    "memo index": HEAD + b"}r" + struct.pack("<I", 0x7FFFFFFF) + b".",
    "text length": HEAD + b"}\x8d" + struct.pack("<Q", 1 << 45) + b"abc",
    "bytes length": HEAD + b"}\x8e" + struct.pack("<Q", (1 << 62) - 1) + b"abc",
    "bytearray length": b"\x80\x05}\x96" + struct.pack("<Q", 1 << 44) + b"abc",
    "number length": HEAD + b"}\x8b" + struct.pack("<i", 0x7FFFFFFF) + b"abc",
    "negative length": HEAD + b"}\x8b" + struct.pack("<i", -5) + b"abc",
    "frame length": HEAD + b"\x95" + struct.pack("<Q", 1 << 60) + b"}.",
    "deep nesting": HEAD + b"]" * 2_000_000 + b"a" * 1_999_999 + b".",
    "deep key": deep_key(),
    "long number": b"(dp0\nL" + b"9" * 2_000_000 + b"L\ns.",
}


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="memory is bounded by the system on Linux only"
)
@pytest.mark.parametrize("bomb", BOMBS, ids=str)
def test_bombs_end_in_one_line(bomb: str, tmp_path: Path) -> None:
    content = BOMBS[bomb]
    if content[:2] not in (HEAD, b"\x80\x05", b"(d"):
        pytest.fail("the sniffing would not take it for a pickle")
    refused(content, tmp_path)


def test_a_whole_pickle_of_something_else(tmp_path: Path) -> None:
    assert "neither segments" in refused(pickle.dumps({"model": [1.0, 2.0]}), tmp_path)


def test_every_truncation_is_seen(tmp_path: Path) -> None:
    whole = pickle.dumps(simple(), protocol=4)
    for end in range(3, len(whole) - 1, 97):
        (tmp_path / "p").write_bytes(whole[:end])
        with open(tmp_path / "p", "rb") as file, pytest.raises(InputError, match="not a whole pickle"):
            load_plain(file, "p")
    refused(whole[: len(whole) // 2], tmp_path)


FUZZ = """
import io, pickle, random, sys
from memfit.core.errors import InputError
from memfit.formats.pickles import load_plain
from memfit.formats.reader_process import bound_memory
from memfit.formats.snapshots import from_value
bound_memory(1 << 30)
whole, seed = bytes.fromhex(sys.argv[1]), int(sys.argv[2])
dice = random.Random(seed)
outcomes = {"read": 0, "refused": 0}
for _ in range(1500):
    content = bytearray(whole)
    for _ in range(dice.choice((1, 1, 2, 8))):
        place = dice.randrange(len(content))
        how = dice.randrange(4)
        if how == 0: content[place] ^= 1 << dice.randrange(8)
        elif how == 1: content[place] = dice.randrange(256)
        elif how == 2: del content[place : place + dice.randrange(1, 40)]
        else: content[place:place] = dice.randbytes(dice.randrange(1, 9))
        if not content: break
    try:
        from_value(load_plain(io.BytesIO(bytes(content)), "x"), name="x", size_bytes=len(content))
        outcomes["read"] += 1
    except (InputError, MemoryError):
        outcomes["refused"] += 1
assert outcomes["read"] and outcomes["refused"], outcomes
"""


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="memory is bounded by the system on Linux only"
)
@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_mutations_raise_input_errors_only(protocol: int) -> None:
    """In a process of its own, as a mutated length can ask for all the memory there is."""
    whole = pickletools.optimize(pickle.dumps(simple(), protocol=protocol)).hex()
    done = subprocess.run(
        [sys.executable, "-c", FUZZ, whole, str(random.Random(protocol).randrange(1000))],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
