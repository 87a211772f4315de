"""The settings of PyTorch's allocator that a replay tries, and what is known of each: versions and risks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memfit.allocators.settings import parse_settings


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One value of ``PYTORCH_ALLOC_CONF`` to try.

    Attributes:
        text: the value, as PyTorch reads it.
        needs_limit: acts only where the process has a memory limit, which the text then sets too.
    """

    text: str
    needs_limit: bool = False


CANDIDATES: tuple[Candidate, ...] = (
    Candidate(text="expandable_segments:True"),
    *(Candidate(text=f"max_split_size_mb:{size}") for size in (20, 64, 128, 256, 512)),
    *(Candidate(text=f"roundup_power2_divisions:{divisions}") for divisions in (2, 4, 8)),
    Candidate(text="garbage_collection_threshold:0.8,per_process_memory_fraction:0.99", needs_limit=True),
    Candidate(text="garbage_collection_threshold:0.6,per_process_memory_fraction:0.99", needs_limit=True),
    *(Candidate(text=f"large_segment_size_mb:{size}") for size in (14, 32, 64)),
)
"""In the order in which one would rather use them: what has the fewest side effects first."""

EFFECTS: Mapping[str, str] = {
    "expandable_segments": "segments that grow, and give back what is free page by page",
    "max_split_size_mb": "larger blocks are kept whole",
    "roundup_power2_divisions": "fewer different sizes",
    "garbage_collection_threshold": "cached segments are given back before memory is full",
    "large_segment_size_mb": "another size of segments for blocks of 1 to 10 MiB",
}
"""What each does, in a few words."""

RISKS: Mapping[str, tuple[str, ...]] = {
    "expandable_segments": (
        "Needs torch 2.1 or later on Linux; some builds leave it off in silence, so look at "
        'torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"] once.',
        "Turn it off where tensors are shared between processes by CUDA IPC, with custom all-reduce kernels "
        "(vLLM), pluggable allocators, or CUDA graphs on older versions: those crash or hang.",
        "Do not set max_split_size_mb beside it.",
    ),
    "max_split_size_mb": (
        "Blocks above the limit are not split, so a request can take a larger block whole, and memory that "
        "is full is flushed more often: each flush waits for the GPU.",
        "Do not set expandable_segments beside it.",
    ),
    "roundup_power2_divisions": (
        "Sizes are rounded up, so that blocks are used again more often; the rounding itself is lost.",
    ),
    "garbage_collection_threshold": (
        "Acts only with a memory limit (per_process_memory_fraction, or "
        "torch.cuda.set_per_process_memory_fraction); each collection calls cudaFree, which waits for "
        "the GPU.",
    ),
    "large_segment_size_mb": ("Needs torch 2.11 or later.",),
    "per_process_memory_fraction": ("Needs torch 2.11 or later in this form.",),
}
"""What to mind, by key."""

VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
"""The name that every version reads; 2.9 and later call it PYTORCH_ALLOC_CONF, and 2.9.1 ignored that one."""


def risks_of(text: str) -> tuple[str, ...]:
    """What to mind with a value of the variable."""
    warnings = parse_settings(text).warnings
    return (*warnings, *(risk for key, risks in RISKS.items() if key in text for risk in risks))


def shell_line(text: str) -> str:
    """The line to type before the program is started, the same for every launcher."""
    if text == "default":
        return f"unset {VARIABLE}"
    return f"export {VARIABLE}={text}"


def setting_text(words: str) -> str:
    """What ``--set`` says, as the variable's value: ``key=value`` is ``key:value``.

    A text with a colon is taken as it is, with all of PyTorch's strictness.
    """
    if ":" not in words and words.count("=") == 1:
        key, value = words.split("=")
        return f"{key.strip()}:{value.strip()}"
    return words
