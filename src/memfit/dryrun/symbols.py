"""Which CUDA calls PyTorch's libraries make, and a C file that answers those the made-up GPU does not model.

A call that nobody answered would reach NVIDIA's real library, which would look for a driver and fail in its
own way, or crash. So every such call is either *refused* (its name is noted, its library's "not supported"
comes back), *skipped* (noted, and said to have worked) or *ignored* (it computes and takes no memory, so
success is true as far as memory goes). Calls that touch no device are left to the real library.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from memfit.core.errors import CannotRunHere

SHT_DYNSYM = 11
SECTION = np.dtype(
    {
        "names": ["type", "offset", "size", "link"],
        "formats": ["<u4", "<u8", "<u8", "<u4"],
        "offsets": [4, 24, 32, 40],
        "itemsize": 64,
    }
)
SYMBOL = np.dtype(
    {"names": ["name", "section"], "formats": ["<u4", "<u2"], "offsets": [0, 6], "itemsize": 24}
)


@dataclass(frozen=True, kw_only=True)
class DynamicSymbols:
    """The names that a shared library exports, and those that it expects from others."""

    defined: frozenset[str]
    undefined: frozenset[str]


def dynamic_symbols(path: Path) -> DynamicSymbols:
    """Reads the dynamic symbol table of a 64-bit little-endian ELF file.

    Raises CannotRunHere when the file is something else.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:6] != b"\x7fELF\x02\x01":
            raise CannotRunHere(f"{path} is not a 64-bit library; reinstall torch")
        start = int.from_bytes(data[0x28:0x30], "little")
        count = int.from_bytes(data[0x3C:0x3E], "little")
        sections = np.frombuffer(data[start : start + count * SECTION.itemsize], SECTION)
        defined: set[str] = set()
        undefined: set[str] = set()
        for table in sections[sections["type"] == SHT_DYNSYM]:
            text = sections[table["link"]]
            names = data[int(text["offset"]) : int(text["offset"]) + int(text["size"])]
            begin, size = int(table["offset"]), int(table["size"])
            symbols = np.frombuffer(data[begin : begin + size], SYMBOL)[
                1:
            ]  # the first is empty by definition
            undefined.update(_names(names, symbols["name"][symbols["section"] == 0]))
            defined.update(_names(names, symbols["name"][symbols["section"] != 0]))
    return DynamicSymbols(defined=frozenset(defined), undefined=frozenset(undefined))


def _names(strings: bytes, offsets: Iterable[int]) -> Iterator[str]:
    for offset in offsets:
        yield strings[int(offset) : strings.index(b"\0", int(offset))].decode("ascii", "replace")


# ----------------------------------------------------------------------- the answers

Answer = Literal["REFUSE", "SKIP", "IGNORE"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One library's calls: how its names begin, what stays with the real one, how the rest is answered."""

    prefix: str
    status: int  # the library's own "not supported"
    real: str = ""  # pattern of the names that touch no device
    ignored: str = ""  # pattern of the names that only compute
    skipped: str = ""


TEXTS = (
    r"(Get(Error|Status|Result|LastError)(String|Name)?"
    r"|GetVersion|GetProperty|GetCudartVersion|GetCallbackName)$"
)

# The first family whose prefix and a capital letter begin the name has it.
FAMILIES = (
    Family(prefix="cusparseLt", status=10, real=TEXTS),
    Family(
        prefix="cusparse",
        status=10,
        real=rf"{TEXTS}|Descr|Info$|MatGet|MatSet|SetMat|CsrSet|(Create|Destroy)(Const)?(Sp|Dn|Cs|Coo|Bsr)",
    ),
    Family(prefix="cusolver", status=9, real=TEXTS, ignored=r"^cusolverDn(?!.*(_bufferSize|Create))"),
    Family(prefix="cublasLt", status=15, real=TEXTS),
    Family(prefix="cublas", status=15, real=TEXTS, ignored=r"^cublas(?!Get|Create|Lt|Xt)"),
    Family(prefix="cudnn", status=3000, real=rf"{TEXTS}|Descriptor|^cudnnSetConvolution"),
    Family(prefix="cufft", status=16, real=TEXTS),
    Family(
        prefix="cupti",
        status=27,
        real=TEXTS,
        skipped=r"^cuptiActivity(?!Get)|Subscribe|Enable|Finalize",
    ),
    Family(prefix="nccl", status=1, real=TEXTS),
    Family(prefix="curand", status=1000, real=TEXTS),
    Family(prefix="cuda", status=801, real=rf"{TEXTS}|^cudaCreateChannelDesc$"),
    Family(prefix="cuFile", status=5001, real=r"."),
    Family(prefix="cu", status=801),
)

HEAD = """// Generated: what PyTorch's libraries call and the files beside this one do not model.
#include "stub.h"

#define ANSWER(name, ...) \\
  API __attribute__((weak)) int memfit_answer_##name(void) __asm__(#name); \\
  int memfit_answer_##name(void) { __VA_ARGS__ }
#define REFUSE(name, status) ANSWER(name, note_unknown_call(#name); return status;)
#define SKIP(name) ANSWER(name, note_unknown_call(#name); return 0;)
#define IGNORE(name) ANSWER(name, return 0;)

"""


def family_of(name: str) -> Family | None:
    """The library that a name belongs to; None for a name that is no CUDA call."""
    for family in FAMILIES:
        rest = name.removeprefix(family.prefix)
        if rest != name and rest[:1].isupper():
            return family
    return None


def answer(name: str) -> tuple[Answer, int] | None:
    """How a call is answered that nothing else models; None: by the real library."""
    family = family_of(name)
    if family is None or (family.real and re.search(family.real, name)):
        return None
    if family.ignored and re.search(family.ignored, name):
        return "IGNORE", 0
    if family.skipped and re.search(family.skipped, name):
        return "SKIP", 0
    return "REFUSE", family.status


def traps(names: Iterable[str]) -> str:
    """The C text that answers these calls; its definitions are weak, so a model of a call takes its place."""
    lines = []
    for name in sorted(set(names)):
        match answer(name):
            case ("REFUSE", status):
                lines.append(f"REFUSE({name}, {status})")
            case (kind, _):
                lines.append(f"{kind}({name})")
    return HEAD + "\n".join(lines) + "\n"


def rules_text() -> str:
    """Everything but the names that the generated file depends on."""
    return HEAD + repr(FAMILIES)


def called_names(torch_libraries: Path, runtime: Path) -> frozenset[str]:
    """Every name that PyTorch's libraries expect from elsewhere, and everything that the CUDA runtime offers.

    The whole runtime, because extensions of other projects link to it too.
    """
    names = set(dynamic_symbols(runtime).defined)
    for library in sorted(torch_libraries.glob("lib*.so")):
        names |= dynamic_symbols(library).undefined
    return frozenset(names)
