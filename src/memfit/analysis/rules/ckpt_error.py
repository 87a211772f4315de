"""Rule 26: checkpointing fails, or trains nothing: the error's text tells why."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from memfit.analysis.evidence import Evidence, Need
from memfit.analysis.findings import Advice, AdviceKind
from memfit.analysis.rules.base import Found, Rule


class _Class(NamedTuple):
    """A class of errors: how its text is told, what it means, what to do."""

    pattern: str
    summary: str
    action: str
    typed: str
    kind: AdviceKind = "python"


_CLASSES: tuple[_Class, ...] = (
    _Class(
        r"None of the inputs have requires_grad=True",
        "No input of a checkpointed region asks for gradients: everything in it stays untrained.",
        "Use the non-reentrant form (or let the inputs ask for gradients).",
        "checkpoint(layer, x, use_reentrant=False)  # or model.enable_input_require_grads()",
    ),
    _Class(
        r"[Mm]ark(ed)? (a variable )?ready (only once|twice)|marked as ready twice",
        "A parameter's gradient is ready twice: reentrant checkpointing under DDP.",
        "Use the non-reentrant form, and do not look for unused parameters.",
        "checkpoint(layer, x, use_reentrant=False)\n"
        "DistributedDataParallel(model, find_unused_parameters=False, static_graph=True)",
    ),
    _Class(
        r"(different metadata|[Rr]ecomputed values)[\s\S]*?torch\.Size\(\[0\]\)",
        "A recomputed tensor is empty: parameters are sharded or gathered at another time than in the "
        "forward.",
        "Checkpoint inside of the FSDP wrap; with ZeRO-3 use the reentrant form.",
        "apply_activation_checkpointing(model)  # before fully_shard(model)",
    ),
    _Class(
        r"A different number of tensors was saved",
        "The recomputation saves another number of tensors: a branch or a cache took another way.",
        "Make the region do the same twice: no caches, no counters, the same branch; debug=True shows both.",
        "checkpoint(layer, x, use_reentrant=False, debug=True)",
    ),
    _Class(
        r"different metadata[\s\S]*?dtype': torch\.(\w+)[\s\S]*?dtype': torch\.(?!\1)\w+",
        "A recomputed tensor has another type: autocast was not the same in the recomputation.",
        "Enter autocast around the whole step, not inside of the region, and leave its cache on.",
        "with torch.autocast('cuda', torch.bfloat16):\n    loss = model(batch)",
    ),
    _Class(
        r"different metadata|CheckpointError",
        "A recomputed tensor has another shape: the region is not the same twice (routing, random sizes).",
        "Keep what decides the shape (the router's output) out of the region, or set determinism_check.",
        "checkpoint(expert, x, routes, use_reentrant=False, determinism_check='default', debug=True)",
    ),
)
"""From the most to the least specific; the first that fits counts."""


@dataclass(frozen=True, kw_only=True)
class CkptError(Rule):
    """Reads the text of an error or a log.

    Args:
        most_shown: characters of the message that are shown.
    """

    number: ClassVar[int] = 26
    id: ClassVar[str] = "CKPT_ERROR"
    title: ClassVar[str] = "Checkpointing fails, or trains nothing"
    needs: ClassVar[tuple[Need, ...]] = ("text",)
    detection: ClassVar[str] = (
        "The text has PyTorch's message of a checkpoint error: shapes of [0], types, counts, 'ready only "
        "once', 'None of the inputs have requires_grad'."
    )
    saving: ClassVar[str] = "enables ACT_DOMINANT's"
    source: ClassVar[str] = "LlamaFactory#6438; torchtitan#1117; pytorch#141896; peft#1142; accelerate#2017"

    most_shown: int = 160

    def look(self, case: Evidence) -> Iterator[Found]:
        text = case.text
        if case.dry_run is not None and case.dry_run.error is not None:
            text += f"\n{case.dry_run.error.type}: {case.dry_run.error.message}"
        for row in _CLASSES:
            match = re.search(row.pattern, text)
            if match is None:
                continue
            line = text[text.rfind("\n", 0, match.start()) + 1 :].split("\n")[0].strip()
            yield self.found(
                row.summary,
                severity="error",
                confidence="high",
                evidence=[f"the text says: {line[: self.most_shown]}"],
                advice=[
                    Advice(
                        action=row.action,
                        typed=row.typed,
                        kind=row.kind,
                        saving_bytes=0,
                        cost="none",
                        source=self.source,
                    )
                ],
            )
            return
