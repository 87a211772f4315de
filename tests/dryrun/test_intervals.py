"""Runs with other answers: which places are tried, what that changes, and how far the peak can be trusted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from preloaded import SCRIPTS, Preloaded

from memfit.core.errors import ToolFailure, UsageError
from memfit.dryrun.confidence import with_confidence
from memfit.dryrun.frames import Place
from memfit.dryrun.repeats import with_other_answers
from memfit.dryrun.result import DryRunResult, ScriptError, ValueRead
from memfit.dryrun.steering import does_it_steer

MIB = 1 << 20


@pytest.fixture(scope="module")
def answered(preloaded: Preloaded, tmp_path_factory: pytest.TempPathFactory) -> DryRunResult:
    """The script of unknown values, repeated with every other answer."""
    folder = tmp_path_factory.mktemp("unknown")

    def run(answers: Mapping[str, str]) -> DryRunResult:
        return preloaded.run("unknown_values.py", "clip", folder=folder, steps="all", answers=answers).result

    return with_confidence(with_other_answers(run({}), run, most=12))


def line_of(text: str) -> int:
    lines = (SCRIPTS / "unknown_values.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def reads_of(result: DryRunResult, text: str) -> list[ValueRead]:
    found = [read for read in result.value_reads if read.line == line_of(text)]
    assert found, (text, result.value_reads)
    return found


@pytest.mark.dryrun
@pytest.mark.parametrize(
    ("text", "answer", "least_mib"),
    [
        ("if loss.item() < best", "lower at each read", -16),
        ("scaler.step(optimizer)", "the opposite", 48),
        ("if not torch.isfinite(loss)", "the opposite", 96),
        ("if (x.sum() > 0).any()", "the opposite", 192),
        ("picked = wide[x > 0.5]", "all elements", 7),
    ],
)
def test_each_other_answer_changes_what_it_decides(
    answered: DryRunResult, text: str, answer: str, least_mib: int
) -> None:
    reads = reads_of(answered, text)
    changes = [read.peak_change_bytes for read in reads if read.peak_change_bytes]
    assert changes and any(answer in (read.other_answer or "") for read in reads)
    assert all(abs(change - least_mib * MIB) <= 9 * MIB for change in changes), changes


@pytest.mark.dryrun
def test_the_interval_has_them_all(answered: DryRunResult) -> None:
    interval = answered.interval
    assert interval is not None and interval.repeats == 12
    assert interval.requested.low_bytes <= answered.peak_requested_bytes - 8 * MIB
    assert interval.requested.high_bytes >= answered.peak_requested_bytes + 190 * MIB
    assert interval.reserved.low_bytes <= answered.peak_reserved_bytes <= interval.reserved.high_bytes
    assert answered.confidence == "low" and "other answers change" in answered.confidence_reasons[0]


@pytest.mark.dryrun
def test_an_answer_that_ends_the_script_is_told(answered: DryRunResult) -> None:
    (read, *_) = reads_of(answered, "clip_grad_norm_(")
    assert read.peak_change_bytes is None and "the script ends with it (RuntimeError)" in read.why


@pytest.mark.dryrun
def test_what_is_only_shown_is_not_tried(answered: DryRunResult) -> None:
    (read,) = reads_of(answered, "seen.append(")
    assert (read.steers, read.other_answer) == ("no", None) and "only shown" in read.why


@pytest.mark.dryrun
def test_experts_get_even_shares_or_one_gets_all(preloaded: Preloaded, tmp_path: Path) -> None:
    script = tmp_path / "route.py"
    script.write_text(
        "import torch\n"
        "scores = torch.randn(100, 8, device='cuda')\n"
        "_, chosen = scores.topk(2)\n"
        "print([len(torch.where(chosen == expert)[0]) for expert in range(8)])\n"
    )
    first = preloaded.run(script, folder=tmp_path)
    assert first.stdout == f"{[25] * 8}\n"
    (read,) = first.result.value_reads
    assert (read.line, read.kind, read.answer, read.steers) == (3, "routing", "evenly spread", "yes")
    assert preloaded.run(script, folder=tmp_path, answers={read.site: "one"}).stdout == (
        f"{[100] * 2 + [0] * 6}\n"
    )


@pytest.mark.dryrun
@pytest.mark.slow
def test_models_ask_for_the_attention_that_true_values_ask_for(preloaded: Preloaded, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    outcome = preloaded.run("attention_choices.py", folder=tmp_path)
    assert len(outcome.stdout.splitlines()) == 15, outcome.stderr


# ------------------------------------------------------------------------ without a run ----

PROGRAM = """
def train(loss, best, log):
    value = loss.item()
    log.info(value)
    other = loss.item()
    total = other + 1
    if total > best: log.info(1)
    third = [loss.item()]
    helper(third)
    print("x" if loss.item() > 0 else "y")
    correct = (loss == best).sum().item()
    while loss.item():
        pass
    self.last = loss.item()

def fourth(loss):
    return loss.item()

def stop(loss):
    if self.last: return
    assert fourth(loss)
"""


@pytest.mark.parametrize(
    ("lines", "steers"),
    [([3], "no"), ([5], "yes"), ([8], "perhaps"), ([10], "yes"), ([11], "no"), ([12], "yes"), ([14], "yes"),
     ([17], "perhaps"), ([17, 21], "yes"), ([99], "perhaps")],
)  # fmt: skip
def test_what_steers_is_told_from_the_source(tmp_path: Path, lines: list[int], steers: str) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    stack = [Place(str(path), line, "") for line in lines]
    assert does_it_steer("number", stack) == steers
    assert does_it_steer("size", stack) == "yes"


def result(**changes: Any) -> DryRunResult:
    sizes = ("peak_requested", "peak_allocated", "peak_reserved", "context", "device_total")
    fields = {f"{name}_bytes": 1000 for name in (*sizes, "nvml_total", "runtime_total")}
    return DryRunResult(
        **{**fields, "gpu": "g", "torch": "t", "event_count": 1, "wall_seconds": 1.0, **changes}
    )


def read(site: str, kind: str, steers: Any = "yes") -> ValueRead:
    return ValueRead(
        file="a.py", line=1, function="f", op="o", answer="1", count=1, kind=kind, site=site, steers=steers
    )


READS = (read("n", "number"), read("s", "size"), read("p", "boolean", "perhaps"), read("k", "number", "no"))


def test_the_likeliest_are_tried_first_and_no_more_than_asked() -> None:
    asked: list[Mapping[str, str]] = []

    def run_again(answers: Mapping[str, str]) -> DryRunResult:
        asked.append(answers)
        return result()

    def tried(most: int | None) -> list[Mapping[str, str]]:
        asked.clear()
        done = with_other_answers(result(value_reads=READS), run_again, most=most)
        assert done.interval is not None and done.interval.repeats == len(asked)
        return list(asked)

    assert tried(2) == [{"s": "all"}, {"n": "falling"}]
    assert tried(None) == [{"s": "all"}, {"n": "falling"}, {"s": "none"}, {"n": "nan"}]
    assert len(tried(100)) == 6 and tried(0) == []


def test_repeats_that_fail_count_upwards_only() -> None:
    failed = ScriptError(type="ValueError", message="")
    outcomes = {
        "all": result(
            peak_reserved_bytes=3000, peak_requested_bytes=3000, exit_code=1, ended="error", error=failed
        ),
        "none": result(
            peak_reserved_bytes=1, peak_requested_bytes=1, exit_code=1, ended="error", error=failed
        ),
    }

    def run_again(answers: Mapping[str, str]) -> DryRunResult:
        if answers == {"n": "falling"}:
            raise ToolFailure("killed")
        return outcomes[next(iter(answers.values()))]

    reads = (read("s", "size"), read("n", "number"))
    done = with_other_answers(result(value_reads=reads), run_again, most=3)
    assert done.interval is not None and done.interval.left_out == 1
    assert (done.interval.reserved.low_bytes, done.interval.reserved.high_bytes) == (1000, 3000)
    assert all(read.peak_change_bytes is None for read in done.value_reads)
    assert "ValueError" in done.value_reads[0].why and "killed" in done.value_reads[1].why
    assert DryRunResult.from_json(done.to_json()) == done


@pytest.mark.parametrize(
    ("changes", "level"),
    [
        ({}, "exact"),
        ({"value_reads": READS[3:]}, "exact"),
        ({"value_reads": READS[:1]}, "medium"),
        ({"estimates": {"cuFFT work area": 5}}, "high"),
        ({"estimates": {"cuFFT work area": 50}}, "medium"),
        ({"estimates": {"cuFFT work area": 500}}, "low"),
        ({"not_modelled": ("NCCL: …",)}, "medium"),
        ({"not_modelled": ("CUDA library calls that did nothing: cufftX",)}, "low"),
        ({"not_modelled": ("the values of 3 tensors of the host",)}, "exact"),
        ({"ended": "timeout"}, "low"),
        ({"ended": "error", "exit_code": 1}, "low"),
    ],
)  # fmt: skip
def test_confidence_follows_by_rule(changes: dict[str, Any], level: str) -> None:
    judged = with_confidence(replace(result(), **changes))
    assert judged.confidence == level and bool(judged.confidence_reasons) == (level != "exact")


def test_the_option_takes_a_number_or_none() -> None:
    from memfit.cli.dryrun import parse_repeats

    assert [parse_repeats(text) for text in (None, "none", "0", "7")] == [None, 0, 0, 7]
    with pytest.raises(UsageError, match="--repeats some"):
        parse_repeats("some")
