"""The table of analyses, the command over it, its page, and an analysis that a user adds."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from memfit import UsageError
from memfit.analysis.analyses import ANALYSES, Analysis, analyze, register_analysis
from memfit.analysis.subject import Subject
from memfit.capture.graph import Op, StepGraph, Storage
from memfit.cli import main
from memfit.core.trace import TraceBuilder
from memfit.reports.analysis_page import analysis_page

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def table_as_it_was() -> Iterator[None]:
    before = dict(ANALYSES)
    yield
    ANALYSES.clear()
    ANALYSES.update(before)


@pytest.fixture
def trace(tmp_path):
    builder = TraceBuilder(meta={"name": "<b>made</b>"})
    builder.alloc(3 << 20, category="parameter", module="<script>alert(1)</script>")
    builder.free(builder.alloc(1 << 20, category="activation", phase="forward"), phase="backward")
    path = tmp_path / "made.memfit-trace"
    builder.build().save(path)
    return path


def graph():
    ops = (Op(index=0, name="aten.mm.default", outputs=(0,), flops=2 * 4096**3, bytes_moved=12 * 4096**2),)
    return StepGraph(
        ops=ops, storages=(Storage(id=0, size_bytes=64, category="temporary", born=0),), name="made"
    )


def test_what_can_be_made_is_made_and_the_rest_is_said(trace):
    analysed = analyze(Subject.of(trace, gpu="a100"))
    assert list(analysed.results) == ["memory", "bottleneck"]
    assert analysed.skipped["performance"] == "needs a captured step, or a workload"
    assert list(analyze(Subject.of(graph(), gpu="a100")).results) == ["memory", "performance", "bottleneck"]
    with pytest.raises(UsageError, match="no analysis is called 'speed'; there are memory"):
        analyze(Subject.of(trace), only=("speed",))
    with pytest.raises(UsageError, match="performance: needs a captured step"):
        analyze(Subject.of(trace), only=("performance",))


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []
        self.headings: list[str] = []
        self._open = ""
        self.scripts = 0

    def handle_starttag(self, tag, attrs):
        self._open = tag
        self.scripts += tag == "script"
        self.urls += [value for key, value in attrs if key in ("src", "href") and not value.startswith("#")]

    def handle_data(self, data):
        if self._open == "h2":
            self.headings.append(data)


def test_the_page_stands_alone_and_escapes_names(trace):
    page = analysis_page(analyze(Subject.of(trace, gpu="rtx3060-12gb")))
    tags = _Tags()
    tags.feed(page)
    assert {"Memory over the last step", "Memory", "What limits the step", "Not analysed"} <= set(
        tags.headings
    )
    assert all(url.startswith("data:image/png;base64,") for url in tags.urls) and tags.urls
    assert tags.scripts == 2 and "<script>alert" not in page  # its data and its own code
    assert "<b>made" not in page


def test_the_command(trace, tmp_path, capsys):
    report = tmp_path / "report.html"
    assert main(["analyze", str(trace), "--gpu", "rtx3060-12gb", "--report", str(report)]) == 0
    said = capsys.readouterr().out
    assert "4.00 MiB are live at the peak" in said and "Not analysed" in said and str(report) in said
    assert report.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert main(["analyze", str(trace), "--only", "memory", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["analyses"]["memory"]["peak_bytes"] == 4 << 20 and data["sources"] == ["recording"]
    assert main(["analyze", str(tmp_path / "missing.pickle")]) == 5
    assert main(["analyze", str(trace), "--only", "recommendations"]) == 2
    assert "needs a workload" in capsys.readouterr().err


def test_an_analysis_of_the_users_own_shows_everywhere(tmp_path, capsys, monkeypatch):
    """The documented example, its picture, and the command over its row."""
    picture = tmp_path / "sizes.png"
    monkeypatch.setattr("sys.argv", ["add_analysis_tool.py", str(picture)])
    runpy.run_path(str(EXAMPLES / "add_analysis_tool.py"), run_name="__main__")
    assert "Rounding adds 4.83 KiB to 171.04 MiB of requests." in capsys.readouterr().out
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    graph_file = tmp_path / "graph.json"
    graph_file.write_text(json.dumps(graph().to_json()))
    assert main(["analyze", str(graph_file), "--only", "sizes"]) == 0
    assert "Requests by size" in capsys.readouterr().out
    analysed = analyze(Subject.of(graph()), only=("sizes",))
    assert "Sizes of requests" in analysis_page(analysed)
    assert analysed.results["sizes"].to_json()["size_classes"][0]["requests"] == 1


def test_what_cannot_be_registered():
    with pytest.raises(UsageError, match="give an Analysis, not str"):
        register_analysis("mine", "text")
    with pytest.raises(UsageError, match="choose another"):
        register_analysis("memory", Analysis(help="", run=lambda subject, progress: None))


def test_the_profiling_example(capsys):
    runpy.run_path(str(EXAMPLES / "profile_training.py"), run_name="__main__")
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("grows by 4096 bytes a step, allocated at ") and "profile_training.py:" in last
