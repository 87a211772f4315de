from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from memfit.reports.figures import FIGURES, render_figures


def test_png_of_every_figure(fitted):
    images = render_figures(fitted)
    assert set(images) == set(FIGURES)
    assert all(image.startswith(b"\x89PNG") and len(image) > 10_000 for image in images.values())


def test_svg_is_well_formed_and_the_same_each_time(fitted):
    images = render_figures(fitted, kind="svg")
    assert images == render_figures(fitted, kind="svg")
    for image in images.values():
        assert ElementTree.fromstring(image).tag.endswith("svg")
    assert b"Activations" in images["timeline"]


def test_figures_without_data_are_left_out(unfitted):
    bare = replace(unfitted, plain_series=None, result=replace(unfitted.result, candidates=()))
    assert set(render_figures(bare)) == {"composition", "account"}


def test_the_budget_and_both_steps_share_one_scale(fitted):
    from memfit.reports.figures import timeline_figure

    plain, planned = timeline_figure(fitted).axes[:2]
    assert plain.get_ylim() == planned.get_ylim()
    assert plain.get_ylim()[1] > fitted.plain_series.peak_bytes / 2**30


@pytest.mark.parametrize("module", ["memfit.reports.figures", "memfit.reports.html", "memfit.reports.text"])
def test_importing_a_report_loads_no_torch_and_no_matplotlib(module):
    code = f"import sys, {module}; sys.exit(any(m in sys.modules for m in ('torch', 'matplotlib')))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_drawing_leaves_matplotlib_as_it_was(fitted):
    import matplotlib as mpl

    before, loaded = dict(mpl.rcParams), set(sys.modules)
    render_figures(fitted)
    assert dict(mpl.rcParams) == before
    assert "matplotlib.pyplot" not in set(sys.modules) - loaded
