"""Scripts with one thing wrong each, run on the made-up GPU: each is diagnosed, at its line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from memfit.analysis.diagnosis import Diagnosis, diagnose

sys.path.insert(0, str(Path(__file__).parents[1] / "dryrun"))

from preloaded import SCRIPTS, Preloaded  # noqa: E402

pytestmark = pytest.mark.dryrun
FOLDER = SCRIPTS / "diagnosed"

MISTAKES = {
    "averaged.py": ("EMA_ON_GPU", "copy.deepcopy"),
    "cached_checkpoint.py": ("CKPT_INEFFECTIVE", "keys, values ="),
    "concatenated_cache.py": ("KV_GROWTH", "torch.cat"),
    "cycles.py": ("LEAK_GC_CYCLES", "torch.randn"),
    "emptied.py": ("EMPTY_CACHE_ABUSE", None),
    "evaluated.py": ("EVAL_WITH_GRAD", "output = model"),
    "foreach_spike.py": ("OPTIM_FOREACH", "optimizer.step"),
    "fragmented.py": ("FRAG_OOM", None),
    "gradients_kept.py": ("GRAD_NOT_FREED", None),
    "logits.py": ("LOGITS_SPIKE", "F.cross_entropy"),
    "losses_kept.py": ("LEAK_GRAPH_RETAINED", "history.append"),
    "predictions.py": ("EVAL_ACCUMULATION", "outputs.append"),
    "resumed.py": ("RESUME_DUPLICATE", "torch.load"),
    "retained_graph.py": ("LEAK_GRAPH_RETAINED", "loss = model"),
    "retried.py": ("LEAK_TRACEBACK", "x = model"),
    "varying.py": ("SHAPE_CHURN", None),
}
"""Of each script the rule that names its mistake, and what the line has that it points at."""
ALSO = {"fragmented.py": {"FRAG_PINNED"}, "retried.py": {"FRAG_OOM"}}
"""What else is wrong with it."""


@pytest.fixture(scope="module")
def preloaded() -> Iterator[Preloaded]:
    process = Preloaded()
    yield process
    process.close()


def run(process: Preloaded, script: str, folder: Path) -> Diagnosis:
    trace = folder / "run.memfit-trace"
    gpu = "4GiB,sm80" if script in ALSO else "a100-80gb"
    process.run(FOLDER / script, folder=folder, gpu=gpu, steps="all", trace=trace)
    return diagnose(trace)


def test_every_script_has_its_answer() -> None:
    assert {path.name for path in FOLDER.glob("*.py")} == {*MISTAKES, "sound.py"}


@pytest.mark.parametrize("script", MISTAKES)
def test_the_mistake_is_named_and_nothing_else(preloaded: Preloaded, script: str, tmp_path: Path) -> None:
    diagnosis = run(preloaded, script, tmp_path)
    rule, code = MISTAKES[script]
    found = {finding.rule: finding for finding in diagnosis.findings}
    assert rule in found, list(found)
    serious = {finding.rule for finding in diagnosis.at_least("warning")}
    assert serious <= {rule, *ALSO.get(script, ())}
    if code is not None:
        where = found[rule].where or ""
        line = int(where.split(":")[1].split()[0])
        assert code in (FOLDER / script).read_text().splitlines()[line - 1]
    if rule != "EMPTY_CACHE_ABUSE":  # which costs time, not bytes
        assert diagnosis.total_saving_bytes > 0
        assert found[rule].advice[0].saving_bytes


def test_nothing_is_wrong_with_a_sound_script(preloaded: Preloaded, tmp_path: Path) -> None:
    assert run(preloaded, "sound.py", tmp_path).at_least("warning") == []
