"""Host memory that nobody looks at is never touched; what somebody looks at is what it would have been."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from preloaded import Preloaded

from memfit.dryrun.mersenne import skip

pytestmark = pytest.mark.dryrun


def drawn(state: torch.Tensor, count: int) -> torch.Tensor:
    """The state after numbers that were really drawn."""
    generator = torch.Generator()
    generator.set_state(state)
    torch.empty(count, dtype=torch.int32).random_(generator=generator)
    return generator.get_state()


@pytest.mark.parametrize("count", [0, 1, 623, 624, 625, 1248, 5000, 100_000, 3_000_019])
@pytest.mark.parametrize("before", [0, 1000])
def test_skipping_numbers_leads_where_drawing_them_does(count: int, before: int) -> None:
    state = drawn(torch.Generator().manual_seed(5).get_state(), before)
    assert skip(state.numpy().tobytes(), count) == drawn(state, count).numpy().tobytes()


def test_a_script_cannot_notice(preloaded: Preloaded, tmp_path: Path) -> None:
    weights = torch.arange(1 << 24, dtype=torch.float32).reshape(4096, 4096)
    torch.save({"w": weights}, tmp_path / "large.pt")
    outcome = preloaded.run("host_values.py", folder=tmp_path)
    assert outcome.stdout == "all true\n", outcome.stderr


@pytest.mark.parametrize("kind", ["plain", "transformers"])
def test_a_large_model_needs_little_host_memory(preloaded: Preloaded, tmp_path: Path, kind: str) -> None:
    if kind == "transformers":
        pytest.importorskip("transformers")
    outcome = preloaded.run("llama_on_host.py", kind, folder=tmp_path)
    parameters, host_bytes = map(int, outcome.stdout.split())
    assert parameters > 8_000_000_000 and host_bytes < 2 << 30
    result = outcome.result
    assert result.peak_by_category["parameter"] == 2 * parameters
    assert any("tensors of the host" in note for note in result.not_modelled)


def test_it_changes_nothing_on_the_device(preloaded: Preloaded, tmp_path: Path) -> None:
    script = tmp_path / "convert.py"
    script.write_text(
        "import torch\n"
        "x = torch.randn(1024, 1024)\n"
        "sent = [x.cuda(), x.to('cuda', torch.bfloat16), x.t().to('cuda', torch.float16), x[:, ::2].cuda()]\n"
        "sent[0].copy_(x.t()), sent[1].t().copy_(x), sent[3].copy_(x[:, 1::2])\n"
        "print([(tuple(y.shape), y.stride()) for y in sent])\n"
    )
    lazy, real = (
        preloaded.run(script, folder=tmp_path, real_host_values=real_host_values)
        for real_host_values in (False, True)
    )
    assert lazy.stdout == real.stdout and lazy.stdout
    assert lazy.result.peak_requested_bytes == real.result.peak_requested_bytes
    assert lazy.result.event_count == real.result.event_count
