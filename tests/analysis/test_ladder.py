"""The ladder: each rung is the chain below it and one technique more, measured, trained, explained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import memfit
from memfit import UsageError
from memfit.analysis.ladder_order import in_order, in_order_of_application, read_techniques
from memfit.analysis.ladder_values import Ladder, Quality, Rung
from memfit.capture import capture_step
from memfit.cli import main
from memfit.reports.ladder import headline, reasons
from memfit.reports.ladder_page import ladder_page
from memfit.techniques import TECHNIQUES

SOURCE = """
import torch
import torch.nn.functional as F
from torch import nn
from memfit import Workload


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(Block(32) for _ in range(4))
        self.head = nn.Linear(32, 64)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch():
    return torch.randint(0, 64, (8, 128))


def loss(model, ids):
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten() * 5 % 64)


def workload():
    return Workload(name="words", model=Model, batch=batch, loss=loss)
"""
FAULTY = """
from dataclasses import dataclass
from typing import ClassVar
from memfit.techniques import TECHNIQUES, Technique


@dataclass(frozen=True, kw_only=True)
class Faulty(Technique):
    name: ClassVar[str] = "faulty"

    def exactness(self, model):
        return "exact"

    def change(self, model, optimizer):
        model.embed = None
        return {}["a"]

    def estimate(self, graph, model=None):
        return {}["a"]


TECHNIQUES["faulty"] = Faulty
"""
STEPS, SEEDS = 4, 2


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("ladder") / "words.py"
    path.write_text(SOURCE)
    return f"{path}:workload"


@pytest.fixture(scope="module")
def climbed(file: str) -> Ladder:
    return memfit.ladder(
        file,
        techniques=[
            "gradient_checkpointing",
            memfit.MicroBatching(micro_batches=2),
            "gradient_checkpointing:checkpoint_frequency=2",
            {"technique": "mixed_precision", "precision": "bf16"},
            "low_memory_optimizer:kind=adafactor",
        ],
        engine="portable",
        steps=STEPS,
        seeds=SEEDS,
    )


@pytest.mark.slow
def test_each_rung_has_what_is_below_it(climbed: Ladder) -> None:
    names = ["plain", "gradient_checkpointing", "micro_batching", "mixed_precision", "low_memory_optimizer"]
    assert [rung.name for rung in climbed.climbed] == names
    plain, kept, cut, *_ = climbed.climbed
    assert plain.peak_reserved_bytes and kept.peak_requested_bytes and plain.peak_requested_bytes
    assert kept.peak_requested_bytes < plain.peak_requested_bytes
    assert cut.peak_requested_bytes is not None and cut.peak_requested_bytes < kept.peak_requested_bytes
    for rung in climbed.climbed[1:]:
        assert rung.alone_reserved_bytes is not None


def test_what_cannot_join_is_a_rung_with_its_reason_and_the_chain_goes_on(climbed: Ladder) -> None:
    (second,) = [rung for rung in climbed.rungs if rung.skipped is not None]
    assert second.settings == {"technique": "gradient_checkpointing", "checkpoint_frequency": 2}
    assert "already" in (second.skipped or "") and second.peak_bytes is None and second.quality is None
    assert climbed.changes(second) == {"change_from_previous": None, "change_from_plain": None}


def test_quality_is_training_as_a_loop_by_hand_does_it(climbed: Ladder) -> None:
    space: dict[str, object] = {}
    exec(SOURCE, space)
    made = space["workload"]()  # type: ignore[operator]
    losses = []
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        model = made.model()
        optimizer = torch.optim.AdamW(model.parameters())
        for number in range(STEPS):
            torch.manual_seed(1_000_003 * (seed + 1) + number)
            made.loss(model, made.batch()).backward()
            optimizer.step()
            optimizer.zero_grad()
        held_out = []
        for number in range(4):
            torch.manual_seed(7_000_001 + 1_000 * seed + number)
            held_out.append(float(made.loss(model, made.batch()).detach()))
        losses.append(sum(held_out) / 4)
    plain, kept, cut, low, adafactor = (rung.quality for rung in climbed.climbed)
    assert plain is not None and plain.losses == pytest.approx(losses, rel=1e-5)
    assert kept is not None and kept.losses == plain.losses  # exact, and it is
    assert cut is not None and cut.losses == pytest.approx(plain.losses, rel=1e-4)
    assert low is not None and low.losses != plain.losses and low.losses == pytest.approx(losses, rel=0.02)
    assert adafactor is not None and adafactor.difference != low.difference
    assert plain.seed_spread > 0 and plain.scale == "full size" and plain.steps == STEPS


def test_seconds_are_predicted_until_a_technique_that_the_model_does_not_know(climbed: Ladder) -> None:
    *known, last = climbed.climbed
    assert all(rung.step_seconds_kind == "predicted" and rung.step_seconds for rung in known)
    assert last.step_seconds is None and last.step_seconds_kind is None
    assert "dispatcher" in (last.step_seconds_reason or "") and last.operator_seconds is not None
    assert any("No step time from low_memory_optimizer on" in reason for reason in reasons(climbed))


def test_json_adds_up(climbed: Ladder) -> None:
    data = json.loads(json.dumps(climbed.to_json()))
    total, rungs = 0, [rung for rung in data["rungs"] if not rung["skipped"]]
    assert rungs[0]["change_from_previous"] is None
    for rung in rungs[1:]:
        total += rung["change_from_previous"]["peak_reserved_bytes"]
        assert rung["change_from_plain"]["peak_reserved_bytes"] == total
        assert isinstance(rung["peak_reserved_bytes"], int)
    assert rungs[1]["exactness"] == "exact" and rungs[2]["settings"] == {}


def test_the_page_stands_alone_and_shows_every_rung(climbed: Ladder) -> None:
    page = ladder_page(climbed)
    assert "data:image/png;base64," in page and "http" not in page.replace("http-equiv", "")
    for word in ("gradient checkpointing", "micro batching", "is not part of the chain", headline(climbed)):
        assert word in page


def test_on_the_cpu_peaks_and_seconds_are_measured(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["ladder", file, "--device", "cpu", "--techniques", "gradient_checkpointing", "--json"]
    assert main([*arguments, "--no-quality", "--steps", "3"]) == 0
    data = json.loads(capsys.readouterr().out)
    plain, kept = data["rungs"]
    space: dict[str, object] = {}
    exec(SOURCE, space)
    graph = capture_step(space["workload"](), device="cpu")  # type: ignore[operator]
    assert plain["peak_requested_bytes"] == graph.peak_bytes > kept["peak_requested_bytes"]
    assert plain["peak_reserved_bytes"] is None
    assert plain["step_seconds"] > 0 and plain["step_seconds_kind"] == "measured"
    assert kept["quality"] is None and "asked" in kept["quality_reason"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--techniques", "nothing"], 2, "no technique is called 'nothing'"),
        (["--techniques", "micro_batching:parts"], 2, "is no setting"),
        (["--techniques", "micro_batching:parts=2"], 2, "has no setting 'parts'"),
        (["--techniques", ","], 2, "no technique is named"),
        (["--gpu", "abacus"], 2, "abacus"),
        (["--report", "words.py"], 2, "--report"),
        (["--device", "abacus"], 2, "abacus"),
    ],
)
def test_bad_input(
    file: str, arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ladder", file, *arguments]) == code
    assert words in capsys.readouterr().err


def test_exact_techniques_come_first_and_those_beyond_the_grade_are_named() -> None:
    names = ["lora", "offload_activations", "micro_batching", "gradient_checkpointing", "unfit"]
    grades = ["changes training", "exact", "reordered", "exact", None]
    settings = [{"technique": name} for name in names]
    kept, left_out = in_order(settings, [{"exactness": grade} for grade in grades], "reordered")
    assert [s["technique"] for s in kept] == [
        "gradient_checkpointing",
        "offload_activations",
        "micro_batching",
        "unfit",
    ]
    assert len(left_out) == 1 and "lora" in left_out[0]
    applied = in_order_of_application([{"technique": "mixed_precision"}, {"technique": "lora"}])
    assert [s["technique"] for s in applied] == ["lora", "mixed_precision"]


def test_a_technique_with_a_fault_is_a_rung_of_its_own(file: str, tmp_path: Path) -> None:
    """A user's own, in the workload's file: its exception is the reason, and the others stay on the list."""
    path = tmp_path / "faulty.py"
    path.write_text(SOURCE + FAULTY)
    try:
        climbed = memfit.ladder(
            f"{path}:workload", device="cpu", quality=False, steps=1, techniques=["faulty", "micro_batching"]
        )
    finally:
        TECHNIQUES.pop("faulty", None)  # the file puts it into the table of this process too
    plain, faulty, micro = climbed.rungs
    assert faulty.skipped is not None and "KeyError" in faulty.skipped
    assert micro.skipped is None and micro.exactness == "reordered"
    assert plain.peak_bytes is not None and plain.peak_bytes > (micro.peak_bytes or 0) > 0


def test_techniques_are_read_from_texts_settings_and_objects() -> None:
    texts = read_techniques('micro_batching:micro_batches=4, gradient_checkpointing:save=["linear"]')
    assert texts[0] == {"technique": "micro_batching", "micro_batches": 4}
    assert texts[1] == {"technique": "gradient_checkpointing", "save": ["linear"]}
    assert read_techniques([memfit.MicroBatching(micro_batches=4)]) == (texts[0],)
    with pytest.raises(UsageError, match="write name"):
        read_techniques([4])


def test_a_spread_over_seeds() -> None:
    quality = Quality(
        losses=(1.0, 2.0), plain_losses=(1.5, 1.5), steps=1, step_seconds=1.0, scale="full size"
    )
    assert (quality.difference, quality.seed_spread) == (0.0, 0.0)
    assert quality.difference_spread == pytest.approx(0.5**0.5)


def test_reasons_are_said_once() -> None:
    first = Rung(name="plain", peak_reserved_bytes=1)
    second = Rung(
        name="offload_x",
        settings={"technique": "offload_x"},
        peak_reserved_bytes=1,
        step_seconds_reason="offload_x: over the bus",
    )
    third = replace(second, name="b", settings={"technique": "b"})
    ladder = Ladder(
        workload="w",
        device="dryrun",
        device_name="d",
        engine="dryrun",
        engine_reason=None,
        rungs=(first, second, third),
    )
    assert reasons(ladder) == ("No step time from offload_x on: over the bus",)


@pytest.mark.parametrize("has_small_form", [False, True])
def test_what_is_too_large_for_the_cpu_is_trained_in_a_smaller_form(has_small_form: bool) -> None:
    from memfit.analysis import ladder as module

    class Real:
        def call(self, function: str) -> dict[str, object]:
            return {
                "has_small_form": has_small_form,
                "parameters": 10,
                "samples": 8,
                "available_bytes": 10**9,
            }

    climb = module._Climb(
        real=Real(), oracle=None, device="cpu", target=memfit.find_gpu("a100-80gb"), steps=1, seeds=1,
        wants_quality=True, show=module._silent,
    )  # fmt: skip
    assert climb._form(int(module.MOST_FLOPS), 1).text == "full size"
    if has_small_form:
        assert climb._form(int(9 * module.MOST_FLOPS), 1).size == "small"
        return
    assert climb._form(int(3 * module.MOST_FLOPS), 1).samples == 2
    assert "size='small'" in (climb._form(int(9 * module.MOST_FLOPS), 1).reason or "")


def test_losses_in_fp16_are_scaled_where_techniques_are_tried(file: str) -> None:
    from memfit.capture.step import build_step
    from memfit.capture.workloads import load_workload
    from memfit.planning.evaluate import applied

    step = build_step(load_workload(file), device="cpu")
    before = step.model.head.weight.detach().clone()
    with applied(step, [{"technique": "mixed_precision", "precision": "fp16"}]):
        step.run()
        assert step.scaler is not None
    assert step.scaler is None and not torch.equal(step.model.head.weight, before)
