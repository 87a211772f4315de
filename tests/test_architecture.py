"""The floors of docs/architecture.md, kept: who may import whom, who loads torch, how long things may be."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "memfit"

FLOORS: dict[str, int] = {
    "core": 0,
    "allocators": 1,
    "formats": 1,
    "dryrun": 2,
    "profiling": 2,
    "pools": 2,
    "capture": 3,
    "techniques": 4,
    "monitor": 4,
    "planning": 5,
    "analysis": 6,
    "distributed": 6,
    "reports": 7,
    "config": 7,
    "manager": 8,
    "dashboard": 8,
    "testing": 8,
    "cli": 9,
    "configuring": 9,
    "notebook": 9,
    "pytest_plugin": 9,
    "__init__": 10,
    "__main__": 10,
}
"""The floor of each part: a part imports its own folder and lower floors only."""

TORCH_FREE_PARTS = (
    "core",
    "allocators",
    "formats",
    "reports",
    "config",
    "dashboard",
    "cli",
    "__init__",
    "__main__",
)
"""Parts of which no module imports torch, not even inside a function."""

TORCH_FREE_AT_IMPORT = ("dryrun", "planning", "analysis", "monitor", "notebook", "pytest_plugin")
"""Parts whose modules import torch inside functions only, but for `CHILD_MODULES`."""

CHILD_MODULES = {
    "memfit.analysis.ladder_run",
    "memfit.analysis.trials",
    "memfit.dryrun.absent_ranks",
    "memfit.dryrun.assumptions",
    "memfit.dryrun.calibration_steps",
    "memfit.dryrun.child",
    "memfit.dryrun.collect",
    "memfit.dryrun.collective_values",
    "memfit.dryrun.interception",
    "memfit.dryrun.labels",
    "memfit.dryrun.lazy_host",
    "memfit.dryrun.measured",
    "memfit.dryrun.owners",
    "memfit.dryrun.pipeline_stages",
    "memfit.dryrun.probe",
    "memfit.dryrun.recipes",
    "memfit.dryrun.recording",
    "memfit.dryrun.shadow",
    "memfit.dryrun.sizes",
    "memfit.dryrun.steps",
    "memfit.dryrun.substitutes",
    "memfit.dryrun.unmodelled",
    "memfit.planning.evaluate",
    "memfit.planning.evaluate_compiled",
    "memfit.planning.evaluate_generation",
    "memfit.planning.evaluate_sizes",
    "memfit.planning.generation_caches",
    "memfit.planning.loss_scale",
    "memfit.planning.verify",
}
"""Modules that only a process with torch loaded imports: the dry run's child, a worker's fork."""

MOST_LINES_OF_A_FILE = 500
MOST_LINES_OF_A_FUNCTION = 60


@dataclass(frozen=True, kw_only=True)
class Import:
    """One imported module, where, and whether importing the file already imports it."""

    module: str
    line: int
    at_import: bool


@dataclass(frozen=True, kw_only=True)
class Module:
    """One source file."""

    name: str
    path: Path

    @property
    def part(self) -> str:
        """The folder or file right below ``memfit``."""
        return self.name.split(".")[1] if "." in self.name else "__init__"

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"))

    @functools.cached_property
    def imports(self) -> tuple[Import, ...]:
        return tuple(_imports(self))


@functools.cache
def modules() -> dict[str, Module]:
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = Module(name=name, path=path)
    return found


def _imports(module: Module) -> Iterator[Import]:
    for node, lazy in _walk(module.tree, lazy=False):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module=alias.name, line=node.lineno, at_import=not lazy)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{module.name}:{node.lineno}: a relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                name = whole if whole in modules() else node.module
                yield Import(module=name, line=node.lineno, at_import=not lazy)


def _walk(node: ast.AST, *, lazy: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Every node, and whether it runs later than its file is imported (in a function, or for types only)."""
    for child in ast.iter_child_nodes(node):
        for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        child_lazy = (
            lazy or for_types or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        )
        yield child, child_lazy
        yield from _walk(child, lazy=child_lazy)


def _part_of(name: str) -> str:
    return modules()[name].part if name in modules() else name.split(".")[1]


def each_module(check: Callable[[Module], None]) -> Callable[[], None]:
    """One test of all modules, which tells of every one that fails."""

    def test() -> None:
        wrong = []
        for module in modules().values():
            try:
                check(module)
            except AssertionError as problem:
                wrong.append(f"{module.name}: {problem}")
        assert not wrong, "\n".join(wrong)

    test.__name__, test.__doc__ = check.__name__, check.__doc__
    return test


@each_module
def test_imports_go_downwards(module: Module) -> None:
    for used in module.imports:
        if used.module.split(".")[0] != "memfit" or used.module == "memfit":
            continue
        above, below = module.part, _part_of(used.module)
        allowed = above == below or FLOORS[below] < FLOORS[above]
        assert allowed, (
            f"{module.name}:{used.line} imports {used.module}: {above} is on floor {FLOORS[above]}, "
            f"{below} on {FLOORS[below]}; a part imports lower floors only"
        )


@each_module
def test_the_face_is_for_users_only(module: Module) -> None:
    """Parts import each other by their homes; only the version may come from the face."""
    names = {
        alias.name
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ImportFrom) and node.module == "memfit"
        for alias in node.names
        if f"memfit.{alias.name}" not in modules()
    }
    assert names <= {"__version__"}


def test_every_part_has_a_floor() -> None:
    assert {module.part for module in modules().values()} <= set(FLOORS)


def test_no_import_cycles() -> None:
    """Among imports that run when a file is imported."""
    edges = {
        module.name: {used.module for used in module.imports if used.at_import and used.module in modules()}
        for module in modules().values()
    }
    while edges:
        leaves = {name for name, used in edges.items() if not (used - {name}) & set(edges)}
        assert leaves, f"an import cycle among {sorted(edges)}"
        edges = {name: used for name, used in edges.items() if name not in leaves}


def _torch_at_import(module: Module) -> list[int]:
    return [used.line for used in module.imports if used.at_import and used.module.split(".")[0] == "torch"]


@each_module
def test_torch_free_parts_do_not_import_torch(module: Module) -> None:
    if module.part in TORCH_FREE_PARTS:
        lines = [used.line for used in module.imports if used.module.split(".")[0] == "torch"]
        assert not lines, f"{module.name} imports torch at line {lines}"
    elif module.part in TORCH_FREE_AT_IMPORT and module.name not in CHILD_MODULES:
        lines = _torch_at_import(module)
        assert not lines, f"{module.name} imports torch at its top, line {lines}"


def _reached_at_import(name: str, seen: set[str]) -> set[str]:
    """Every module that importing ``name`` imports, its packages included."""
    if name in seen or name not in modules():
        return seen
    seen.add(name)
    packages = {name.rsplit(".", count)[0] for count in range(1, name.count(".") + 1)}
    for used in packages | {used.module for used in modules()[name].imports if used.at_import}:
        _reached_at_import(used, seen)
    return seen


@each_module
def test_torch_free_modules_reach_no_torch_through_others(module: Module) -> None:
    free = module.part in (*TORCH_FREE_PARTS, *TORCH_FREE_AT_IMPORT) and module.name not in CHILD_MODULES
    if not free:
        return
    for name in _reached_at_import(module.name, set()):
        loads = [
            used
            for used in modules()[name].imports
            if used.at_import and used.module.split(".")[0] == "torch"
        ]
        assert not loads, (
            f"importing {module.name} imports {name}, which imports torch at line {loads[0].line}"
        )


@each_module
def test_core_needs_numpy_and_nothing_else(module: Module) -> None:
    if module.part == "core":
        used = {used.module.split(".")[0] for used in module.imports}
        assert used <= {*sys.stdlib_module_names, "numpy", "memfit"}


def test_child_modules_exist() -> None:
    assert set(modules()) >= CHILD_MODULES


@each_module
def test_files_are_short(module: Module) -> None:
    assert len(module.path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES_OF_A_FILE
    assert module.path.stem not in ("utils", "util", "helpers", "misc", "common")


@each_module
def test_functions_fit_a_screen(module: Module) -> None:
    """Without the signature: that of a command is the table of its options."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.body[0].lineno + 1
            assert lines <= MOST_LINES_OF_A_FUNCTION, (
                f"{module.name}:{node.lineno} {node.name}: {lines} lines"
            )


@each_module
def test_public_things_say_what_they_are(module: Module) -> None:
    if any(part.startswith("_") and part != "__main__" for part in module.name.split(".")):
        return
    assert ast.get_docstring(module.tree), f"{module.name} has no docstring"
    for node in module.tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name[0] != "_":
            assert ast.get_docstring(node), f"{module.name}:{node.lineno} {node.name} has no docstring"


@each_module
def test_only_commands_print(module: Module) -> None:
    if module.part == "cli":
        return
    for node in ast.walk(module.tree):
        call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        assert not call, f"{module.name}:{getattr(node, 'lineno', 0)} prints"
