"""Whether a value that was read can steer the script: told from the source of the lines that read it.

A loss that is only printed cannot change how much memory is used; one that is compared can. What cannot be
told counts as ``"perhaps"``.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal

from memfit.dryrun.frames import Place

Steers = Literal["yes", "perhaps", "no"]

_SINKS = frozenset(
    "print debug info warning error critical exception log log_metrics log_dict write writelines add_scalar "
    "add_scalars add_histogram set_postfix set_postfix_str set_description format round float int "
    "str repr abs join sum mean update append extend isoformat".split()
)
"""Calls that only show, keep or convert what they are given."""

_READERS = frozenset({"item", "tolist", "bool", "float", "int"})
"""Calls that read a value from the device."""

_Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef
_MOST_CALLERS = 6


def does_it_steer(kind: str, stack: Sequence[Place]) -> Steers:
    """Whether the value that was read at ``stack`` (innermost line first) can steer what comes after.

    Args:
        kind: of the question; a size always does.
    """
    if kind in ("size", "routing", "overflow"):
        return "yes"
    for place in stack[:_MOST_CALLERS]:
        found = _at(place, is_boolean=kind in ("boolean", "check"))
        if found != "returned":
            return found
    return "perhaps"


def _at(place: Place, *, is_boolean: bool) -> Steers | Literal["returned"]:
    tree = _parsed(place.file)
    scope = None if tree is None else _scope_of(tree, place.line)
    statement = None if scope is None else _statement_at(scope, place.line)
    if tree is None or scope is None or statement is None:
        return "perhaps"
    chooses = isinstance(statement, ast.If | ast.While | ast.Assert | ast.Match | ast.For)
    if chooses or _reads_to_decide(statement, is_boolean=is_boolean):
        return "yes"
    if isinstance(statement, ast.Return):
        return "returned"
    names = _taken_by(statement)
    if names is None:
        return "no" if _only_shown(statement) else "perhaps"
    return _follow(names, scope, tree)


def _follow(names: set[str], scope: _Scope, tree: ast.Module) -> Steers | Literal["returned"]:
    """What becomes of the values called ``names`` in their scope; attributes are followed in the whole
    file."""
    everywhere = any(name.startswith(".") for name in names)
    statements = [node for node in ast.walk(tree if everywhere else scope) if isinstance(node, ast.stmt)]
    known: set[str] = set()
    answer: Steers | Literal["returned"] = "no"
    while known != names:
        known = set(names)
        for statement in statements:
            uses = _names(_header(statement)) & names
            if not uses:
                continue
            if isinstance(statement, ast.If | ast.While | ast.Assert | ast.Match) or _decides(
                statement, names
            ):
                return "yes"
            taken = _taken_by(statement)
            if taken is not None:
                names = names | taken
            elif isinstance(statement, ast.Return):
                answer = "returned" if answer == "no" else answer
            elif not _only_shown(statement) and not isinstance(statement, ast.For):
                answer = "perhaps"
    return answer


def _decides(statement: ast.stmt, names: set[str]) -> bool:
    """Whether the statement compares, chooses, counts or picks by one of ``names``."""
    return any(_names([part]) & names for _, part in _deciding_parts(statement))


def _reads_to_decide(statement: ast.stmt, *, is_boolean: bool) -> bool:
    """Whether what the statement itself reads from the device decides something in it.

    In ``correct += (guess == label).sum().item()`` the comparison is the device's, and nothing is decided.
    """
    for node, part in _deciding_parts(statement):
        if is_boolean and not isinstance(node, ast.Compare | ast.Subscript):
            return True
        if any(_called(call) in _READERS for call in ast.walk(part) if isinstance(call, ast.Call)):
            return True
    return False


def _deciding_parts(statement: ast.stmt) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Expressions whose value chooses, counts or picks, each with the one that uses it."""
    for node in _walk(_header(statement)):
        parts: list[ast.AST] = []
        if isinstance(node, ast.IfExp):
            parts = [node.test]
        elif isinstance(node, ast.Compare | ast.BoolOp):
            parts = [node]
        elif isinstance(node, ast.comprehension):
            parts = list(node.ifs)
        elif isinstance(node, ast.Subscript):
            parts = [node.slice]
        elif isinstance(node, ast.Call) and _called(node) in ("range", "min", "max"):
            parts = list(node.args)
        for part in parts:
            yield node, part


def _taken_by(statement: ast.stmt) -> set[str] | None:
    """The names that hold the statement's value afterwards; None where it has none."""
    if isinstance(statement, ast.Assign):
        return _targets(statement.targets)
    if isinstance(statement, ast.AugAssign | ast.AnnAssign):
        return _targets([statement.target])
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        function = statement.value.func
        if isinstance(function, ast.Attribute) and function.attr in ("append", "extend", "update"):
            return _targets([function.value])
    return None


def _targets(targets: Sequence[ast.expr]) -> set[str]:
    found: set[str] = set()
    for target in targets:
        if isinstance(target, ast.Name):
            found.add(target.id)
        elif isinstance(target, ast.Attribute):
            found.add(f".{target.attr}")
        elif isinstance(target, ast.Subscript | ast.Starred):
            found |= _targets([target.value])
        elif isinstance(target, ast.Tuple | ast.List):
            found |= _targets(target.elts)
    return found


def _only_shown(statement: ast.stmt) -> bool:
    """Whether every call of the statement only shows, keeps or reads what it is given."""
    calls = [node for node in _walk(_header(statement)) if isinstance(node, ast.Call)]
    own = {"item", "tolist", "cpu", "detach", "numpy", "mean", "sum", "to", "float", "all", "any"}
    return all(_called(call) in _SINKS | own for call in calls)


def _called(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _names(nodes: Sequence[ast.AST]) -> set[str]:
    """The names and attributes that are looked at in ``nodes``."""
    found: set[str] = set()
    for node in _walk(nodes):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            found.add(f".{node.attr}")
    return found


def _walk(nodes: Sequence[ast.AST]) -> Iterator[ast.AST]:
    for node in nodes:
        yield from ast.walk(node)


def _header(statement: ast.stmt) -> list[ast.AST]:
    """The parts of a statement without the statements inside it."""
    return [child for child in ast.iter_child_nodes(statement) if not isinstance(child, ast.stmt)]


def _scope_of(tree: ast.Module, line: int) -> _Scope:
    """The innermost function around ``line``, or the module."""
    found: _Scope = tree
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.lineno <= line <= _end(node):
            found = node
    return found


def _statement_at(scope: _Scope, line: int) -> ast.stmt | None:
    """The innermost statement on ``line``; of ``if a: b`` on one line, the whole."""
    found: ast.stmt | None = None
    for node in ast.walk(scope):
        if not isinstance(node, ast.stmt) or node is scope or not node.lineno <= line <= _end(node):
            continue
        if not isinstance(found, ast.If | ast.While) or found.lineno < node.lineno:
            found = node
    return found


def _end(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


@lru_cache(maxsize=64)
def _parsed(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None
