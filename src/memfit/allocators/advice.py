"""What to do after a replay: the setting to use, its gain and its risks, and what else the numbers say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memfit.allocators.candidates import EFFECTS
from memfit.allocators.outcome import Outcome
from memfit.allocators.packing_bound import Bound
from memfit.allocators.shortage import Shortage, mib
from memfit.core.recording import Recording
from memfit.core.trace import Action

LEAST_GAIN = 0.02
CLOSE = 1.03
LEAST_GAIN_BYTES = 32 << 20
ROUNDING_WASTE = 0.05
MOST_NAMED = 4


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to do.

    Attributes:
        setting: the value of ``PYTORCH_ALLOC_CONF`` to use; ``None`` where none is worth it.
        line: the exact line to type.
        gain_bytes: by how much it lowers the reserved peak; negative where it only makes the run go through.
        sentences: what was found, in order of weight.
        risks: what to mind with the setting.
    """

    setting: str | None
    line: str | None
    gain_bytes: int
    sentences: tuple[str, ...]
    risks: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "setting": self.setting,
            "line": self.line,
            "gain_bytes": self.gain_bytes,
            "sentences": list(self.sentences),
            "risks": list(self.risks),
        }


def advise(
    outcomes: Sequence[Outcome],
    *,
    shortages: Sequence[Shortage],
    growth: tuple[Sequence[int], int],
    recording: Recording,
    bound: Bound | None,
) -> Advice:
    """The advice that follows from the runs; the first of them is the main one."""
    main = outcomes[0]
    base = next((o for o in outcomes[1:] if o.name == main.name and o.start == "empty"), main)
    tried = [o for o in outcomes[1:] if o.kind == "setting" and o is not base]
    best = _best(tried)
    chosen = best if best is not None and _is_worth_it(best, base) else None
    sentences = [
        *_about_settings(base, tried, chosen, shortages),
        *_about_growth(growth, base),
        *_about_packing(main, bound),
        *_about_rounding(main),
        *_about_flushes(main, recording),
    ]
    return Advice(
        setting=None if chosen is None else chosen.name,
        line=None if chosen is None else chosen.line,
        gain_bytes=0 if chosen is None else base.peak_reserved_bytes - chosen.peak_reserved_bytes,
        sentences=tuple(sentences),
        risks=() if chosen is None else chosen.risks,
    )


def _best(tried: Sequence[Outcome]) -> Outcome | None:
    """No failures, then no flushes, then what reserves least; of those that are close, the simplest."""
    if not tried:
        return None
    fewest = min((len(o.out_of_memory_events), o.retries) for o in tried)
    left = [o for o in tried if (len(o.out_of_memory_events), o.retries) == fewest]
    enough = CLOSE * min(o.peak_reserved_bytes for o in left)
    return next(o for o in left if o.peak_reserved_bytes <= enough)


def _is_worth_it(best: Outcome, base: Outcome) -> bool:
    if best.fits != base.fits:
        return best.fits
    if not best.fits:
        return False
    gain = base.peak_reserved_bytes - best.peak_reserved_bytes
    return gain >= max(LEAST_GAIN_BYTES, LEAST_GAIN * base.peak_reserved_bytes) or (
        base.retries > 0 and best.retries == 0
    )


def _about_settings(
    base: Outcome, tried: Sequence[Outcome], chosen: Outcome | None, shortages: Sequence[Shortage]
) -> list[str]:
    if not tried:
        return []
    if chosen is None:
        if base.fits:
            return ["No setting of the allocator would reserve noticeably less."]
        amount = bool(shortages) and not shortages[0].is_layout
        why = " The live memory itself has to shrink." if amount else ""
        return [f"None of the {len(tried)} settings that were tried makes it go through.{why}"]
    if base.fits:
        gain = base.peak_reserved_bytes - chosen.peak_reserved_bytes
        share = 100 * gain / max(base.peak_reserved_bytes, 1)
        flushes = (
            f", and {base.retries} flushes of the cache fall away" if base.retries > chosen.retries else ""
        )
        return [
            f"{chosen.name}{_how(chosen)} lowers the reserved peak from {mib(base.peak_reserved_bytes)} to "
            f"{mib(chosen.peak_reserved_bytes)} ({share:.1f} % less{flushes})."
        ]
    others = [o.name for o in tried if o.fits and o is not chosen]
    also = f" So do {', '.join(others[:MOST_NAMED])}." if others else ""
    flushes = f", with {chosen.retries} flushes of the cache" if chosen.retries else ""
    return [
        f"With {chosen.name}{_how(chosen)} the same events go through: "
        f"{mib(chosen.peak_reserved_bytes)} reserved at most{flushes}.{also}"
    ]


def _how(outcome: Outcome) -> str:
    how = next((how for key, how in EFFECTS.items() if outcome.name.startswith(key)), "")
    return f" ({how})" if how else ""


def _about_growth(growth: tuple[Sequence[int], int], base: Outcome) -> list[str]:
    sizes, steps = growth
    total = sum(sizes)
    if not sizes or total < 0.1 * base.peak_requested_bytes:
        return []
    return [
        f"{len(sizes)} buffers grow step by step: {steps} times a larger one is allocated while the old one "
        f"is still live, and no freed one is large enough for the next. Allocated once at their final size "
        f"they need {mib(total)}, and nothing grows."
    ]


def _about_packing(main: Outcome, bound: Bound | None) -> list[str]:
    if bound is None or not bound.best_bytes or not main.peak_reserved_bytes:
        return []
    over = main.peak_reserved_bytes - bound.best_bytes
    share = 100 * over / main.peak_reserved_bytes
    what = "The best packing found needs" if bound.packing_bytes is not None else "Live blocks need at most"
    if over <= 0:
        return []
    return [
        f"{what} {mib(bound.best_bytes)}: {mib(over)} ({share:.1f} %) of the reserved peak is fragmentation."
    ]


def _about_rounding(main: Outcome) -> list[str]:
    waste = main.peak_allocated_bytes - main.peak_requested_bytes
    if waste <= ROUNDING_WASTE * main.peak_allocated_bytes or waste < LEAST_GAIN_BYTES:
        return []
    return [
        f"Rounding and rests that are not split off take {mib(waste)} of the allocated peak; "
        "roundup_power2_divisions, where it is set, is the usual reason."
    ]


def _about_flushes(main: Outcome, recording: Recording) -> list[str]:
    sentences = []
    if main.fits and main.retries:
        sentences.append(
            f"The cache was flushed {main.retries} times to go on: memory is at its limit, and each flush "
            "waits for the GPU."
        )
    actions = recording.trace.action
    calls = int((actions == Action.EMPTY_CACHE).sum())
    freed = int((actions == Action.SEGMENT_FREE).sum())
    taken = int((actions == Action.SEGMENT_ALLOC).sum())
    oom = bool(np.any(actions == Action.OOM))
    if calls >= 3 or (not oom and freed >= 20 and taken >= freed):
        how = (
            f"empty_cache() is called {calls} times"
            if calls
            else f"{freed} segments are given back and taken again"
        )
        sentences.append(
            f"{how}: it costs time and does not lower what PyTorch itself needs; delete the calls."
        )
    return sentences
