from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memfit.planning.figures import StepFigures
from memfit.reports.account import Account
from memfit.reports.palette import CATEGORY_PAINTS, in_order

SIZES = st.integers(min_value=0, max_value=2**40)


@given(
    st.dictionaries(st.sampled_from([*CATEGORY_PAINTS, "unheard_of"]), SIZES),
    SIZES,
    SIZES,
    SIZES,
    st.integers(min_value=1, max_value=2**34),
    SIZES,
)
def test_the_rows_always_add_up_to_the_device_total(
    categories, unnamed, rounding, cached, context, libraries
):
    requested = sum(categories.values()) + unnamed
    figures = StepFigures(
        peak_requested_bytes=requested,
        peak_allocated_bytes=requested + rounding,
        peak_reserved_bytes=requested + rounding + cached,
        step_seconds=1.0,
        peak_by_category=categories,
    )
    total = context + libraries + figures.peak_reserved_bytes
    account = Account.of(figures, context_bytes=context, device_total_bytes=total)
    assert sum(row.size_bytes for row in account.rows) == account.total_bytes == total
    assert all(row.size_bytes > 0 for row in account.rows)


def test_without_a_device_total_it_is_context_and_reserved(fitted):
    account = fitted.account(fitted.result.plain)
    assert account.total_bytes == fitted.result.context_bytes + fitted.result.plain.peak_reserved_bytes
    assert account.free_bytes == fitted.gpu.nvml_total_bytes - account.total_bytes


def test_categories_come_in_one_order_and_unknown_ones_are_other():
    assert list(in_order({"unheard_of": 1, "activation": 2, "parameter": 3, "input": 0})) == [
        "parameter",
        "activation",
        "other",
    ]
