"""The frame of every HTML page: one file that needs no server, no network and no second file, in light and
dark, also on a phone."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files

from memfit.reports.markup import Content, Markup, tag
from memfit.reports.palette import PAINTS, Paint

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
FIGURE_CSS = "figure img{max-width:100%;height:auto;background:#fff;border-radius:6px}"
"""For figures that are pictures."""


def page(title: str, *body: Content, css: str = "") -> str:
    """The page as text to write to a file; ``css`` is added to the style that all pages have."""
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("title", f"memfit: {title}"),
        tag("style", Markup(_static("page.css") + css)),
    ]
    return f"<!doctype html>\n{tag('html', tag('head', head), tag('body', body), lang='en')}\n"


def script() -> Markup:
    """What makes charts answer to the pointer: the last of a page's body, after the charts' data."""
    return tag("script", Markup(_static("page.js")))


def paint_css(paints: Mapping[str, Paint] = PAINTS) -> str:
    """A class per category and kind of account row, in the colours of both schemes."""
    light = "".join(f".fill-{key}{{color:{paint.light}}}" for key, paint in paints.items())
    dark = "".join(f".fill-{key}{{color:{paint.dark}}}" for key, paint in paints.items())
    return f"{light}@media (prefers-color-scheme: dark){{{dark}}}"


def _static(name: str) -> str:
    return files("memfit.reports").joinpath("static", name).read_text(encoding="utf-8")
