from __future__ import annotations

from dataclasses import replace

import pytest

from memfit.planning.figures import Verified
from memfit.reports import verdict

MIB = 1 << 20


def test_both_steps_are_held_against_the_budget(fitted):
    plain, planned = verdict.verdicts(fitted.result)
    assert plain == verdict.Verdict(
        good=False,
        text="The plain step does not fit: it reserves 6.45 GiB against a budget of 3.00 GiB, "
        "3.45 GiB too much.",
    )
    assert planned.good is True
    assert "72.00 MiB to spare" in planned.text
    assert "dry run of the planned step itself" in planned.text


def test_within_the_budget_but_past_the_device_is_said(fitted):
    result = replace(fitted.result, budget_bytes=7000 * MIB, plain_fits=False)
    assert "takes 6.74 GiB of the device with the CUDA context" in verdict.verdicts(result)[0].text


def test_plain_training_can_be_the_plan(fitted):
    result = replace(
        fitted.result, budget_bytes=8000 * MIB, plain_fits=True, techniques=(), planned=fitted.result.plain
    )
    plain, plan = verdict.verdicts(result)
    assert plain.good and plan.good
    assert "Nothing needs to change" in plan.text


def test_no_plan_names_the_least_budget_and_what_would_help(unfitted):
    assert verdict.verdicts(unfitted.result)[1].text.endswith("the least budget that would do is 2.54 GiB.")
    steps = verdict.next_steps(unfitted.result, allow="exact")
    assert steps[0] == "raise the budget: --budget 2600MiB"
    assert steps[1] == "allow more: --allow reordered (now exact)"
    assert not any("--allow" in step for step in verdict.next_steps(unfitted.result, allow="approximate"))


def test_a_suggested_budget_is_never_too_small(unfitted):
    result = replace(unfitted.result, least_budget_bytes=2600 * MIB + 1)
    assert "2601MiB" in verdict.next_steps(result, allow="exact")[0]


def test_cost_names_time_recompute_and_bound(fitted):
    assert verdict.cost(fitted.result) == (
        "Predicted time of a step: 412 ms → 438 ms (+6.4 %). No plan that keeps or recomputes can add less "
        "than 5.1 % in this budget, or less than 5.4 % at this plan's own peak."
    )


@pytest.mark.parametrize(("value", "text"), [(6.44, "+6.4 %"), (-55.5, "−55.5 %"), (0.01, "±0.0 %")])
def test_percentages_have_a_sign(value, text):
    assert verdict.signed_percent(value) == text


@pytest.mark.parametrize(
    ("verified", "good", "words"),
    [
        (None, None, "--no-verify"),
        (Verified(passed=None, reason="the step cannot run on the CPU"), None, "cannot run on the CPU"),
        (Verified(passed=True, bitwise=True, scale="2 samples", steps=3), True, "Bitwise equal"),
        (
            Verified(passed=True, max_relative_error=1e-6, tolerance=1e-4, steps=3),
            True,
            "1.0e-06, allowed 1.0e-04",
        ),
        (
            Verified(passed=False, differences=("gradient of h.0.weight",), steps=3),
            False,
            "gradient of h.0.weight",
        ),
    ],
)
def test_verification_in_words(fitted, verified, good, words):
    statement = verdict.verification(replace(fitted.result, verified=verified))
    assert statement.good is good
    assert words in statement.text


def test_two_lines_apply_a_plan_and_micro_batches_need_two_more(fitted):
    assert verdict.apply_lines(fitted.result, "p.json") == (
        "plan = memfit.Plan.load('p.json')",
        "plan.apply(model, optimizer)",
    )
    cut = replace(fitted.result, techniques=({"technique": "micro_batching", "micro_batches": 2},))
    assert "plan.micro_batches(batch)" in verdict.apply_lines(cut, "p.json")[2]
