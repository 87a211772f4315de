"""HTML and SVG made of values: text is escaped unless it is markup already, so nothing breaks out."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from typing import Any


class Markup(str):
    """Text that is HTML already. Only `tag`, `join` and `script_json` make it."""

    __slots__ = ()


Content = Markup | str | int | float | None | Iterable[Any]


def tag(name: str, /, *content: Content, **attributes: str | float | bool | None) -> Markup:
    """An element. Plain strings in it are escaped; ``None`` is left out.

    Args:
        name: the element's name.
        content: text, markup, or iterables of them.
        attributes: ``class_`` and ``for_`` lose their underscore, others become hyphens; ``None`` and
            ``False`` leave the attribute out, ``True`` gives it without a value.
    """
    opened = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Markup(f"<{name}{opened}>")
    return Markup(f"<{name}{opened}>{join(content)}</{name}>")


def join(content: Iterable[Content]) -> Markup:
    """Pieces one after another, the plain ones escaped."""
    return Markup("".join(_text(piece) for piece in content))


def script_json(identifier: str, value: object) -> Markup:
    """Data for the page's script. ``<`` is written as an escape, so that no text can close the element."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return Markup(f'<script type="application/json" id="{html.escape(identifier)}">{text}</script>')


_VOID = {"br", "meta", "col", "hr", "input"}


def _text(piece: Content) -> str:
    if piece is None:
        return ""
    if isinstance(piece, Markup):
        return piece
    if isinstance(piece, str | int | float):
        return html.escape(str(piece), quote=False)
    return join(piece)


def _attribute(key: str, value: str | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{html.escape(str(value))}"'
