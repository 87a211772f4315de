"""What a recommender says: ranked advice, each one a plan, and the techniques that do not help, with why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from memfit.analysis.results import SCHEMA_VERSION, Result, Table
from memfit.core.exactness import Exactness
from memfit.core.units import format_bytes, format_seconds
from memfit.planning.figures import Settings, StepFigures
from memfit.planning.plan import Plan

WORDS: dict[str, str] = {
    "exact": "bitwise the same results",
    "reordered": "the same mathematics in another order",
    "approximate": "an error that is stated and bounded",
    "changes training": "something else is trained",
}


MOST_SAID = 5


def settings_text(settings: Settings) -> str:
    """``gradient checkpointing (checkpoint frequency 2)``."""
    rest = ", ".join(
        f"{key.replace('_', ' ')} {value}" for key, value in settings.items() if key != "technique"
    )
    name = str(settings["technique"]).replace("_", " ")
    return f"{name} ({rest})" if rest else name


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """One piece of advice: a plan that was tried, what it saves and what it costs.

    Attributes:
        name: the techniques in words.
        plan: to apply or save.
        saving_bytes: by how much the reserved peak falls.
        saving_requested_bytes: by how much what tensors ask for falls.
        cost_seconds: by how much a step is predicted to take longer; below zero: it is faster.
        fits: whether the planned step fits the budget.
    """

    name: str
    plan: Plan
    saving_bytes: int
    saving_requested_bytes: int
    cost_seconds: float
    fits: bool

    @property
    def exactness(self) -> Exactness:
        """How far results may move."""
        return self.plan.exactness

    @property
    def cost_percent(self) -> float:
        """The cost as a share of the plain step."""
        plain = self.plan.plain.step_seconds
        return 100 * self.cost_seconds / plain if plain else 0.0

    def apply(self, model: Any, optimizer: Any = None) -> Any:
        """Change ``model`` (and ``optimizer``) in place: `Plan.apply`. `memfit.undo` takes it back."""
        return self.plan.apply(model, optimizer)

    def __str__(self) -> str:
        faster = self.cost_seconds < 0
        time = f"{format_seconds(abs(self.cost_seconds))} {'faster' if faster else 'slower'}"
        return (
            f"{self.name}: saves {format_bytes(self.saving_bytes)}, {time} ({self.cost_percent:+.1f} %), "
            f"{WORDS[self.exactness]}"
        )

    def to_json(self) -> dict[str, Any]:
        """As plain values, the plan included."""
        return {
            "name": self.name,
            "saving_bytes": self.saving_bytes,
            "saving_requested_bytes": self.saving_requested_bytes,
            "cost_seconds": self.cost_seconds,
            "cost_percent": self.cost_percent,
            "exactness": self.exactness,
            "fits": self.fits,
            "plan": self.plan.to_json(),
        }


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """A technique that does not help here, and why not."""

    settings: Settings
    reason: str

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"settings": dict(self.settings), "reason": self.reason}


@dataclass(frozen=True, kw_only=True)
class Recommendations(Result):
    """All advice for a step, the best first. ``print(recommendations)`` shows it.

    Attributes:
        name, gpu: for what, and for which GPU.
        budget_bytes: what PyTorch may reserve.
        plain: the step as it is.
        engine: what measured: ``"dryrun"`` or ``"portable"``.
        advice: single techniques, the best first.
        together: those that help together, put one on the other; None where one alone is as good.
        rejected: what was looked at and does not help.
    """

    title: ClassVar[str] = "Recommendations"

    name: str
    gpu: str
    budget_bytes: int
    plain: StepFigures
    engine: str
    advice: tuple[Recommendation, ...]
    together: Recommendation | None
    rejected: tuple[Rejection, ...]

    @property
    def plain_fits(self) -> bool:
        """Whether the step fits the budget as it is."""
        return self.plain.peak_reserved_bytes <= self.budget_bytes

    def sentences(self) -> Sequence[str]:
        reserved, budget = format_bytes(self.plain.peak_reserved_bytes), format_bytes(self.budget_bytes)
        verdict = "fits" if self.plain_fits else "does not fit"
        said = [f"The plain step reserves {reserved} and {verdict} {budget} on {self.gpu}."]
        if not self.advice:
            return [*said, "None of the techniques that were tried lowers that."]
        best: dict[str, Recommendation] = {}
        for row in self.advice:
            best.setdefault(str(row.plan.techniques[0]["technique"]), row)
        said += [f"{place}. {row}." for place, row in enumerate(list(best.values())[:MOST_SAID], 1)]
        if self.together is not None:
            end = "which fits" if self.together.fits else "which does not fit either"
            after = format_bytes(self.together.plan.planned.peak_reserved_bytes)
            said.append(f"Together: {self.together}; {after} remain, {end}.")
        return said

    def tables(self) -> Sequence[Table]:
        listed = [*self.advice, *([self.together] if self.together is not None else [])]
        advice = Table(
            title="What helps",
            heads=("technique", ">saves", ">then reserved", ">a step", "results", "fits"),
            rows=tuple(
                (
                    row.name,
                    format_bytes(row.saving_bytes),
                    format_bytes(row.plan.planned.peak_reserved_bytes),
                    f"{row.cost_percent:+.1f} %",
                    row.exactness,
                    "yes" if row.fits else "no",
                )
                for row in listed
            ),
        )
        rejected = Table(
            title="What does not help, and why",
            heads=("technique", "why"),
            rows=tuple((settings_text(row.settings), row.reason) for row in self.rejected),
        )
        return (advice, rejected)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "name": self.name,
            "gpu": self.gpu,
            "engine": self.engine,
            "budget_bytes": self.budget_bytes,
            "plain": self.plain.to_json(),
            "plain_fits": self.plain_fits,
            "recommendations": [row.to_json() for row in self.advice],
            "together": None if self.together is None else self.together.to_json(),
            "rejected": [row.to_json() for row in self.rejected],
        }
