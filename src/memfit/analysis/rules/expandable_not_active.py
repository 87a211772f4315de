"""Rule 3: expandable segments were asked for, and are off."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from memfit.allocators.candidates import VARIABLE, shell_line
from memfit.analysis.evidence import Evidence, Need
from memfit.analysis.findings import Advice
from memfit.analysis.rules.base import Found, Rule, Stage


@dataclass(frozen=True, kw_only=True)
class ExpandableNotActive(Rule):
    """Compares what the environment asks for with what the snapshot says is on."""

    number: ClassVar[int] = 3
    id: ClassVar[str] = "EXPANDABLE_NOT_ACTIVE"
    title: ClassVar[str] = "Expandable segments were asked for, and are off"
    needs: ClassVar[tuple[Need, ...]] = ("snapshot",)
    detection: ClassVar[str] = (
        "The configuration's alloc_conf has expandable_segments:True, and the snapshot's allocator_settings "
        "say that it is off."
    )
    saving: ClassVar[str] = "0 directly; it unlocks FRAG_OOM's"
    source: ClassVar[str] = "pytorch#183387 (2.9.1 ignored PYTORCH_ALLOC_CONF), #122057, torchtune#2881"
    stage: ClassVar[Stage] = "setting"

    def look(self, case: Evidence) -> Iterator[Found]:
        job = case.configuration
        if not job.asks_for_expandable or case.expandable is not False:
            return
        asked = job.alloc_conf or ""
        variables = job.alloc_variables or {}
        evidence = [
            f"asked for: {', '.join(f'{name}={text}' for name, text in variables.items()) or asked}",
            "the snapshot's allocator_settings: expandable_segments is False",
        ]
        if job.torch:
            evidence.append(f"torch {job.torch}")
        if list(variables) == ["PYTORCH_ALLOC_CONF"]:
            evidence.append(f"only the newer name is set; torch 2.9.1 and older read {VARIABLE}")
        yield self.found(
            "The job asks for expandable segments, and runs without them.",
            evidence=evidence,
            confidence="high",
            advice=[
                Advice(
                    action="Set the variable by the name that every version reads, in the shell or launcher "
                    "that starts Python: it is read once, when CUDA is first used.",
                    typed=shell_line(asked),
                    kind="shell",
                    saving_bytes=0,
                    cost="none",
                    risks="Some builds leave it off in silence (not Linux, or no CUDA driver API for "
                    "it): look "
                    'at torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"].',
                    source=self.source,
                )
            ],
        )
