"""YAML as text with places: scalars keep the text as written, so that each setting is read by its own kind.

Nothing is constructed from tags, keys given twice are found, and an alias costs nothing until it is looked
at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode

from memfit.config.kinds import slip
from memfit.core.errors import InputError

MOST_BYTES = 1 << 20
_NULLS = ("", "~", "null", "Null", "NULL")
_STANDARD = "tag:yaml.org,2002:"
_PLAIN_TAGS = {
    _STANDARD + name
    for name in ("str", "int", "float", "bool", "null", "map", "seq", "timestamp", "merge", "value", "binary")
}


@dataclass(frozen=True)
class Problem:
    """A mistake in a file: ``line`` counts from 1."""

    file: str
    line: int
    key: str
    what: str

    def __str__(self) -> str:
        key = f"{self.key}: " if self.key else ""
        return f"{self.file}:{self.line}: {key}{self.what}"


@dataclass(frozen=True)
class Entry:
    """A key of a mapping, its line, and what it holds."""

    key: str
    line: int
    node: Node


def read_document(path: Path) -> Node | None:
    """The file's one document; None when it is empty.

    Raises:
        InputError: it cannot be read, or is not YAML; with the line.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as problem:
        raise InputError(f"{path}: cannot read the configuration: {problem.strerror}") from None
    if len(data) > MOST_BYTES:
        raise InputError(f"{path}: more than {MOST_BYTES >> 20} MiB: this is no configuration")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        line = data.count(b"\n", 0, problem.start) + 1
        raise InputError(f"{path}:{line}: not UTF-8 text") from None
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        what = problem.problem or problem.context or "not YAML"
        if "'\\t'" in what:
            what = "a tab: YAML is indented with spaces"
        raise InputError(f"{path}:{mark.line + 1 if mark else 1}: not YAML: {what}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as problem:
        raise InputError(f"{path}: not YAML: {str(problem) or 'nested too deeply'}") from None


def all_problems(document: Node, file: str) -> Iterator[Problem]:
    """What is wrong in a document whatever its keys mean: tags, keys given twice, ambiguous scalars."""
    seen: set[int] = set()
    waiting: list[tuple[str, Node]] = [("", document)]
    while waiting:
        key, node = waiting.pop(0)
        if id(node) in seen:
            continue
        seen.add(id(node))
        line = node.start_mark.line + 1
        if node.tag not in _PLAIN_TAGS:
            yield Problem(
                file, line, key, f"the tag {_tag(node)} is refused: nothing is made or run from a file"
            )
        if isinstance(node, MappingNode):
            yield from _twice(node, file)
            waiting += [(entry.key, entry.node) for entry in entries(node)]
        elif isinstance(node, ScalarNode):
            why = slip(node.value) if node.style is None else None
            if why is not None:
                yield Problem(file, line, key, f"{node.value} can be read in two ways: {why}")
        else:
            waiting += [(key, inner) for inner in node.value]


def entries(node: MappingNode) -> list[Entry]:
    """The keys of a mapping in order; a key that is no scalar is shown as YAML."""
    return [
        Entry(
            key=key.value if isinstance(key, ScalarNode) else "?",
            line=key.start_mark.line + 1,
            node=value,
        )
        for key, value in node.value
    ]


def is_null(node: Node) -> bool:
    """Whether a value is left empty or written as null."""
    return isinstance(node, ScalarNode) and node.style is None and node.value in _NULLS


def shown(node: Node) -> str:
    """A value as an error message shows it."""
    if isinstance(node, ScalarNode):
        return repr(node.value) if len(node.value) <= 60 else repr(node.value[:57] + "...")
    return "keys" if isinstance(node, MappingNode) else "a list"


def _twice(node: MappingNode, file: str) -> Iterator[Problem]:
    first: dict[str, Entry] = {}
    for entry in entries(node):
        before = first.setdefault(entry.key, entry)
        if before is not entry:
            what = (
                f"given twice, in line {before.line} as {shown(before.node)} and here as {shown(entry.node)}"
            )
            yield Problem(file, entry.line, entry.key, what)


def _tag(node: Node) -> str:
    tag = str(node.tag)
    return "!!" + tag[len(_STANDARD) :] if tag.startswith(_STANDARD) else tag
