"""Configuration from files, environment and flags, each value with where it came from, each mistake with its
line."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, dataclass
from pathlib import Path
from typing import Any

from yaml.nodes import MappingNode, Node, ScalarNode

from memfit.config.kinds import Kind, slip
from memfit.config.tree import Settings, build, is_section, keys_of, leaves, section_class
from memfit.config.yaml_text import Problem, all_problems, entries, is_null, read_document, shown
from memfit.core.errors import InputError, UsageError

Path_ = tuple[str, ...]
PREFIX = "MEMFIT_"
BETWEEN = "__"
"""``MEMFIT_MEMORY__GPU_MEMORY__TOTAL_MEMORY=8GB`` sets ``memory.gpu_memory.total_memory``."""


@dataclass(frozen=True)
class Value:
    """A setting's value, and the file and line, variable or flag that gave it."""

    value: Any
    origin: str


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """Settings, where each came from, and what is doubtful about them.

    Attributes:
        settings: the whole tree; keys that nobody gave have their defaults.
        given: by dotted path, the values that somebody gave.
        warnings: settings that contradict or lack each other, one line each.
    """

    settings: Settings
    given: Mapping[str, Value]
    warnings: tuple[str, ...] = ()

    def origin(self, path: str) -> str:
        """Where the value at a dotted path came from."""
        return self.given[path].origin if path in self.given else "default"

    def rows(self) -> list[tuple[str, Any, str]]:
        """Every setting: dotted path, value, origin; in the tree's order."""
        return [(".".join(path), self._at(path), self.origin(".".join(path))) for path, _ in leaves()]

    def _at(self, path: Path_) -> Any:
        found: Any = self.settings
        for name in path:
            found = getattr(found, name)
        return found


def load_configuration(
    *places: str | os.PathLike[str],
    environment: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
) -> Configuration:
    """Read files, then environment variables, then flags; the later wins.

    Args:
        places: YAML files, or folders whose ``*.yaml`` and ``*.yml`` files are all read.
        environment: variables ``MEMFIT_SECTION__KEY``; None takes the process's own.
        flags: ``"memory.gpu_memory.total_memory=8GB"``.

    Raises:
        InputError: every mistake in the files, with file, line, key and what would be right.
        UsageError: a flag or a variable that names no setting, or a value that it cannot have.
    """
    files = [file for place in places for file in _files(Path(place))]
    values: dict[Path_, Value] = {}
    problems: list[Problem] = []
    for file in files:
        read, wrong = _read_file(file)
        problems += wrong
        for path, value in read.items():
            if path in values and values[path].value != value.value:
                other = values[path].origin
                problems.append(_conflict(file, path, value, other))
            values[path] = value
    if problems:
        raise InputError("\n".join(str(problem) for problem in problems))
    values |= _from_environment(os.environ if environment is None else environment)
    values |= _from_flags(flags)
    settings = build({path: value.value for path, value in values.items()})
    given = {".".join(path): value for path, value in values.items()}
    return Configuration(settings=settings, given=given, warnings=tuple(_doubts(settings, given)))


def _files(place: Path) -> list[Path]:
    if not place.is_dir():
        return [place]
    found = sorted(file for pattern in ("*.yaml", "*.yml") for file in place.glob(pattern))
    if not found:
        raise InputError(f"{place}: no *.yaml file in this folder")
    return found


def _conflict(file: Path, path: Path_, value: Value, other: str) -> Problem:
    line = int(value.origin.rpartition(":")[2])
    return Problem(str(file), line, ".".join(path), f"given in {other} as well, with another value")


def _read_file(file: Path) -> tuple[dict[Path_, Value], list[Problem]]:
    document = read_document(file)
    if document is None or is_null(document):
        return {}, []
    if not isinstance(document, MappingNode):
        shape = Problem(str(file), 1, "", f"keys like memory: are expected, not {shown(document)}")
        return {}, [*all_problems(document, str(file)), shape]
    reader = _Reader(str(file))
    reader.section(document, Settings, ())
    told = {(problem.line, problem.key.rpartition(".")[2]) for problem in reader.problems}
    general = [
        p for p in all_problems(document, str(file)) if (p.line, p.key) not in told or "twice" in p.what
    ]
    accepted = {(line, path[-1]) for path, line in reader.lines.items()}
    general = [p for p in general if "two ways" not in p.what or (p.line, p.key) not in accepted]
    return reader.values, sorted([*reader.problems, *general], key=lambda problem: problem.line)


class _Reader:
    """Walks a document along the tree of settings."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.values: dict[Path_, Value] = {}
        self.lines: dict[Path_, int] = {}
        self.problems: list[Problem] = []

    def section(self, node: MappingNode, cls: type, path: Path_) -> None:
        known = keys_of(cls)
        for entry in entries(node):
            here = (*path, entry.key)
            if not path and entry.key in _OTHERS:
                continue
            if entry.key not in known:
                self._wrong(entry.line, here, _unknown_key(entry.key, known, path, entry.node))
            elif is_section(known[entry.key]):
                self._inner(entry.node, entry.line, section_class(known[entry.key]), here)
            else:
                self._leaf(entry.node, entry.line, known[entry.key], here)

    def _inner(self, node: Node, line: int, cls: type, path: Path_) -> None:
        if isinstance(node, MappingNode):
            self.section(node, cls, path)
        elif not is_null(node):
            self._wrong(line, path, f"has keys ({', '.join(keys_of(cls))}), not {shown(node)}")

    def _leaf(self, node: Node, line: int, key: Field[Any], path: Path_) -> None:
        kind: Kind = key.metadata["kind"]
        if not isinstance(node, ScalarNode):
            self._wrong(line, path, f"is {kind.valid}, not {shown(node)}")
            return
        if is_null(node) and key.default is not None:
            self._wrong(line, path, f"has no value; it is {kind.valid} (default {key.default})")
            return
        try:
            value = None if is_null(node) else kind.read(node.value)
        except ValueError as problem:
            self._wrong(line, path, f"{shown(node)} is refused: {problem}; valid is {kind.valid}")
            return
        self.values[path] = Value(value, f"{self.file}:{line}")
        self.lines[path] = line

    def _wrong(self, line: int, path: Path_, what: str) -> None:
        self.problems.append(Problem(self.file, line, ".".join(path), what))


def _unknown_key(key: str, known: Iterable[str], path: Path_, node: Node) -> str:
    near = difflib.get_close_matches(key.lower(), list(known), n=1, cutoff=0.7)
    if near:
        hint = f"did you mean {'.'.join((*path, near[0]))}?"
    else:
        names = {leaf[-1]: ".".join(leaf) for leaf, _ in leaves()} | _OTHER_NAMES
        elsewhere = difflib.get_close_matches(key.lower(), list(names), n=1, cutoff=0.7)
        hint = f"did you mean {names[elsewhere[0]]}?" if elsewhere else f"there are {', '.join(known)}"
    why = slip(node.value) if isinstance(node, ScalarNode) and node.style is None else None
    value = f" (its value {shown(node)} can be read in two ways: {why})" if why else ""
    return f"no such key; {hint}{value}"


_OTHERS = ("job",)
"""Sections that other commands read: ``job`` says how a job is set up, for `memfit diagnose`."""

_OTHER_NAMES = {
    "batch_size": 'batch_size, which is part of planning.workload: "hf:gpt2,batch=8"',
    "sequence_length": 'the sequence length, which is part of planning.workload: "hf:gpt2,seq=1024"',
}
"""What people look for in a configuration and find elsewhere."""


def _from_environment(environment: Mapping[str, str]) -> dict[Path_, Value]:
    values = {}
    for name in sorted(environment):
        if name.startswith(PREFIX) and BETWEEN in name:
            path = tuple(name[len(PREFIX) :].lower().split(BETWEEN))
            values[path] = _read_text(path, environment[name], f"environment variable {name}")
    return values


def _from_flags(flags: Sequence[str]) -> dict[Path_, Value]:
    values = {}
    for flag in flags:
        name, equals, text = flag.partition("=")
        if not equals:
            raise UsageError(f"--set {flag}: write it as memory.gpu_memory.total_memory=8GB")
        path = tuple(name.strip().split("."))
        values[path] = _read_text(path, text.strip(), f"--set {flag}")
    return values


def _read_text(path: Path_, text: str, origin: str) -> Value:
    table = dict(leaves())
    if path not in table:
        names = [".".join(leaf) for leaf in table]
        near = difflib.get_close_matches(".".join(path), names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else "see memfit config --show for all"
        raise UsageError(f"{origin}: there is no setting {'.'.join(path)}; {hint}")
    kind: Kind = table[path].metadata["kind"]
    if text.lower() in ("", "null", "~") and table[path].default is None:
        return Value(None, origin)
    try:
        return Value(kind.read(text), origin)
    except ValueError as problem:
        raise UsageError(f"{origin}: {text!r} is refused: {problem}; valid is {kind.valid}") from None


def _doubts(settings: Settings, given: Mapping[str, Value]) -> Iterable[str]:
    """Settings that contradict or lack each other."""

    def place(path: str) -> str:
        return f"{given[path].origin}: {path}" if path in given else path

    checkpointing = settings.optimization.gradient_checkpointing
    if (
        checkpointing.enabled
        and checkpointing.checkpoint_frequency is None
        and checkpointing.memory_savings is None
    ):
        yield (
            f"{place('optimization.gradient_checkpointing.enabled')}: neither checkpoint_frequency nor "
            "memory_savings is given: every block is recomputed"
        )
    precision = settings.optimization.mixed_precision
    if precision.enabled and precision.precision == "bf16" and precision.loss_scaling is not None:
        yield (
            f"{place('optimization.mixed_precision.loss_scaling')}: bf16 has the range of fp32 and "
            "needs no loss scaling: it is left out"
        )
    memory = settings.memory.gpu_memory
    if memory.total_memory and memory.available_memory and memory.available_memory > memory.total_memory:
        yield (
            f"{place('memory.gpu_memory.available_memory')}: is more than total_memory; "
            "total_memory is the limit"
        )
    pool = settings.memory.memory_pool
    limit = memory.available_memory or memory.total_memory
    if pool.enabled and limit and pool.pool_size > limit:
        yield f"{place('memory.memory_pool.pool_size')}: is more than the memory that is available"
