"""Reading messages out of texts of any kind: amounts, prefixes, broken lines, hostile and endless input."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.core.errors import InputError
from memfit.formats.messages import read_messages, read_text_messages
from memfit.formats.messages_amounts import read_amount
from memfit.formats.messages_lines import clean_line
from memfit.formats.messages_nvidia_smi import read_output
from memfit.formats.messages_table import SIGNATURES
from memfit.formats.messages_traceback import read_place

MESSAGES = [
    json.loads(line)["text"]
    for line in (Path(__file__).parents[1] / "data" / "error_messages.jsonl").read_text("utf-8").splitlines()
]
MIB = 1 << 20
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of "
    "23.65 GiB "
    "of which 1.00 GiB is free. Of the allocated memory 21.50 GiB is allocated by PyTorch, and 100.00 MiB "
    "is reserved "
    "by PyTorch but unallocated."
)
SIZES = {
    "requested": 2 << 30,
    "total": round(23.65 * (1 << 30)),
    "free": 1 << 30,
    "allocated": round(21.5 * (1 << 30)),
    "unallocated": 100 * MIB,
}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("10.84 GiB", 11639361372),
        ("0 bytes", 0),
        ("6291456 bytes", 6291456),
        ("1,073,741,824 bytes", 1 << 30),
        ("1900,00 MiB", 1900 * MIB),
        ("-1.05GiB", -1127428915),
        ("18.13 GB", round(18.13 * (1 << 30))),
        ("64M", 64 * MIB),
        ("512.00 KiB", 512 << 10),
        ("17179869184.00 GiB", 1 << 64),
        ("1 parsec", None),
        ("GiB", None),
    ],
)
def test_amounts(text: str, size: int | None) -> None:
    assert read_amount(text) == size


@given(st.integers(0, 1 << 50), st.sampled_from([("KiB", 10), ("MiB", 20), ("GiB", 30)]))
def test_printed_amounts_come_back(size: int, unit: tuple[str, int]) -> None:
    """As PyTorch prints them, with two decimals: within half of the last one."""
    name, shift = unit
    found = read_amount(f"{size / (1 << shift):.2f} {name}")
    assert found is not None and abs(found - size) <= (1 << shift) * 0.00501


@pytest.mark.parametrize(
    ("raw", "text", "rank"),
    [
        ("[rank3]: RuntimeError: x", "RuntimeError: x", 3),
        ("[rank12]:   File", "  File", 12),
        ("\x1b[31mCUDA\x1b[0m out", "CUDA out", None),
        (
            "(VllmWorker rank=7 pid=10948) ERROR 03-16 06:12:38 [multiproc_executor.py:375] RuntimeError",
            "RuntimeError",
            7,
        ),
        ("(Worker_TP1 pid=549) torch.OutOfMemoryError", "torch.OutOfMemoryError", 1),
        ("2024-06-28T06:11:52.685300953Z stderr F CUDA", "CUDA", None),
        ("ollama  | ggml_backend", "ggml_backend", None),
        ("2: RuntimeError: x", "RuntimeError: x", None),
        ("|   0  NVIDIA A100", "|   0  NVIDIA A100", None),
    ],
)
def test_prefixes_are_taken_off(raw: str, text: str, rank: int | None) -> None:
    line = clean_line(1, raw)
    assert (line.text, line.rank) == (text, rank)


@pytest.mark.parametrize("width", [40, 72, 80, 100])
def test_texts_that_a_terminal_broke(width: int) -> None:
    """Hard line breaks anywhere, also inside words and numbers' units."""
    broken = "\n".join(OOM[begin : begin + width] for begin in range(0, len(OOM), width))
    if "Tried to allocate " not in broken:
        pytest.skip("the break is inside the words that begin the message")
    (message,) = [m for m in read_text_messages(broken) if m.kind == "torch-oom"]
    assert {name: message.sizes.get(name) for name in ("free", "allocated")} == {
        name: SIZES[name] for name in ("free", "allocated")
    }


def test_ranks_that_print_at_once_are_told_apart() -> None:
    halves = (OOM[:140], OOM[140:])
    log = "\n".join(f"[rank{rank}]: {half}" for half in halves for rank in (0, 1))
    (message,) = read_text_messages(log)
    assert message.sizes == SIZES and message.ranks == (0, 1)


def test_every_cut_of_a_message_can_be_read() -> None:
    for text in (OOM, MESSAGES[2], MESSAGES[8]):
        for end in range(0, len(text), 3):
            for message in read_text_messages(text[:end]):
                assert message.kind


def test_a_storm_is_one_message() -> None:
    (message,) = read_text_messages("\n".join([OOM] * 1000))
    assert message.count == 1000 and message.sizes == SIZES


def test_a_line_without_end_is_read_in_pieces() -> None:
    text = "x" * 300_000 + " " + OOM + " " + "y" * 300_000
    assert [m.sizes for m in read_text_messages(text) if m.kind == "torch-oom"][0] == SIZES


@given(st.binary(max_size=400))
def test_any_bytes_can_be_read(noise: bytes) -> None:
    read_messages(io.BytesIO(noise))
    read_messages(io.BytesIO(noise + b"\n" + OOM.encode() + b"\n" + noise))


_PIECES = st.one_of(
    st.sampled_from([signature.trigger for signature in SIGNATURES]),
    st.sampled_from(
        ["GiB", "(", "total capacity", "\n", "99999999999999999999 GiB", "has", "GPU", "|", "[", "-"]
    ),
    st.text(max_size=12),
)


@given(st.lists(_PIECES, max_size=12), st.sampled_from(MESSAGES), st.integers(0, 400))
def test_no_mixture_is_too_much(pieces: list[str], message: str, cut: int) -> None:
    """Triggers, halves of messages and noise in any order: something or nothing, but no error."""
    text = " ".join(pieces)
    read_text_messages(text + message[cut:] + text)
    read_place(text.splitlines())


@given(st.lists(_PIECES, max_size=8))
def test_no_table_is_too_broken(pieces: list[str]) -> None:
    try:
        read_output("| NVIDIA-SMI 1 |\n" + " | ".join(pieces))
        read_output("index, memory.used [MiB]\n" + ", ".join(pieces))
        read_output("<nvidia_smi_log>" + "".join(pieces) + "</nvidia_smi_log>")
    except InputError as error:
        assert "nvidia-smi" in str(error)


def test_patterns_take_linear_work() -> None:
    """No pattern has an unbounded repeat: what one is given twice as much of takes about twice the steps."""
    import re
    import sys

    unbounded = []
    for name, module in list(sys.modules.items()):
        if not name.startswith("memfit.formats.messages"):
            continue
        for label, value in vars(module).items():
            patterns = (
                value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else [value]
            )
            for pattern in patterns:
                if isinstance(pattern, re.Pattern):
                    plain = re.sub(r"\\.|\[(?:\\.|[^\]])*\]", "c", pattern.pattern)
                    if re.search(r"[)c.][*+]", plain):
                        unbounded.append(f"{name}.{label}: {pattern.pattern}")
    assert unbounded == []


@pytest.mark.parametrize(
    ("text", "total", "used", "reason"),
    [
        ("index, memory.total [MiB], memory.used [MiB]\n0, 81920 MiB, 14 MiB", 81920, 14, None),
        ("index, memory.total [MiB], memory.used [MiB]\n0, 81920, 14", 81920, 14, None),
        ("memory.free [MiB], memory.total [MiB], memory.used [MiB]\n[N/A], [N/A], [N/A]", None, None, "N/A"),
        ("memory.total [MiB], memory.used [MiB]\n[GPU is lost], [Unknown Error]", None, None, "GPU is lost"),
        ("[Insufficient Permissions]", None, None, "Insufficient Permissions"),
    ],
)
def test_queries(text: str, total: int | None, used: int | None, reason: str | None) -> None:
    reading = read_output(text)
    assert reading is not None
    (device,) = reading.devices
    assert device.total_bytes == (None if total is None else total * MIB)
    assert device.used_bytes == (None if used is None else used * MIB)
    assert reason is None or reason in device.unknown.values()


def test_tables_with_slices_and_processes() -> None:
    text = """
+-----------------------------------------------------------------------------+
| NVIDIA-SMI 470.57.02    Driver Version: 470.57.02    CUDA Version: 11.4     |
|   1  NVIDIA A100-SXM...  On   | 00000000:0F:00.0 Off |                   On |
| N/A   40C    P0   100W / 400W |     N/A              |     N/A      Default |
|                               |                      |              Enabled |
| MIG devices:                                                                |
|  1    3   0   0  |  14366MiB / 19968MiB | 28      0 |  2   0    1    0    0 |
|                  |      4MiB / 32767MiB |           |                       |
| Processes:                                                                  |
|    1    3    0      12345      C   python                          14343MiB |
"""
    reading = read_output(text)
    assert reading is not None
    (device,), (process,) = reading.devices, reading.processes
    assert device.mig and device.total_bytes is None and device.unknown["total"] == "N/A"
    assert device.slices[0].label == "MIG device 0 (GI 3, CI 0)"
    assert (device.slices[0].used_bytes, device.slices[0].total_bytes) == (14366 * MIB, 19968 * MIB)
    assert (process.pid, process.used_bytes, process.gpu) == (12345, 14343 * MIB, "1")


def test_unified_memory_has_no_amount() -> None:
    text = """
| NVIDIA-SMI 580.126.09             Driver Version: 580.126.09     CUDA Version: 13.0     |
|   0  NVIDIA GB10                    On  |   0000000F:01:00.0 Off |                  N/A |
| N/A   36C    P8              3W /  N/A  | Not Supported          |      0%      Default |
"""
    reading = read_output(text)
    assert reading is not None and reading.devices[0].unknown["total"] == "Not Supported"
    assert reading.devices[0].utilization_percent == 0


def test_xml_that_declares_entities_is_refused() -> None:
    bomb = '<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "aaaa">]><nvidia_smi_log>&a;</nvidia_smi_log>'
    with pytest.raises(InputError, match="entities"):
        read_output(bomb)
