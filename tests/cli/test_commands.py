"""fit, gpus and doctor as a user sees them; the long work is stood in for by a result made by hand."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from memfit import cli
from memfit.cli import fit as fit_command
from memfit.cli import machine
from memfit.cli.fit_config import target
from memfit.core.errors import CannotRunHere
from reports.conftest import fitted, make_trace, plain_trace, planned_trace, unfitted

__all__ = ["fitted", "plain_trace", "planned_trace", "unfitted"]

FIT_KEYS = {
    "schema_version", "workload", "gpu", "engine", "torch", "budget_bytes", "plain", "planned", "fits",
    "techniques", "exactness", "recompute_percent", "lower_bound_percent", "verified", "least_budget_bytes",
    "candidates", "files",
}  # fmt: skip
STEP_KEYS = {"peak_requested_bytes", "peak_allocated_bytes", "peak_reserved_bytes", "step_seconds"}


@pytest.fixture
def run_fit(monkeypatch, capsys):
    """Run `memfit fit` on a result made by hand: (report, *options) → (code, stdout, stderr)."""

    def run(report, *options: str) -> tuple[int, str, str]:
        monkeypatch.setattr(fit_command, "_search", lambda asked, traces, quiet: report.result)
        code = cli.main(["fit", "hf:gpt2,batch=8", "--gpu", "rtx3060-12gb", *options])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_fit_prints_the_report_and_ends_with_0(fitted, run_fit):
    code, out, err = run_fit(fitted)
    assert (code, err) == (0, "")
    for heading in ("Where the memory goes", "Verdict", "The plan", "What it costs", "Verified", "Use it"):
        assert heading in out
    assert "\x1b" not in out
    assert all(line == line.rstrip() for line in out.splitlines())


def test_no_plan_is_4(unfitted, run_fit):
    code, out, _ = run_fit(unfitted)
    assert code == 4
    assert "the least budget that would do is 2.54 GiB" in " ".join(out.split())


def test_json_is_one_object_with_its_keys(fitted, unfitted, run_fit):
    code, out, err = run_fit(fitted, "--json")
    value = json.loads(out)
    assert (code, err) == (0, "")
    assert set(value) >= FIT_KEYS
    assert set(value["plain"]) >= STEP_KEYS <= set(value["planned"])
    assert all(isinstance(value["plain"][key], int) for key in STEP_KEYS if key.endswith("_bytes"))
    assert json.loads(run_fit(unfitted, "--json")[1])["planned"] is None


def test_files_are_written_and_named(fitted, run_fit, tmp_path):
    (tmp_path / "png").mkdir()
    page, plan = tmp_path / "r.html", tmp_path / "p.json"
    code, out, _ = run_fit(fitted, "--report", str(page), "--plan", str(plan), "--png", str(tmp_path / "png"))
    assert code == 0
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert json.loads(plan.read_text())["budget_bytes"] == fitted.result.budget_bytes
    assert str(page) in out and str(plan) in out
    assert {path.suffix for path in (tmp_path / "png").iterdir()} == {".png"}
    assert "memfit fit hf:gpt2,batch=8 --gpu rtx3060-12gb" in page.read_text(encoding="utf-8")


def test_no_plan_writes_no_plan_file(unfitted, run_fit, tmp_path):
    assert run_fit(unfitted, "--plan", str(tmp_path / "p.json"))[0] == 4
    assert list(tmp_path.iterdir()) == []


def test_a_refuted_plan_is_shown_not_saved_and_ends_with_1(fitted, run_fit, tmp_path):
    from dataclasses import replace

    from memfit.planning.figures import Verified

    refuted = Verified(passed=False, differences=("loss",), steps=3, max_relative_error=0.5, tolerance=1e-4)
    report = replace(fitted, result=replace(fitted.result, verified=refuted))
    code, out, err = run_fit(report, "--plan", str(tmp_path / "p.json"))
    assert code == 1
    assert "Use it" not in out
    assert "the plan is refuted" in err and "5.0e-01, allowed 1.0e-04" in err
    assert list(tmp_path.iterdir()) == []


def test_traces_named_by_the_result_become_charts(fitted, run_fit, tmp_path):
    from dataclasses import replace

    make_trace(recompute=False).save(tmp_path / "plain.memfit-trace")
    plain = replace(fitted.result.plain, trace_path=str(tmp_path / "plain.memfit-trace"))
    report = replace(fitted, result=replace(fitted.result, plain=plain))
    run_fit(report, "--report", str(tmp_path / "r.html"))
    assert 'id="chart-plain"' in (tmp_path / "r.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--report", "/no/such/folder/r.html"], "there is no folder /no/such/folder"),
        (["--report", "train.py"], "ends in .html"),
        (["--plan", "/proc/p.json"], "cannot write in /proc"),
        (["--png", "/no/such/folder"], "--png /no/such/folder: there is no folder"),
    ],
)
def test_files_that_cannot_be_written_stop_it_before_the_work(options, words, monkeypatch, capsys):
    monkeypatch.setattr(
        fit_command, "_search", lambda asked, traces, quiet: pytest.fail("the long work began")
    )
    assert cli.main(["fit", "hf:gpt2", "--gpu", "rtx3060-12gb", *options]) == 2
    message = capsys.readouterr().err
    assert words in message
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fit", "hf:gpt2"], "--gpu"),
        (["fit", "--gpu", "rtx3060-12gb"], "WORKLOAD"),
        (["fit", "hf:gpt2", "--gpu", "rtx306-12gb"], "rtx3060-12gb"),
        (["fit", "hf:gpt2", "--gpu", "rtx3060-12gb", "--budget", "8Gb"], "budget '8Gb'"),
        (["fit", "hf:gpt2", "--gpu", "rtx3060-12gb", "--allow", "anything"], "--allow"),
    ],
)
def test_usage_errors_name_what_is_wrong(arguments, words, capsys):
    assert cli.main(arguments) == 2
    message = capsys.readouterr().err
    assert words in message
    assert message.startswith("memfit: error: ")


def test_a_configuration_says_what_the_command_line_leaves_out(fitted, monkeypatch, capsys, tmp_path):
    asked = []
    monkeypatch.setattr(
        fit_command, "_search", lambda question, traces, quiet: asked.append(question) or fitted.result
    )
    file = tmp_path / "memfit.yaml"
    file.write_text("planning:\n  workload: hf:gpt2,batch=8\n  gpu: rtx3060-12gb\n  memory_budget: 6GiB\n")
    assert cli.main(["fit", "--config", str(file)]) == 0
    assert cli.main(["fit", "tv:resnet50", "--config", str(file), "--gpu", "a100", "--budget", "3GiB"]) == 0
    assert [(one.workload, one.gpu, one.budget) for one in asked] == [
        ("hf:gpt2,batch=8", "rtx3060-12gb", str(6 * 2**30)),
        ("tv:resnet50", "a100", "3GiB"),
    ]
    assert target(None, "any", None, places=[file]).budget is None  # each GPU has its own
    assert target(None, None, None, places=[file], takes_budget=False).budget is None
    file.write_text("planning:\n  gpus: t4\n")
    capsys.readouterr()
    assert cli.main(["fit", "hf:gpt2", "--config", str(file)]) == 5
    message = capsys.readouterr().err
    assert message.startswith("memfit: error: ") and message.count("\n") == 1
    assert f"{file}:2" in message and "gpus" in message
    assert len(asked) == 2


def test_the_command_can_be_typed_again(tmp_path):
    asked = fit_command.Asked(
        workload="my file.py:make", gpu="24GiB,sm89", budget="8 GiB",
        allow=fit_command.Allow.reordered, verify=False,
        engine=fit_command.EngineChoice.auto, report=Path("r.html"), plan_file=None, png=None,
    )  # fmt: skip
    assert asked.command() == (
        "memfit fit 'my file.py:make' --gpu 24GiB,sm89 --budget '8 GiB' --allow reordered "
        "--report r.html --no-verify"
    )


def test_gpus_as_table_and_json(capsys):
    from memfit.core.catalogue import CATALOGUE

    assert cli.main(["gpus"]) == 0
    table = capsys.readouterr().out
    assert all(f" {key} " in table for key in CATALOGUE)
    assert cli.main(["gpus", "--json"]) == 0
    gpus = json.loads(capsys.readouterr().out)["gpus"]
    assert [gpu["key"] for gpu in gpus] == list(CATALOGUE)
    assert all(gpu["sources"] and gpu["default_budget_bytes"] > 0 for gpu in gpus)


def test_doctor_in_json_has_an_engine_and_a_remedy_for_what_is_missing(capsys):
    code = cli.main(["doctor", "--json", "--no-trial"])
    value = json.loads(capsys.readouterr().out)
    assert code == (0 if value["engine"] else 6)
    assert value["engine"] in ("dryrun", "portable", None)
    assert {check["name"] for check in value["checks"]} >= {
        "memfit",
        "torch",
        "C compiler",
        "made-up GPU",
        "real GPU",
    }


def test_doctor_without_a_compiler_falls_back_and_says_how_to_get_one(monkeypatch, capsys):
    monkeypatch.setenv("CC", "no-such-compiler")
    assert cli.main(["doctor", "--no-trial"]) == 0
    out = capsys.readouterr().out
    assert "✗  C compiler" in out
    assert "Engine: portable" in out


def test_doctor_without_torch_cannot_run(monkeypatch, capsys):
    import memfit.dryrun.build as build

    def missing():
        raise CannotRunHere("torch is not installed; install it with: pip install 'memfit[torch]'")

    monkeypatch.setattr(build, "torch_build", missing)
    assert cli.main(["doctor", "--no-trial"]) == 6
    out = capsys.readouterr().out
    assert "memfit[torch]" in out
    assert "Engine: none" in out


def test_doctor_looks_without_importing_torch():
    import subprocess
    import sys

    code = (
        "import sys; from memfit.cli.machine import look_at_machine; look_at_machine(trial=False);"
        "sys.exit('torch' in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], check=False, timeout=120, env=dict(os.environ)
        ).returncode
        == 0
    )


@pytest.mark.dryrun
def test_doctor_tries_a_first_tensor():
    found = machine.look_at_machine()
    assert found.engine == "dryrun"
    assert "a first tensor on a made-up" in next(
        check.detail for check in found.checks if check.name == "dry run"
    )


def test_doctor_names_the_vector_instructions():
    from memfit.cli.vector_instructions import vector_instructions

    line = vector_instructions(ask_torch=False)
    assert line.startswith("the CPU has ") and "numpy computes with " in line and "torch" not in line
