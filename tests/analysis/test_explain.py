"""`memfit.explain`: known situations get the right verdict, say what they must and nothing that is wrong."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memfit
from memfit.allocators.lab import replay
from memfit.allocators.settings import parse_settings
from memfit.analysis.findings import Finding
from memfit.core.errors import InputError, UsageError
from memfit.core.units import parse_bytes
from memfit.formats import read_trace
from memfit.reports.findings import findings_text
from memfit.reports.text import to_text

DATA = Path(__file__).parents[1] / "data"
CASES = DATA / "cases"
MESSAGES = [json.loads(line) for line in (DATA / "error_messages.jsonl").read_text("utf-8").splitlines()]
GIB = 1 << 30
FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU {gpu} has a total "
    "capacity of "
    "23.65 GiB of which 1.00 GiB is free. Of the allocated memory 21.50 GiB is allocated by PyTorch, and "
    "100.00 MiB is reserved by PyTorch but unallocated."
)


def words_of(findings: Sequence[Finding]) -> str:
    """All that a reader sees, without what is typed being told apart."""
    return json.dumps([finding.to_json() for finding in findings], ensure_ascii=False)


SITUATIONS: tuple[tuple[str, str, str, Sequence[str], Sequence[str]], ...] = (
    (
        "01-oom-big-tensor-fragmented",
        "fragmentation",
        "high",
        (
            r"live tensors are only 1\.06 GiB",
            r"11\.47 GiB",
            r"0\.86 GiB",
            r"11\.90? GiB",
            "empty_cache.. cannot help",
            "expandable_segments:True",
            r"no hole in it reaches 10\.84 GiB",
        ),
        ("another process holds", "batch size"),
    ),
    (
        "04-oom-hip-allowed-limit",
        "process_limit",
        "high",
        (
            r"1017\.01 MiB \+ 54\.99 MiB = 1\.047 GiB",
            r"1\.05 GiB",
            r"244\.65 GiB free",
            "set_per_process_memory_fraction",
        ),
        ("device is full", "GPU is full", "ragment"),
    ),
    (
        "05-oom-request-exceeds-device",
        "request_exceeds_device",
        "high",
        (
            r"124\.68 GiB > 95\.22 GiB",
            "attention",
            r"25\.50 \+ 3\.14 = 28\.64 GiB",
            r"2222, the 29\.07 GiB one",
        ),
        ("kill", "expandable"),
    ),
    (
        "07-oom-bare-cuda-error-ranks-on-gpu0",
        "other_process",
        "high",
        (
            "pids 62, 63, 64 appear on GPU 0 and also on their own GPU",
            "3 x 725 = 2175 MiB",
            "map_location='cpu'",
            "set_device",
        ),
        ("ragment",),
    ),
    (
        "09-oom-jax-preallocation-clash",
        "preallocated",
        "medium",
        (
            "XLA/JAX",
            r"6\.00 MiB cannot be the real shortage",
            "most of the card",
            "set_visible_devices",
            "XLA_PYTHON_CLIENT_PREALLOCATE=false",
            "XLA_PYTHON_CLIENT_MEM_FRACTION",
            "before JAX is imported",
        ),
        ("PYTORCH_", "ragment"),
    ),
    (
        "11-oom-vllm-no-cache-blocks",
        "budget_too_small",
        "high",
        (
            r"5\.20 \+ 0\.03 \+ 1\.42 = 6\.65 GiB",
            r"budget 5\.60 GiB",
            r"6\.65 / 8\.00 = 0\.83",
            r"0\.90 would leave about 0\.55 GiB",
            "activation peak",
            "--enforce-eager",
        ),
        ("expandable", "lower the utilization", "--gpu-memory-utilization 0.[0-7]"),
    ),
)


@pytest.mark.parametrize(
    ("folder", "verdict", "confidence", "says", "says_not"), SITUATIONS, ids=[row[0] for row in SITUATIONS]
)
def test_reported_situations(
    folder: str, verdict: str, confidence: str, says: Sequence[str], says_not: Sequence[str]
) -> None:
    found = memfit.explain(*sorted((CASES / folder).iterdir()))
    assert (found[0].verdict, found[0].confidence) == (verdict, confidence)
    text = words_of(found)
    assert [pattern for pattern in says if not re.search(pattern, text)] == []
    assert [pattern for pattern in says_not if re.search(pattern, text)] == []


def test_fields_are_those_of_the_text() -> None:
    fields = memfit.explain(CASES / "01-oom-big-tensor-fragmented" / "message.txt").fields
    wanted = {"requested": 10.84, "total": 23.65, "allocated": 1.06, "free": 10.26, "reserved": 12.53,
              "unallocated": 11.47, "outside": 0.86, "needed": 11.9}  # fmt: skip
    assert {name: round(fields[f"{name}_bytes"] / GIB, 2) for name in wanted} == wanted
    assert fields["framework"] == "pytorch"
    budget = memfit.explain(CASES / "11-oom-vllm-no-cache-blocks" / "message.txt").fields
    assert round(budget["kv_cache_bytes"] / GIB, 2) == -1.05 and budget["utilization"] == 0.7


def test_a_bare_message_alone_invents_no_sizes() -> None:
    found = memfit.explain(CASES / "07-oom-bare-cuda-error-ranks-on-gpu0" / "message.txt")
    text = words_of(found)
    assert found.verdict == "unknown" and "asynchronously" in text and "sizes are unknown" in text
    assert not re.search(r"\d (?:[KMG]i?B|bytes)\b", text) and found[0].bytes is None
    assert "ragment" not in text


@pytest.mark.parametrize("row", MESSAGES, ids=[row["name"] for row in MESSAGES])
def test_messages_of_all_kinds(row: Mapping[str, str]) -> None:
    """Messages as public reports have them, alone and amid the noise of a log."""
    found = memfit.explain(row["text"])
    assert found.verdict == row["verdict"], found[0]
    typed = [
        line for finding in found for advice in finding.advice for line in str(advice.typed).splitlines()
    ]
    assert max(map(len, typed), default=0) <= 92, "a line to copy is not broken at 100 columns"
    assert found[0].evidence and (
        found[0].advice or found[0].severity != "error" or row["name"] == "recursion"
    )
    noisy = "\n".join(
        f"\x1b[36m[rank5]:\x1b[0m {line}" if line and not line.startswith(("[", "20")) else line
        for line in ["epoch 3, step 17, loss 0.5", *row["text"].splitlines(), "shutting down", ""]
    )
    assert memfit.explain(noisy).verdict == row["verdict"]


def test_there_are_enough_of_them() -> None:
    assert len(MESSAGES) >= 60
    verdicts = {row["verdict"] for row in MESSAGES}
    assert len(verdicts) == 12, "every verdict has its messages"


@pytest.mark.parametrize(
    "row", [row for row in MESSAGES if "torch-" in row["name"]], ids=lambda row: row["name"]
)
def test_never_fragmentation_beyond_the_capacity(row: Mapping[str, str]) -> None:
    found = memfit.explain(row["text"])
    fields = found.fields
    if found.verdict == "fragmentation":
        assert fields["needed_bytes"] + fields["outside_bytes"] <= fields["total_bytes"] * 1.002
        assert fields["requested_bytes"] > fields["free_bytes"]


AMOUNTS = st.sampled_from(["0", "0.00", "1", "99999999", "17179869184.00", "-5", "3.99", "12.50"])


@given(
    st.sampled_from(MESSAGES), st.sampled_from(MESSAGES), st.lists(AMOUNTS, max_size=9), st.integers(0, 300)
)
def test_any_numbers_are_judged(
    row: Mapping[str, str], other: Mapping[str, str], amounts: list[str], cut: int
) -> None:
    """Amounts replaced by impossible ones, a second message behind, a part cut out: an answer, no error."""
    left = iter(amounts)
    text = re.sub(r"\d+(?:\.\d+)?", lambda match: next(left, match[0]), row["text"])
    found = memfit.explain(f"{text[:cut]}{text[cut + 7 :]}\n{other['text']}")
    assert all(finding.evidence and finding.summary for finding in found)
    json.dumps(found.to_json())
    to_text(findings_text(found.findings), width=100)
    fields = found.fields
    if found[0].rule == "oom_message" and found.verdict == "fragmentation" and "total_bytes" in fields:
        assert fields["needed_bytes"] <= fields["total_bytes"]


def test_ranks_are_named_and_counted_once() -> None:
    log = "\n".join(f"[rank{rank}]: {FULL.format(gpu=rank)}" for rank in range(4) for _ in range(3))
    found = memfit.explain(log)
    assert len(found) == 1 and found.verdict == "device_full"
    assert found[0].where == "ranks 0-3, GPUs 0-3"


def test_a_traceback_gives_the_place_and_the_phase() -> None:
    log = (
        "Traceback (most recent call last):\n"
        '  File "/home/me/train.py", line 88, in step\n    optimizer.step()\n'
        '  File "/usr/lib/python3/site-packages/torch/optim/adamw.py", line 190, in step\n    adamw(\n'
        + FULL.format(gpu=0)
    )
    finding = memfit.explain(log)[0]
    assert finding.where == "GPU 0, train.py:88 in step"
    assert "fused=True" in str(finding.advice[0].typed)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("PYTORCH_HIP_ALLOC_CONF", "export PYTORCH_HIP_ALLOC_CONF=expandable_segments:True"),
        ("PYTORCH_ALLOC_CONF", "export PYTORCH_ALLOC_CONF=expandable_segments:True"),
        ("PYTORCH_CUDA_ALLOC_CONF", "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
    ],
)
def test_the_variable_is_the_one_of_that_build(text: str, line: str) -> None:
    message = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total "
        "capacity of "
        "23.65 GiB of which 1.00 GiB is free. Of the allocated memory 12.00 GiB is allocated by PyTorch, and "
        f"10.00 GiB is reserved by PyTorch but unallocated. If … try setting {text}=expandable_segments:True"
    )
    assert line in [advice.typed for advice in memfit.explain(message)[0].advice]
    already = f"launching with {text}=expandable_segments:True\n{message}"
    assert line not in [advice.typed for advice in memfit.explain(already)[0].advice]


def test_windows_gets_what_windows_has() -> None:
    log = (
        'Traceback (most recent call last):\n  File "C:\\Users\\me\\train.py", line 3, in <module>\n    y '
        "= f(x)\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.70 GiB. GPU 0 has a total capacty "
        "of "
        "6.00 GiB of which 0 bytes is free. Of the allocated memory 2.93 GiB is allocated by PyTorch, and "
        "2.30 GiB "
        "is reserved by PyTorch but unallocated."
    )
    typed = [advice.typed for advice in memfit.explain(log)[0].advice]
    assert "set PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:512" in typed
    assert not any("expandable" in str(line) for line in typed)


def test_companions_change_the_verdict(tmp_path: Path) -> None:
    """A bare error is explained by memory_summary(), by nvidia-smi, by what the system says."""
    smi = (
        "| NVIDIA-SMI 535.1     Driver Version: 535.1     CUDA Version: 12.2 |\n"
        "|   0  NVIDIA A100-SXM4-40GB    On  | 00000000:0F:00.0 Off |    0 |\n"
        "| N/A   40C    P0   100W / 400W |  40300MiB / 40960MiB |     97%      Default |\n"
        "|  Processes:                                                     |\n"
        "|    0   N/A  N/A      1234      C   python                     30343MiB |\n"
        "|    0   N/A  N/A      5678      C   ollama                      9343MiB |\n"
    )
    found = memfit.explain("RuntimeError: CUDA error: out of memory", smi)
    assert found.verdict == "other_process" and "1234" in words_of(found)
    hip = (
        "HIP out of memory. Tried to allocate 16.00 GiB. GPU 0 has a total capacity of 15.24 GiB of which "
        "15.09 GiB "
        "is free. Of the allocated memory 0 bytes is allocated by PyTorch, and 0 bytes is reserved by "
        "PyTorch but "
        "unallocated."
    )
    assert memfit.explain(hip).verdict == "request_exceeds_device"
    hints = tmp_path / "context.json"
    hints.write_text(json.dumps({"gpu_vram_total_GiB": 96, "device": "gfx1151"}))
    assert memfit.explain(hip, hints).verdict == "misreported_capacity"


def test_memory_summary_stands_in_for_numbers() -> None:
    summary = (
        "|===========================================================================|\n"
        "|                  PyTorch CUDA memory summary, device ID 0                 |\n"
        "|            CUDA OOMs: 1            |        cudaMalloc retries: 3         |\n"
        "| Allocated memory      |  14356 MiB |  23806 MiB |  32225 MiB |  17868 MiB |\n"
        "| GPU reserved memory   |  22000 MiB |  23900 MiB |  32225 MiB |  17868 MiB |\n"
    )
    fields = memfit.explain(
        "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 24.00 GiB total capacity; 1.00 GiB free;\n"
        + summary
    )
    assert fields.verdict == "fragmentation"
    assert "memory_summary()" in words_of(fields)


def test_nvidia_smi_that_may_not_see() -> None:
    """Unknown with the reason: never 0, and nothing from the product's name."""
    folder = CASES / "37-nvidia-smi-mig-permissions"
    for name in ("query.csv", "free_only.csv"):
        found = memfit.explain(folder / name)
        assert found.verdict == "unknown" and "Insufficient Permissions" in words_of(found)
        (device,) = found.fields["devices"]
        assert (device["total_bytes"], device["used_bytes"], device["free_bytes"]) == (None, None, None)
    assert "47" in words_of(memfit.explain(folder / "query.csv"))
    found = memfit.explain(folder / "full.xml")
    (part,) = found.fields["devices"][0]["slices"]
    mib = 1 << 20
    assert (part["total_bytes"], part["used_bytes"], part["free_bytes"]) == (4864 * mib, 0, 4860 * mib)
    text = words_of(found)
    assert "MIG device 0 (GI 10, CI 0)" in text and "4864 MiB" in text and "--budget 4864MiB" in text
    assert "40 GiB" not in text and "4864 free" not in text


def test_settings_are_judged_as_pytorch_does() -> None:
    lines = [
        json.loads(line)
        for line in (CASES / "33-alloc-conf-strings" / "values.jsonl").read_text().splitlines()
    ]
    found = memfit.explain(CASES / "33-alloc-conf-strings" / "values.jsonl")
    assert len(found) == len(lines)
    for row, finding in zip(lines, found, strict=True):
        try:
            warned = bool(parse_settings(row["value"]).warnings)
        except UsageError:
            assert finding.verdict == "not_memory" and finding.evidence
            for advice in finding.advice:
                parse_settings(str(advice.typed).partition("=")[2])
        else:
            assert finding.severity == ("warning" if warned else "info"), row
    fixed = {row["value"]: finding.advice for row, finding in zip(lines, found, strict=True)}
    assert "expandable_segments:True" in str(fixed['"expandable_segments:True"'][0].typed)
    assert "max_split_size_mb:128" in str(fixed["max_split_size:128"][0].typed)


def test_sizes_mean_the_same_everywhere() -> None:
    lines = [
        json.loads(line) for line in (CASES / "35-size-strings" / "sizes.jsonl").read_text().splitlines()
    ]
    for row, finding in zip(lines, memfit.explain(CASES / "35-size-strings" / "sizes.jsonl"), strict=True):
        try:
            size: int | None = parse_bytes(row["text"])
        except UsageError:
            size = None
        assert finding.bytes == size


def test_a_snapshot_shows_the_holes(tmp_path: Path) -> None:
    """12 MiB live in a segment of 100 on a device of 160 MiB: 98 MiB do not fit, by layout only."""
    mib = 1 << 20
    rows = [{"op": "config", "total_bytes": 160 * mib}, {"op": "alloc", "id": 1, "size": 100 * mib}]
    rows += [{"op": "free", "id": 1}, {"op": "alloc", "id": 2, "size": 12 * mib}]
    rows += [{"op": "alloc", "id": 3, "size": 98 * mib}]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    found = memfit.explain("RuntimeError: CUDA error: out of memory", path)
    assert found.verdict == "fragmentation" and found[0].rule == "recording"
    setting = str(found[0].advice[0].typed).partition("=")[2]
    assert replay(read_trace(path), settings=setting, compare=False).fits
    assert {finding.verdict for finding in found} == {"fragmentation", "unknown"}


def test_a_dry_run_tells_what_is_live() -> None:
    result = {
        "schema_version": 1, "engine": "dryrun", "gpu": "rtx3060-12gb", "fits": False,
        "peak_reserved_bytes": 11 * GIB, "device_total_bytes": 13 * GIB, "nvml_total_bytes": 12 * GIB,
        "peak_by_category": {"activation": 7 * GIB, "parameter": 3 * GIB},
        "oom": {"message": FULL.format(gpu=0), "file": "train.py", "line": 3, "phase": "forward",
                "asked_bytes": GIB, "free_bytes": 0},
    }  # fmt: skip
    found = memfit.explain(json.dumps(result).encode())
    assert found.verdict == "device_full"
    assert "activation 7.00 GiB, parameter 3.00 GiB" in words_of(found)


def test_exceptions_are_taken_as_they_are() -> None:
    class OutOfMemoryError(RuntimeError):
        pass

    try:
        raise OutOfMemoryError(FULL.format(gpu=2))
    except OutOfMemoryError as error:
        found = memfit.explain(error)
    assert found.verdict == "device_full" and "GPU 2" in str(found[0].where)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le"])
def test_encodings(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_bytes(("Résumé\r\n" + FULL.format(gpu=0) + "\r\n").encode(encoding))
    assert memfit.explain(path).verdict == "device_full"


def test_a_notebook_is_a_log_too() -> None:
    notebook = {
        "cells": [{"outputs": [{"output_type": "error", "traceback": ["\x1b[0;31m", FULL.format(gpu=0)]}]}]
    }
    assert memfit.explain(json.dumps(notebook).encode()).verdict == "device_full"


@pytest.mark.parametrize(
    "content",
    [b"", b"\x00\x01\x02\xff\xfe" * 400, pickle.dumps({"a": 1}), b"\x1f\x8b broken", b"<nvidia_smi_log><a>"],
)
def test_what_cannot_be_read_is_an_input_error(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(InputError):
        memfit.explain(path)


def test_json_form() -> None:
    value: dict[str, Any] = memfit.explain(FULL.format(gpu=0)).to_json()
    assert value["schema_version"] == 1 and json.loads(json.dumps(value)) == value
    assert {"inputs", "findings", "fields", "verdict"} <= set(value)
    finding = value["findings"][0]
    assert {"verdict", "confidence", "evidence", "advice"} <= set(finding)
    assert all(isinstance(size, int) for name, size in value["fields"].items() if name.endswith("_bytes"))
