"""Generation: cache sizes against sums from the model's shape, packing against its own bound, sizes found."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from memfit.core.errors import UsageError
from memfit.planning.fit import no_progress
from memfit.planning.generation_caches import CACHES, cache_bytes, pack, unpack
from memfit.planning.inference import _bisected, _Tries, generation
from memfit.reports.generation import generation_text
from memfit.reports.text import to_text

SHAPE = (
    "hidden_size=64,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,intermediate_size=128,"
    "vocab_size=256,max_position_embeddings=4096"
)


@pytest.mark.parametrize(("bits", "shape"), [(8, (2, 3, 5, 64)), (4, (2, 3, 7, 96)), (4, (1, 1, 1, 10))])
def test_packed_values_come_back_within_half_a_step(bits: int, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(shape)
    parts = pack(tensor, bits)
    back = unpack(parts, bits)
    assert back.shape == tensor.shape
    assert float((back - tensor).abs().max()) <= float(parts[1].max()) * 0.5001
    assert parts[0].numel() == -(-tensor.numel() // 64) * 64 * bits // 8


def test_a_sliding_window_bounds_the_cache() -> None:
    from transformers import MistralConfig

    config = MistralConfig(num_hidden_layers=1, sliding_window=16)
    cache = CACHES["dynamic"](config, 1000)
    for _ in range(40):
        cache.update(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8), 0)
    assert cache_bytes(cache) <= 2 * 2 * 8 * 4 * 16 + 64  # and a few numbers of its own


@pytest.mark.dryrun
def test_each_cache_holds_what_the_shape_says() -> None:
    result = generation(
        f"hf:llama,{SHAPE},batch=2,seq=400",
        gpu="rtx3060-12gb",
        budget="64MiB",
        new_tokens=6,
    )
    per_token = 2 * 2 * 2 * 16 * 4 * 2  # keys and values, layers, heads, width, bytes, batch
    rows = {row.cache: row for row in result.rows}
    assert rows["dynamic"].cache_bytes == (400 + 5) * per_token  # the last token is not fed back
    assert rows["dynamic"].cache_bytes_after_prefill == 400 * per_token
    assert rows["dynamic"].bytes_per_token == per_token
    assert 0 <= rows["static"].cache_bytes - (400 + 6) * per_token < 64  # its own counters
    assert rows["int4"].cache_bytes < rows["int8"].cache_bytes < rows["dynamic"].cache_bytes
    assert result.weight_bytes > 2 * 64 * 64 * 4
    assert json.loads(json.dumps(result.to_json()))["fits"] is True
    assert "int4" in to_text(generation_text(result), width=120)


def test_the_largest_size_is_run_in_full() -> None:
    seen = []

    def call(method: str, *, cache: str, batch: int, prompt: int, new_tokens: int) -> dict[str, Any]:
        seen.append((batch, prompt, new_tokens))
        total = 1000 * batch * (prompt + new_tokens)
        peak = dict.fromkeys(("requested_bytes", "allocated_bytes", "reserved_bytes"), total)
        return {"peak": peak, "prefill": peak, "cache_bytes": 1, "cache_bytes_after_prefill": 1}

    tries = _Tries(call=call, budget_bytes=10**7, positions=None, new_tokens=100, show=no_progress)
    row = tries.run("dynamic", 1, 1000)
    batch, prompt = tries.largest(row, "batch"), tries.largest(row, "seq")
    assert (batch.batch, batch.fits, batch.new_tokens) == (9, True, 100)
    assert (prompt.prompt, prompt.fits) == (9856, True)


def test_bisecting_and_bad_questions() -> None:
    for most in (0, 1, 7, 300):
        low, high = _bisected(lambda size, most=most: size <= most, 5, 1, 1 << 16)
        assert (low, high) == (most, most + 1)
    with pytest.raises(UsageError, match="1 token or more"):
        generation("hf:gpt2", gpu="a100", new_tokens=0)
