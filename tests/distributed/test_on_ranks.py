"""Memory over ranks, ranks in step, and plans on ranks, in real processes."""

from __future__ import annotations

import numpy
import pytest
import torch
from torch import nn

from distributed import on_ranks
from distributed.ranks import expect
from memfit.core.errors import UsageError
from memfit.distributed import MemorySynchronization
from memfit.distributed.fingerprints import fingerprints


def test_memory_lies_over_ranks_and_moves() -> None:
    results = expect(on_ranks.memory, ranks=3)
    for result in results:
        assert result["local"] and result["full"] and result["doubled"] and result["same"]
        assert [one.allocated_bytes for one in result["before"].ranks] == [800, 800, 800]
        assert [one.free_bytes for one in result["before"].ranks] == [5200, 2200, 2200]
        assert result["rows"] == (150, 75, 75)  # twice the limit, twice the rows
        assert [one.allocated_bytes for one in result["done"].after.ranks] == [1200, 600, 600]
        assert result["done"].after.balance.memory_imbalance == pytest.approx(1.5)
        assert result["done"].moved_bytes == 75 * 8  # rows 100 to 149 to rank 0, 200 to 224 to rank 1
        assert sum(result["sums"]) == sum(range(600))
    refused = results[0]["refused"]
    for text, wanted in zip(
        refused,
        [
            "rank 1 needs 2.93 KiB and has 2.34 KiB free, rank 2",
            "split='by_free'",
            "deallocate blocks",
            "is cut into [150, 75, 75] rows",
            "numbers of rows that add up to 1000",
            "may mean bits",
            "the function failed on rank 1: ZeroDivisionError",
            "leave num_gpus out",
            "the same num_gpus and limit",
            "deallocated already",
            "ranks 0 and 1 do not have the same blocks (weights)",
            "is closed",
        ],
        strict=True,
    ):
        assert wanted in text
    assert all(text.startswith(("UsageError", "OutOfDistributedMemory", "ToolFailure")) for text in refused)


def test_a_flipped_bit_is_found_and_repaired_from_the_majority() -> None:
    for result in expect(on_ranks.synchronize, ranks=3):
        assert result["first"] is None and result["repaired"]
        found = {one.name: (one.ranks, one.source) for one in result["second"].divergences}
        assert found == {"0.weight": ((1,), 0), "optimizer.0.bias.exp_avg": ((2,), 0)}
        assert result["second"].ranks_that_differed == (1, 2)
        assert result["second"].statistics == {"loss": (1.0, 0.0, 2.0)}
        assert torch.equal(result["mean"], torch.full((4,), 1.0))  # of 0, 1 and 2
        assert not result["again"].divergences and result["again"].averaged == 2


def test_without_a_majority_a_rank_must_be_named() -> None:
    for rank, (refused, untouched, found, repaired, averaged) in enumerate(expect(on_ranks.cannot_repair)):
        assert (
            "ranks differ in weight (ranks 0, 1), and no majority" in refused[0] and "repair=0" in refused[0]
        )
        assert "repair='raise'" in refused[1]
        assert untouched.eq(rank).all() and repaired.eq(1).all() and averaged.eq(0.5).all()
        assert [(one.name, one.ranks, one.source) for one in found.divergences] == [("weight", (0,), 1)]


def test_copies_of_a_shard_are_compared_with_each_other() -> None:
    results = expect(on_ranks.hybrid, ranks=4)
    for rank, (whole, found, pure) in enumerate(results):
        assert whole
        assert [one.ranks for one in found.divergences] == ([(3,)] if rank in (1, 3) else [])
        assert pure.unchecked == 2 and pure.checked == 0  # each shard is there once


def test_strategies_and_plans_equal_one_process() -> None:
    for found, recomputed, refused, sharded in expect(on_ranks.agree):
        assert len(found) == 7 and all(one.passed and one.ranks_agree for one in found), list(map(str, found))
        assert found[0].parameter_error == found[1].parameter_error  # the plan is exact: it changes nothing
        assert found[2].parameter_error == found[3].parameter_error
        assert recomputed == 2 and sharded == 16  # forward twice, half of 32 rows
        for text, wanted in zip(
            refused,
            ["changes the optimizer", "optimizer_in_backward does not go with ddp",
             "strategy 'zero' is not known", "needs at least 4 ranks", "no linear layers in pairs",
             "tp2+ddp: over groups", "does not go with tp2", "does not fit this model", "divide evenly"],
            strict=True,
        ):  # fmt: skip
            assert wanted in text


def trained_by_one_process() -> list[torch.Tensor]:
    torch.manual_seed(3)
    model, batches = on_ranks.Blocks(), [torch.randn(8, 6) for _ in range(3)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in batches:
        model(batch).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


@pytest.mark.parametrize(
    ("trouble", "log", "pieces"),
    [
        ("short", ["out of memory", "again", "out of memory", "down"], 2),
        ("update", ["out of memory", "again"], 1),
    ],
)
def test_ranks_leave_a_step_together_and_train_as_if_memory_had_not_run_out(
    trouble: str, log: list[str], pieces: int
) -> None:
    """Rank 1 in its forward pass at every size but 2; rank 0 after its weights were updated."""
    results = expect(on_ranks.guarded, trouble)
    for result in results:
        assert (result["log"], result["pieces"]) == (log, pieces)
        for own, other, one in zip(
            result["parameters"], results[0]["parameters"], trained_by_one_process(), strict=True
        ):
            assert torch.equal(own, other) and torch.allclose(own, one, rtol=0, atol=1e-6)


def test_ranks_end_together_where_a_step_cannot_be_saved() -> None:
    found = {trouble: expect(on_ranks.guarded, trouble) for trouble in ("always", "broken", "wrapped")}
    told = {trouble: [result["error"] for result in results] for trouble, results in found.items()}
    assert told["always"][0].startswith("AnotherRankShort: another rank ran out")
    assert told["always"][1].startswith("OutOfMemoryError")
    assert told["broken"][0] == "ValueError: a mistake" and "failed on another rank" in told["broken"][1]
    assert all("is a DistributedDataParallel" in text for text in told["wrapped"])


def naive_fingerprint(tensor: torch.Tensor) -> int:
    """The same hash in whole numbers of Python."""
    mask, total = (1 << 64) - 1, 0
    words = tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    for place, word in enumerate(words.reshape(-1).tolist()):
        x = (word + (place + 1) * 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        total = (total + (x ^ (x >> 31))) & mask
    return total - (1 << 64) if total >> 63 else total


def test_fingerprints_see_every_bit_and_place() -> None:
    tensors = [torch.randn(5, 7), torch.randn(9).to(torch.bfloat16), torch.arange(6), torch.randn(4, 3).T]
    assert fingerprints(tensors).tolist() == [naive_fingerprint(tensor) for tensor in tensors]
    base = torch.from_numpy(numpy.random.default_rng(0).integers(0, 1 << 31, 64, dtype=numpy.int32))
    seen = {fingerprints([base]).item()}
    for index in range(64):
        for bit in range(31):
            changed = base.clone()
            changed[index] ^= 1 << bit
            seen.add(fingerprints([changed]).item())
    seen |= {fingerprints([base.roll(shift)]).item() for shift in range(1, 64)}
    assert len(seen) == 1 + 64 * 31 + 63


def test_one_process_has_nobody_to_differ_from() -> None:
    sync = MemorySynchronization(sync_frequency=3)
    model = nn.Linear(2, 2)
    results = [sync.step(model) for _ in range(6)]
    assert [result is not None for result in results] == [False, False, True] * 2
    assert results[2] is not None and results[2].unchecked == 2
    for wrong in ({"sync_frequency": 0}, {"parameters": "copy"}, {"buffers": "x"}, {"repair": -1}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            MemorySynchronization(**wrong)  # type: ignore[arg-type]
