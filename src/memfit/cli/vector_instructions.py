"""Which vector instructions numpy and PyTorch use on this CPU; looked at from outside, without torch here."""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import Any

SECONDS = 60.0
_ASK_TORCH = (
    "import torch; print(torch.backends.cpu.get_cpu_capability(), torch.backends.mkldnn.is_available())"
)
_SHOWN = ("SSE42", "AVX2", "FMA3", "AVX512F", "AVX512_SKX", "AVX512_SPR", "NEON", "ASIMD", "SVE", "VSX4")
"""Features worth naming, of the dozens that numpy lists."""


def vector_instructions(*, ask_torch: bool) -> str:
    """One line: what the CPU has, and which kernels are dispatched to.

    Args:
        ask_torch: start a process that imports torch (some seconds) to ask it.
    """
    parts = [f"the CPU has {', '.join(_of_cpu()) or 'none that numpy knows'}"]
    parts += [f"numpy computes with {_of_numpy()}"]
    if ask_torch:
        parts.append(_of_torch())
    return "; ".join(parts)


def _of_cpu() -> list[str]:
    return [name for name in _SHOWN if _numpy_core().__cpu_features__.get(name)]


def _of_numpy() -> str:
    """The widest set that numpy has kernels for and this CPU has."""
    core = _numpy_core()
    built = [*core.__cpu_baseline__, *core.__cpu_dispatch__]
    usable = [name for name in built if core.__cpu_features__.get(name)]
    return usable[-1] if usable else "no vector instructions"


def _numpy_core() -> Any:
    return importlib.import_module("numpy._core._multiarray_umath")


def _of_torch() -> str:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"torch did not answer within {SECONDS:.0f} s"
    words = done.stdout.split()
    if done.returncode or len(words) != 2:
        return "torch could not be asked"
    library = " and oneDNN" if words[1] == "True" else ""
    return f"torch with {words[0]}{library} (ATEN_CPU_CAPABILITY limits it)"
