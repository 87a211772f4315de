"""The sentences of a fit: what fits and why, what it costs, how it was checked, what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memfit.core.units import format_bytes, format_seconds
from memfit.planning.figures import Advice, StepFigures, Verified
from memfit.planning.plan import FitResult
from memfit.reports.spread import device_memory_line

MOST_DIFFERENCES = 3


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One statement, and whether it is good news (``None``: neither)."""

    good: bool | None
    text: str


def verdicts(result: FitResult, *, allow: str = "exact") -> tuple[Verdict, ...]:
    """Does the plain step fit, does the planned one: which number against which."""
    plain = Verdict(
        good=result.plain_fits, text=_fit_sentence("The plain step", result.plain, result.plain_fits, result)
    )
    if result.plain_fits and not result.techniques:
        return (plain, Verdict(good=True, text="Nothing needs to change: plain training is the plan."))
    if result.planned is None:
        return (plain, Verdict(good=False, text=no_plan(result, allow=allow)))
    planned = _fit_sentence("The planned step", result.planned, result.fits, result)
    return (plain, Verdict(good=result.fits, text=f"{planned} This was measured by {_instrument(result)}."))


def _fit_sentence(subject: str, figures: StepFigures, fits: bool, result: FitResult) -> str:
    reserved, budget = figures.peak_reserved_bytes, result.budget_bytes
    against = f"reserves {format_bytes(reserved)} against a budget of {format_bytes(budget)}"
    if fits:
        spare = (
            f"{format_bytes(budget - reserved)} to spare" if reserved < budget else "with nothing to spare"
        )
        return f"{subject} fits: it {against}, {spare}."
    if reserved > budget:
        return f"{subject} does not fit: it {against}, {format_bytes(reserved - budget)} too much."
    total = result.context_bytes + reserved
    rest = f"but takes {format_bytes(total)} of the device with the CUDA context"
    return f"{subject} does not fit: it {against}, {rest}."


def _instrument(result: FitResult) -> str:
    if result.engine == "dryrun":
        return "a dry run of the planned step itself"
    return "the portable engine (the planned step on meta tensors, with PyTorch's allocator simulated)"


def no_plan(result: FitResult, *, allow: str) -> str:
    """Why there is no plan, and what would be enough."""
    text = f"No {allow} plan that was tried fits {format_bytes(result.budget_bytes)}"
    if result.least_budget_bytes is None:
        return f"{text}."
    return f"{text}; the least budget that would do is {format_bytes(result.least_budget_bytes)}."


def next_steps(result: FitResult, *, allow: str) -> tuple[str, ...]:
    """What can be changed where no plan fits."""
    steps = []
    if result.least_budget_bytes is not None:
        steps.append(f"raise the budget: --budget {_budget_text(result.least_budget_bytes)}")
    looser = {"exact": ("reordered", "approximate"), "reordered": ("approximate",)}.get(allow, ())
    if looser:
        steps.append(f"allow more: --allow {looser[0]} (now {allow})")
    steps.append("use a smaller batch or sequence, or a GPU with more memory (memfit gpus)")
    return (*steps, *map(_advised, sorted(result.advice, key=lambda one: not one.fits)))


def _advised(one: Advice) -> str:
    """Another training that was run: what it is, how far it is from the one asked for, what it needs."""
    verdict = "fits" if one.fits else "does not fit"
    grade = "" if one.exactness == "exact" else f" ({one.exactness})"
    need = format_bytes(one.peak_reserved_bytes)
    return f"{one.what}{grade}, with every block recomputed, reserves {need}: {verdict} (not a plan)"


def _budget_text(size_bytes: int) -> str:
    """A budget as one would type it: MiB, rounded up so that it is enough."""
    return f"{-(-size_bytes // 2**20)}MiB"


def time_change_percent(result: FitResult) -> float | None:
    """By how much the planned step is predicted to take longer than the plain one, in percent."""
    if result.planned is None or not result.plain.step_seconds:
        return None
    return 100.0 * (result.planned.step_seconds / result.plain.step_seconds - 1.0)


def cost(result: FitResult) -> str:
    """What the plan costs in time, and the least that it could cost."""
    change = time_change_percent(result)
    if result.planned is None or change is None:
        return ""
    times = f"{format_seconds(result.plain.step_seconds)} → {format_seconds(result.planned.step_seconds)}"
    return " ".join([f"Predicted time of a step: {times} ({signed_percent(change)}).", *bounds(result)])


def bounds(result: FitResult) -> tuple[str, ...]:
    """The certified least recomputation, where the plan changes nothing but what is kept and recomputed."""
    if result.lower_bound_percent is None:
        return ()
    least = f"{result.lower_bound_percent:.1f} %"
    text = f"No plan that keeps or recomputes can add less than {least} in this budget"
    own = result.lower_bound_at_peak_percent
    return (f"{text}." if own is None else f"{text}, or less than {own:.1f} % at this plan's own peak.",)


def signed_percent(value: float) -> str:
    """``"+6.3 %"``, ``"−1.2 %"``, ``"±0.0 %"``."""
    sign = "±" if abs(value) < 0.05 else "+" if value > 0 else "−"
    return f"{sign}{abs(value):.1f} %"


def verification(result: FitResult) -> Verdict:
    """What running plain and planned steps for real showed."""
    verified = result.verified
    if result.planned is None or not result.techniques:
        return Verdict(good=None, text="Nothing to verify: the model is not changed.")
    if verified is None:
        return Verdict(good=None, text="Not verified: it was not asked for (--no-verify).")
    if verified.passed is None:
        return Verdict(good=None, text=f"Not verified: {verified.reason}.")
    where = f"{verified.steps} real optimizer steps on {verified.device}, {verified.scale or 'full size'}"
    if not verified.passed:
        return Verdict(
            good=False, text=f"Not the same as plain training ({where}): {_differences(verified)}."
        )
    if verified.bitwise:
        return Verdict(
            good=True,
            text=f"Bitwise equal to plain training: loss, gradients, buffers, random state ({where}).",
        )
    error = verified.max_relative_error or 0.0
    limit = f"largest relative difference {error:.1e}, allowed {verified.tolerance:.1e}"
    return Verdict(good=True, text=f"Equal to plain training within tolerance: {limit} ({where}).")


def _differences(verified: Verified) -> str:
    """What differs, by how much at most, and what was allowed."""
    named = "; ".join(verified.differences[:MOST_DIFFERENCES]) or verified.reason or "the results"
    more = " and more" if len(verified.differences) > MOST_DIFFERENCES else ""
    if verified.max_relative_error is None:
        return f"{named}{more}"
    error, allowed = verified.max_relative_error, verified.tolerance
    return f"{named}{more}; largest relative difference {error:.1e}, allowed {allowed:.1e}"


def to_mind(result: FitResult) -> tuple[str, ...]:
    """What limits the result: notes, what was not modelled, and values that had to be made up."""
    not_modelled = [f"Not modelled: {text}" for text in result.not_modelled]
    if result.confidence is not None and result.confidence != "exact":
        said = [reason for reason in result.confidence_reasons if reason not in result.not_modelled]
        head = f"Confidence in the memory figures: {result.confidence} (what follows says why)"
        not_modelled[:0] = [head, *said]
    memory = () if result.device_memory is None else (device_memory_line(result.device_memory),)
    return (*memory, *result.notes, *not_modelled, *(_value_read(read) for read in result.value_reads))


def _value_read(read: Any) -> str:
    """A read of a device value that the dry run does not know: where, by what, and what was answered."""
    if not isinstance(read, Mapping):
        return f"A value was read from the device: {read}"
    place = str(read.get("file")).rpartition("site-packages/")[2]
    times = f", {read['count']} times" if read.get("count", 1) != 1 else ""
    what = f"{place}:{read.get('line')} ({read.get('op')}{times})"
    told = f"A value that only a real GPU knows was read at {what}; it was answered with {read.get('answer')}"
    change = read.get("peak_change_bytes")
    if change is None:
        return told
    other = "changes nothing" if not change else f"changes the peak by {format_bytes(abs(change))}"
    return f"{told}; {read.get('other_answer')} instead {other}"


def apply_lines(result: FitResult, plan_path: str) -> tuple[str, ...]:
    """The two lines that a training script needs; two more where the plan cuts the batch."""
    lines = (f"plan = memfit.Plan.load({plan_path!r})", "plan.apply(model, optimizer)")
    if not any(settings["technique"] == "micro_batching" for settings in result.techniques):
        return lines
    return (
        *lines,
        "for part, weight in plan.micro_batches(batch):",
        "    (loss(model, part) * weight).backward()",
    )


def shell_line(words: Sequence[str]) -> str:
    """A command as it can be typed again."""
    return shlex.join(words)
