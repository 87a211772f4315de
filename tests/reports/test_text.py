"""The screens, word for word, at 80 columns. MEMFIT_GOLDEN=write writes them anew."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from memfit.reports import text
from memfit.reports.report import FitReport

GOLDEN = Path(__file__).parent / "golden"


def check_golden(name: str, shown: str) -> None:
    path = GOLDEN / name
    if os.environ.get("MEMFIT_GOLDEN") == "write":
        path.write_text(shown, encoding="utf-8")
    assert shown == path.read_text(encoding="utf-8")


def test_a_fit_with_a_plan(fitted):
    check_golden("fit.txt", text.to_text(text.fit_text(fitted)))


def test_a_fit_without_a_plan(unfitted):
    check_golden("no_plan.txt", text.to_text(text.fit_text(unfitted)))


def test_the_account(fitted):
    check_golden("account.txt", text.to_text(text.account(fitted.account(fitted.result.plain))))


def test_a_plan_that_was_saved_is_named(fitted):
    shown = text.to_text(text.fit_text(replace(fitted, plan_path="out/plan.json")))
    assert "memfit.Plan.load('out/plan.json')" in shown
    assert "--plan" not in shown


def test_plain_training_that_fits_shows_no_plan(fitted: FitReport):
    result = replace(
        fitted.result,
        plain_fits=True,
        budget_bytes=8 << 30,
        techniques=(),
        planned=fitted.result.plain,
        not_modelled=(),
    )
    shown = text.to_text(text.fit_text(replace(fitted, result=result)))
    assert "Nothing needs to change" in shown
    assert "What it costs" not in shown


@pytest.mark.parametrize("width", [60, 80, 110])
def test_no_line_is_wider_than_asked(fitted, width):
    shown = text.to_text(text.fit_text(fitted), width=width)
    assert max(map(len, shown.splitlines())) <= width


@pytest.mark.parametrize(
    ("share", "bar"), [(0.0, ""), (1e-9, "▏"), (0.5, "██"), (1.0, "████"), (7.0, "████")]
)
def test_bars(share, bar):
    assert text.bar_text(share, columns=4) == bar


def test_text_of_the_user_is_no_markup(fitted):
    result = replace(fitted.result, workload="[bold]model[/bold]", notes=("[red]note",))
    shown = text.to_text(text.fit_text(replace(fitted, result=result)))
    assert "[bold]model[/bold]" in shown
    assert "[red]note" in shown
