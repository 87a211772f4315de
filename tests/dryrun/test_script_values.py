"""Watching a script changes nothing of what PyTorch does, and the script reads sensible values."""

from __future__ import annotations

from pathlib import Path

import pytest
from preloaded import Preloaded

from memfit.core.trace import Action, Trace

pytestmark = pytest.mark.dryrun

Events = list[tuple[int, int, int]]


def without_order_of_frees(trace: Trace) -> Events:
    """Autograd and autocast free in an order of their own in each run: a row of frees counts as a set."""
    events: Events = []
    frees: Events = []
    for event in zip(trace.action.tolist(), trace.address.tolist(), trace.size_bytes.tolist(), strict=True):
        if event[0] == Action.FREE:
            frees.append(event)
        else:
            events += [*sorted(frees), event]
            frees = []
    return events


@pytest.mark.parametrize("script", ["gallery.py", "compiled.py"])
def test_watching_changes_no_allocation(preloaded: Preloaded, tmp_path: Path, script: str) -> None:
    arguments = ["aot_eager"] if script == "compiled.py" else []
    traces = []
    for name, run in (("watched", preloaded.run), ("alone", preloaded.run_alone)):
        path = tmp_path / f"{name}.memfit-trace"
        run(script, *arguments, folder=tmp_path, trace=path, steps="all")
        traces.append(without_order_of_frees(Trace.load(path)))
    assert len(traces[0]) > 50
    assert traces[0] == traces[1]


def test_what_the_script_reads(preloaded: Preloaded, tmp_path: Path) -> None:
    outcome = preloaded.run("shadows.py", folder=tmp_path)
    assert outcome.stdout == "all true\n", outcome.stderr


def test_unknown_reads_are_listed_with_their_place(preloaded: Preloaded, tmp_path: Path) -> None:
    script = tmp_path / "reads.py"
    script.write_text(
        "import torch\n"
        "x = torch.randn(100, device='cuda')\n"
        "for _ in range(3):\n"
        "    x.sum().item()\n"
        "(x > 0).nonzero()\n"
        "torch.arange(4, device='cuda').tolist()\n"
    )
    reads = {read.line: read for read in preloaded.run(script, folder=tmp_path).result.value_reads}
    assert {line: (read.op, read.count) for line, read in reads.items()} == {
        4: ("aten._local_scalar_dense", 3),
        5: ("aten.nonzero", 1),
    }
    assert all(read.file == str(script) for read in reads.values())


@pytest.mark.slow
def test_gpt2_takes_the_attention_that_it_takes_on_a_gpu(preloaded: Preloaded, tmp_path: Path) -> None:
    """Without true values its mask is not seen to be all ones: 12,844 MiB allocated, 14,480 reserved."""
    pytest.importorskip("transformers")
    result = preloaded.run("gpt2.py", folder=tmp_path, trace=tmp_path / "gpt2.memfit-trace").result
    assert result.peak_allocated_bytes == 13_262_359_040
    assert result.peak_reserved_bytes == 14_252 * 2**20
    ops = set(Trace.load(tmp_path / "gpt2.memfit-trace").texts("op"))
    assert "aten._scaled_dot_product_flash_attention" in ops and not any("efficient" in op for op in ops)
