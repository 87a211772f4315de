"""Why a program ran out of memory, from its error, its log, and what lies beside them: ``memfit.explain``.

Examples:
    >>> found = explain("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8589934592 bytes.")
    >>> found[0].verdict, found[0].bytes
    ('host_memory', 8589934592)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

from memfit.analysis.explanations.clues import Clues, Input
from memfit.analysis.explanations.inputs import Source, read_inputs
from memfit.analysis.explanations.machines import explain_machine
from memfit.analysis.explanations.recordings import category_lines, explain_dry_run, explain_recording
from memfit.analysis.explanations.remedies import find_processes, snapshot
from memfit.analysis.explanations.serving import budget_of
from memfit.analysis.explanations.situation import situation_of
from memfit.analysis.explanations.strings import explain_configured, explain_strings
from memfit.analysis.explanations.table import EXPLAINERS, WEAKER
from memfit.analysis.explanations.wording import numbers
from memfit.analysis.findings import SEVERITIES, Advice, Finding
from memfit.formats.messages import Message

SCHEMA_VERSION = 1
MOST_FINDINGS = 40


@dataclass(frozen=True, kw_only=True)
class Explanation(Sequence[Finding]):
    """What was found in the inputs: a sequence of findings, the main one first.

    Attributes:
        findings: the findings.
        inputs: what was given, and what it was read as.
        clues: all facts that were read.
        explained: the failure that each finding is about; None for one that is about something else.
    """

    findings: tuple[Finding, ...]
    inputs: tuple[Input, ...]
    clues: Clues
    explained: tuple[Message | None, ...] = field(default=())

    @overload
    def __getitem__(self, index: int) -> Finding: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Finding, ...]: ...
    def __getitem__(self, index: int | slice) -> Finding | tuple[Finding, ...]:
        return self.findings[index]

    def __len__(self) -> int:
        return len(self.findings)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    @property
    def verdict(self) -> str:
        """The main finding's."""
        return self.findings[0].verdict or "unknown"

    @property
    def fields(self) -> dict[str, Any]:
        """What was read, as plain values: framework, format, and every amount in bytes."""
        first = next((message for message in self.explained if message is not None), None)
        fields: dict[str, Any] = {} if first is None else _fields(first, self.clues)
        budget = budget_of(self.clues)
        if budget.sizes:
            fields |= budget.to_json()
        if self.clues.devices:
            fields["devices"] = [_device_json(device) for device in self.clues.devices]
        processes = first.processes if first is not None and first.processes else self.clues.processes
        if processes:
            fields["processes"] = [process._asdict() for process in processes]
        if self.clues.hints.values:
            fields["given"] = dict(self.clues.hints.values)
        return fields

    def to_json(self) -> dict[str, Any]:
        """One object; sizes are whole bytes."""
        return {
            "schema_version": SCHEMA_VERSION,
            "inputs": [entry.to_json() for entry in self.inputs],
            "verdict": self.verdict,
            "findings": [finding.to_json() for finding in self.findings],
            "fields": self.fields,
            "messages": [
                _fields(message, self.clues) for message in self.clues.messages if message.role != "fact"
            ],
        }


def explain(*sources: Source) -> Explanation:
    """Explain why a program ran out of memory, or what else its error means. Needs no torch and no GPU.

    Args:
        sources: any of: an exception; a text (an error, a log); a path or an open binary file of a log, of
            nvidia-smi's output, a memory snapshot, a trace, a dry run's JSON, or JSON with hints about the
            job. Several belong to one failure and are judged together.

    Raises:
        InputError: a source is missing, empty, or nothing that can be read.

    Examples:
        >>> explain("RuntimeError: CUDA error: device-side assert triggered").verdict
        'not_memory'
    """
    clues = read_inputs(sources)
    pairs = _message_findings(clues)
    others = [explain_recording(name, recording) for name, recording in clues.recordings]
    failed = [finding for finding, _ in pairs if finding.severity == "error"]
    if not failed:
        others += [explain_dry_run(name, value) for name, value in clues.dry_runs]
        others += explain_machine(clues)
    others += explain_strings(clues) + (explain_configured(clues) if not clues.strings else [])
    pairs += [(finding, None) for finding in others]
    if not clues.strings:  # those stay in the order in which they were given
        pairs.sort(key=lambda pair: (-SEVERITIES.index(pair[0].severity), pair[0].verdict == "unknown"))
    if not pairs:
        pairs = [(_nothing_known(clues), None)]
    return Explanation(
        findings=tuple(finding for finding, _ in pairs),
        inputs=clues.inputs,
        clues=clues,
        explained=tuple(message for _, message in pairs),
    )


def _message_findings(clues: Clues) -> list[tuple[Finding, Message | None]]:
    kinds = {message.kind for message in clues.messages}
    found: dict[tuple[object, ...], tuple[Finding, list[Message]]] = {}
    for message in clues.messages:
        explainer = EXPLAINERS.get(message.kind)
        if explainer is None or message.role == "fact":
            continue
        if any(other in kinds for other in WEAKER.get(message.kind, ())):
            continue
        if message.role == "warning" and any(
            m.role == "failure" and m.kind in EXPLAINERS for m in clues.messages
        ):
            continue
        finding = explainer(message, clues)
        key = (finding.rule, finding.verdict, message.kind, message.sizes.get("requested"), message.form)
        if key in found:
            found[key][1].append(message)
        elif len(found) < MOST_FINDINGS:
            found[key] = (finding, [message])
    return [(_merged(finding, messages, clues), messages[0]) for finding, messages in found.values()]


def _merged(finding: Finding, messages: list[Message], clues: Clues) -> Finding:
    """One finding for the same failure of several ranks or attempts."""
    ranks = sorted({rank for message in messages for rank in message.ranks})
    count = sum(message.count for message in messages)
    evidence = list(finding.evidence)
    where = finding.where
    if len(messages) > 1 and ranks:
        gpus = sorted({int(message.words["gpu"]) for message in messages if "gpu" in message.words})
        where = f"ranks {numbers(ranks)}" + (f", GPUs {numbers(gpus)}" if len(gpus) > 1 else "")
        evidence.append(f"the same on ranks {numbers(ranks)}; the figures are those of the first")
    elif count > 1 and not ranks:
        evidence.append(f"the text has it {count} times")
    if finding.verdict == "device_full":
        for _, value in clues.dry_runs:
            evidence += category_lines(value)
    return replace(finding, evidence=tuple(evidence), where=where)


def _fields(message: Message, clues: Clues) -> dict[str, Any]:
    fields: dict[str, Any] = {"kind": message.kind, "framework": message.framework, "format": message.form}
    fields |= {f"{name}_bytes": size for name, size in message.sizes.items()}
    if message.sizes and message.kind in ("torch-oom", "torch-oom-async", "cuda-oom", "torch-limit"):
        fields |= situation_of(message, clues).to_json()
    fields |= {name: int(value) if value.is_integer() else value for name, value in message.figures.items()}
    fields |= message.words
    if message.ranks:
        fields["ranks"] = list(message.ranks)
    if message.misread:
        fields["misread"] = dict(message.misread)
    return fields


def _device_json(device: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return {**asdict(device), "slices": [asdict(part) for part in device.slices]}


def _nothing_known(clues: Clues) -> Finding:
    kinds = ", ".join(sorted({entry.kind for entry in clues.inputs})) or "nothing"
    return Finding(
        rule="nothing_known",
        verdict="unknown",
        severity="info",
        confidence="low",
        summary="no error about memory was recognized in the input",
        evidence=(f"read as: {kinds}",),
        advice=(
            Advice(action="give the whole error with its traceback, from the first 'Traceback' to the end"),
            find_processes(Message(kind="", framework="pytorch")),
            snapshot(),
        ),
    )


__all__ = ["Explanation", "Source", "explain"]
