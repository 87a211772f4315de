from __future__ import annotations

import pytest

from memfit.reports.words import PlanRow, block_ranges, plan_rows, saved_in_words


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["h.0", "h.1", "h.2"], "h.0–2"),
        (["h.0", "h.2", "h.3", "h.7"], "h.0, 2–3, 7"),
        (["h.10", "h.9"], "h.9–10"),
        (["encoder.0", "decoder.0", "decoder.1"], "encoder.0, decoder.0–1"),
        (["layer1.0.conv", "layer1.1.conv"], "layer1.0–1.conv"),
        (["stem"], "stem"),
    ],
)
def test_blocks_in_short(names, text):
    assert block_ranges(names) == text


@pytest.mark.parametrize(
    ("saved", "text"),
    [
        (["linear:0"], "linear 1"),
        (["linear:0", "linear:3", "attention"], "linear 1 and 4, attention"),
        (["convolution:0", "convolution:1", "convolution:2"], "convolution 1, 2 and 3"),
        (["random"], "random"),
    ],
)
def test_what_a_block_keeps(saved, text):
    assert saved_in_words(saved) == text


def test_blocks_that_keep_the_same_share_a_row():
    rows = plan_rows(
        [{"technique": "gradient_checkpointing", "blocks": {"h.0": [], "h.1": ["linear:0"], "h.2": []}}]
    )
    assert rows == (
        PlanRow(where="h.0, 2 (2 blocks)", keeps="its input", recomputes="the whole block"),
        PlanRow(
            where="h.1 (1 block)",
            keeps="its input, and the outputs of linear 1",
            recomputes="everything else",
        ),
    )


@pytest.mark.parametrize(
    ("every", "where"),
    [(1, "every block"), (2, "every 2nd block"), (3, "every 3rd block"), (4, "every 4th block")],
)
def test_every_kth_block(every, where):
    (row,) = plan_rows([{"technique": "gradient_checkpointing", "checkpoint_frequency": every}])
    assert row.where == where


def test_a_technique_without_words_shows_its_settings():
    (row,) = plan_rows([{"technique": "new_thing", "strength": 3}])
    assert row == PlanRow(where="new thing", keeps='{"strength": 3}')


@pytest.mark.parametrize(
    ("settings", "where", "words"),
    [
        ({"technique": "mixed_precision", "precision": "bf16"}, "matrix products", "in bf16"),
        ({"technique": "qlora", "rank": 4}, "every linear layer", "NF4"),
        ({"technique": "activation_offload", "blocks": ["h.0", "h.1"], "to": "disk"}, "h.0–1", "on disk"),
        ({"technique": "pruning", "share": 0.25}, "every linear", "25%"),
        ({"technique": "attention_backend", "backend": "math"}, "attention", "scores of all pairs"),
        ({"technique": "low_memory_optimizer", "kind": "adafactor"}, "the optimizer", "Adafactor"),
    ],
)
def test_what_a_technique_does_is_said_from_its_settings(settings, where, words):
    row = plan_rows([settings])[0]
    assert where in row.where and words in row.keeps


def test_every_technique_has_words():
    techniques = pytest.importorskip("memfit.techniques")
    from memfit.reports.words import _DESCRIBE

    assert set(getattr(techniques, "TECHNIQUES", {})) <= set(_DESCRIBE)
