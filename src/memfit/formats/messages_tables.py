"""Tables that people paste beside an error: PyTorch's memory_summary(), nvidia-smi, rocm-smi."""

from __future__ import annotations

import re
from collections.abc import Mapping

from memfit.formats.messages import Message, Passage, Signature
from memfit.formats.messages_amounts import read_amount
from memfit.formats.messages_devices import Device, Reading
from memfit.formats.messages_nvidia_smi import table

_SUMMARY_ROWS: Mapping[str, str] = {
    "Allocated memory": "allocated",
    "Active memory": "active",
    "Requested memory": "requested_by_tensors",
    "GPU reserved memory": "reserved",
    "Non-releasable memory": "non_releasable",
}
_SUMMARY_ROW = re.compile(
    r"\|\s{1,4}(\w[\w -]{3,30}?)\s{1,20}\|\s{0,12}([\d.]{1,12} {1,4}[KMGT]?i?B)\s{0,4}"
    r"\|\s{0,12}([\d.]{1,12} {1,4}[KMGT]?i?B)"
)
_COUNTS = re.compile(r"CUDA OOMs:\s{1,4}(\d{1,9}).{1,20}cudaMalloc retries:\s{1,4}(\d{1,9})")
_DEVICE = re.compile(r"device ID (\d{1,3})")
_ROCM = re.compile(r"GPU\[(\d{1,3})\]\s{0,8}: VRAM Total (Used )?Memory \(B\):\s{0,4}(\d{1,18})")


def _summary(passage: Passage) -> Message:
    sizes: dict[str, int] = {}
    figures: dict[str, float] = {}
    for line in passage.after:
        counts, row = _COUNTS.search(line), _SUMMARY_ROW.search(line)
        if counts is not None:
            figures |= {"ooms": float(counts[1]), "retries": float(counts[2])}
        if row is not None and row[1] in _SUMMARY_ROWS:
            name = _SUMMARY_ROWS[row[1]]
            for key, text in ((name, row[2]), (f"{name}_peak", row[3])):
                size = read_amount(re.sub(r"\s+", " ", text))
                if size is not None:
                    sizes.setdefault(key, size)
    device = _DEVICE.search(passage.line.text)
    return Message(
        kind="memory-summary",
        role="fact",
        framework="pytorch",
        form="memory_summary()",
        sizes=sizes,
        figures=figures,
        words={} if device is None else {"gpu": device[1]},
    )


def _nvidia_smi(passage: Passage) -> Message | None:
    reading = table([passage.line.text, *passage.after])
    if not reading.devices and not reading.processes:
        return None
    return Message(kind="nvidia-smi", role="fact", framework="nvidia", reading=reading)


def _rocm_smi(passage: Passage) -> Message | None:
    totals: dict[str, int] = {}
    used: dict[str, int] = {}
    for line in (passage.line.text, *passage.after):
        found = _ROCM.search(line)
        if found is not None:
            (used if found[2] else totals)[found[1]] = int(found[3])
    devices = tuple(
        Device(index=index, total_bytes=totals.get(index), used_bytes=used.get(index))
        for index in sorted({*totals, *used}, key=int)
    )
    if not devices:
        return None
    return Message(
        kind="nvidia-smi",
        role="fact",
        framework="rocm",
        reading=Reading(devices=devices),
        figures={"lines": 64},
    )


SIGNATURES = (
    Signature(trigger="cuda memory summary", read=_summary, follows=40),
    Signature(trigger="nvidia-smi ", read=_nvidia_smi, follows=190),
    Signature(trigger="vram total", read=_rocm_smi, follows=64),
)
