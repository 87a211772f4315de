"""What the documentation refers to exists: pages, headings, files, names, commands and options, sources."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from memfit.cli import COMMANDS
from memfit.cli.app import load_command

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
FILES = (*PAGES, ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md")


@cache
def text_of(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    included = re.fullmatch(r'\s*--8<-- "([^":]+)"\s*', text)
    return text_of(ROOT / included[1]) if included else text


@cache
def prose_of(page: Path) -> str:
    """Without fenced code."""
    return re.sub(r"(?ms)^```.*?^```", "", text_of(page))


@cache
def anchors_of(page: Path) -> set[str]:
    """As Python-Markdown's table of contents makes them."""
    titles = re.findall(r"(?m)^#{1,6} +(.+?) *(?:\{.*\})?$", prose_of(page))
    plain = [re.sub(r"[`*_]|\]\([^)]*\)|\[", "", title) for title in titles]
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", one).strip().lower()) for one in plain}


def wrong_links(page: Path) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose_of(page))):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        place = page if not file else (page.parent / file).resolve()
        if not place.exists():
            yield f"{page.name}: {target}: no such file"
        elif anchor and place.suffix == ".md" and anchor not in anchors_of(place):
            yield f"{page.name}: {target}: no such heading; there are {sorted(anchors_of(place))}"


def test_links_lead_somewhere() -> None:
    assert [wrong for page in FILES for wrong in wrong_links(page)] == []


def test_every_page_is_in_the_navigation() -> None:
    listed: list[str] = []

    def collect(entry: Any) -> None:
        if isinstance(entry, str):
            listed.append(entry)
        for inner in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
            collect(inner)

    collect(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in PAGES)


@pytest.mark.parametrize("page", FILES, ids=lambda page: page.stem)
def test_files_that_are_named_exist(page: Path) -> None:
    text = re.sub(r"https?://\S+", "", text_of(page))
    named = set(re.findall(r"\b(?:examples|scripts|benchmarks|configs|tests|src/memfit)/[\w/.-]*\.\w+", text))
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
    for file, first, last in re.findall(r'--8<-- "([^":]+)(?::(\d+):(\d+))?"', text):
        lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
        if first:
            shown = lines[int(first) - 1 : int(last)]
            assert shown[0].startswith(("def ", "class ", "@")), f"{file}:{first} begins within"
            assert len(shown) == int(last) - int(first) + 1 and shown[-1].strip(), (
                f"{file}:{last} ends elsewhere"
            )


def resolves(dotted: str) -> bool:
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            thing: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for name in parts[cut:]:
            fields = getattr(thing, "__dataclass_fields__", {})
            if not hasattr(thing, name) and name not in fields:
                return False
            thing = getattr(thing, name, None)
        return True
    return False


def test_names_of_the_api_exist() -> None:
    wrong = []
    for page in FILES:
        text = re.sub(r"(?m)^ {4}.*$", "", text_of(page))
        named = set(re.findall(r"(?<![\w./-])memfit(?:\.[A-Za-z_]\w*)+", text))
        wrong += [f"{page.name}: {name}" for name in sorted(named) if not resolves(name)]
    assert wrong == []


@cache
def options_of(command: str) -> frozenset[str]:
    made = load_command(command, COMMANDS[command])
    context = typer.Context(made)
    parameters = made.get_params(context)
    return frozenset(option for one in parameters for option in (*one.opts, *one.secondary_opts))


def typed_commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Each `memfit COMMAND …` that a page shows, with the options that are the command's own."""
    joined = re.sub(r"\\\n\s*", " ", text_of(page))
    for line in re.findall(
        r"(?:^ {4}|^\$ |`|&& )(?:python -m )?memfit ([a-z]+\b[^`\n]*)", joined, re.MULTILINE
    ):
        command, *words = re.split(r"\s+--\s|\s+#|\s+\||\s+&", line)[0].split()
        own = [word.split("=")[0] for word in words if re.match(r"-{1,2}[a-zA-Z0-9][\w-]*", word)]
        yield command, own


def test_commands_and_their_options_exist() -> None:
    wrong, seen = [], set()
    for page in FILES:
        for command, options in typed_commands(page):
            seen.add(command)
            if command not in COMMANDS:
                wrong.append(f"{page.name}: memfit {command}")
            else:
                lost = [one for one in options if one not in options_of(command)]
                wrong += [f"{page.name}: memfit {command} {one}" for one in lost]
    assert wrong == []
    assert set(COMMANDS) <= seen, f"no page shows {sorted(set(COMMANDS) - seen)}"


def test_sources_are_numbered_as_they_are_used() -> None:
    body, _, sources = text_of(DOCS / "theory.md").partition("\n## Sources\n")
    used = [int(number) for number in re.findall(r"(?<!\w)\[(\d+)\](?!\()", body)]
    defined = [int(number) for number in re.findall(r"(?m)^(\d+)\. ", sources)]
    assert defined == list(range(1, len(defined) + 1)) and set(used) == set(defined)
    assert list(dict.fromkeys(used)) == defined, "the first uses are not in order"
    for line in re.findall(r"(?m)^\d+\. (.+)$", sources):
        assert re.search(r"\*.+\*.*\b(19|20)\d\d\b|NVIDIA", line), f"no title or no year: {line}"
