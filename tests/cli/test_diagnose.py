"""`memfit diagnose`, `diff`, `check` and `rules` as they are typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memfit.cli import main
from memfit.core.trace import TraceBuilder
from memfit.dryrun.result import DryRunResult

MIB = 1 << 20


def write_trace(path: Path, step_bytes: int = 3 * MIB, steps: int = 16) -> Path:
    """A job that keeps so much in every step."""
    builder = TraceBuilder(meta={"gpu": "a100-80gb"})
    ends = []
    for _ in range(steps):
        builder.alloc(step_bytes, phase="forward", category="activation", where="train.py:9 <img src=x>")
        builder.free(builder.alloc(20 * MIB, phase="backward", where="train.py:10 step"))
        ends.append(len(builder))
    builder.meta["step_ends"] = ends
    builder.build().save(path)
    return path


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    code = main([str(word) for word in words])
    shown = capsys.readouterr()
    return code, shown.out + shown.err


def test_diagnose_ends_by_the_severity_that_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path / "run.memfit-trace")
    code, shown = run(capsys, "diagnose", trace)
    assert code == 0 and "LEAK_MONOTONIC" in shown and "3.00 MiB a step" in shown
    assert "history.append(value.detach().cpu())" in shown
    assert run(capsys, "diagnose", trace, "--fail-on", "warning")[0] == 3
    assert run(capsys, "diagnose", trace, "--fail-on", "never")[0] == 0
    words = ("diagnose", trace, "--fail-on", "warning", "--set", "LEAK_MONOTONIC.least_steps=99")
    assert run(capsys, *words)[0] == 0


def test_diagnose_as_json_and_as_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, page = write_trace(tmp_path / "run.memfit-trace"), tmp_path / "page.html"
    code, shown = run(capsys, "diagnose", trace, "--json", "--report", page, "--fail-on", "warning")
    value = json.loads(shown)
    assert code == 3 and value["schema_version"] == 1 and value["findings"][0]["rule"] == "LEAK_MONOTONIC"
    assert value["total_saving_bytes"] == value["peak_before_bytes"] - value["peak_after_bytes"] > 0
    text = page.read_text()
    assert "LEAK_MONOTONIC" in text and "&lt;img src=x&gt;" in text and "<img" not in text
    assert "http" not in text.replace("http-equiv", "")


def test_diff_tells_why_and_gates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = write_trace(tmp_path / "before.memfit-trace")
    after = write_trace(tmp_path / "after.memfit-trace", step_bytes=4 * MIB)
    code, shown = run(capsys, "diff", before, after)
    assert code == 0 and "+16.00 MiB" in shown and "activation" in shown
    assert run(capsys, "diff", before, after, "--fail-over", "5%", "--of", "requested")[0] == 3
    assert run(capsys, "diff", before, after, "--fail-over", "40MiB")[0] == 0
    value = json.loads(run(capsys, "diff", after, before, "--fail-over", "5%", "--json")[1])
    assert value["over"] is False and value["delta"]["requested_bytes"] == -16 * MIB
    assert run(capsys, "diff", before, after, "--fail-over", "lots")[0] == 2
    assert run(capsys, "diff", before, tmp_path / "none")[0] == 5


def test_check_keeps_a_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(tmp_path / "run.memfit-trace")
    code, shown = run(capsys, "check", trace, "--limit", "1GB")
    assert code == 0 and "below the limit" in shown
    code, shown = run(capsys, "check", trace, "--limit", "60MiB", "--of", "requested", "--json")
    value = json.loads(shown)
    assert code == 3 and value["ok"] is False and value["peak_bytes"] == (16 * 3 + 20) * MIB
    assert run(capsys, "check", "train.py", "--limit", "1GB")[0] == 2  # on which GPU?
    assert run(capsys, "check", trace, "--limit", "1GB", "--of", "device")[0] == 2


def test_check_runs_scripts_and_workloads_on_a_made_up_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def dry_run(target: object, **settings: object) -> DryRunResult:
        asked.append((target, settings))
        return made_up

    monkeypatch.setattr("memfit.dryrun.dry_run", dry_run)
    words = ("check", "train.py", "--gpu", "a100-80gb", "--json", "--limit", "2GiB")
    made_up = dry_run_result(3 << 30)
    code, shown = run(capsys, *words, "--", "--lr", "1")
    assert code == 3 and json.loads(shown)["peaks"]["device_bytes"] == 3 << 30
    made_up = dry_run_result(1 << 30)
    assert run(capsys, *words, "--of", "device")[0] == 0
    made_up = dry_run_result(1 << 30, exit_code=7)
    assert run(capsys, *words)[0] == 1
    assert run(capsys, "check", "hf:gpt2,batch=1", "--gpu", "a100", "--limit", "2GiB")[0] == 1
    assert asked[0][0] == ["train.py", "--lr", "1"] and asked[3][0] == "hf:gpt2,batch=1"


def dry_run_result(size: int, **known: int) -> DryRunResult:
    return DryRunResult(
        gpu="a100-80gb", torch="2.14.1", peak_requested_bytes=size, peak_allocated_bytes=size,
        peak_reserved_bytes=size,
        context_bytes=0, device_total_bytes=size, nvml_total_bytes=80 << 30, runtime_total_bytes=79 << 30,
        event_count=0, wall_seconds=1.0, **known,  # type: ignore[arg-type]
    )  # fmt: skip


def test_rules_lists_and_explains(capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = run(capsys, "rules")
    assert code == 0 and "FRAG_OOM" in shown and "SHAPE_CHURN" in shown
    code, shown = run(capsys, "rules", "--explain", "leak_monotonic")
    assert code == 0 and "least_slope_bytes = 1048576" in shown and "slope × remaining steps" in shown
    assert len(json.loads(run(capsys, "rules", "--json")[1])["rules"]) == 32
    assert run(capsys, "rules", "--explain", "NOTHING")[0] == 2
