"""Where output goes: results to stdout, the rest to stderr; colour and motion only on a terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType

WIDEST_COLUMNS = 110
PLAIN_COLUMNS = 100
NARROWEST_COLUMNS = 40

Progress = Callable[..., None]
"""``progress(text, done=None, total=None)``: what is being done now, and how far it has come."""


def show(renderable: RenderableType) -> None:
    """Print a result: in colour on a terminal, as plain text without trailing blanks anywhere else.

    Rich obeys NO_COLOR, FORCE_COLOR and TERM=dumb by itself.
    """
    console = Console(file=sys.stdout, highlight=False)
    if console.is_terminal:
        console.width = min(console.width, WIDEST_COLUMNS)
        console.print(renderable)
    else:
        from memfit.reports.text import to_text

        sys.stdout.write(to_text(renderable, width=_plain_columns()))


def _plain_columns() -> int:
    """A pipe or a file has no width; COLUMNS still counts, as it does for other tools."""
    text = os.environ.get("COLUMNS", "")
    return int(text) if text.isdigit() and int(text) >= NARROWEST_COLUMNS else PLAIN_COLUMNS


def print_json(value: Mapping[str, Any]) -> None:
    """Print one object, in a stable order of keys as they were put in."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def progress(*, quiet: bool = False) -> Iterator[Progress]:
    """Show on stderr what long work is at; silent where stderr is no terminal."""
    console = Console(stderr=True, highlight=False)
    if quiet or not console.is_terminal:
        yield lambda text, done=None, total=None: None
        return
    with console.status("starting", spinner="dots") as status:

        def update(text: str, done: int | None = None, total: int | None = None) -> None:
            status.update(f"{text} ({done}/{total})" if total else text)

        yield update
