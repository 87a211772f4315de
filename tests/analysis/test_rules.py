"""Every rule on a job that has what it looks for, with the known figures, and on one that has not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from memfit.analysis.configuration import Configuration
from memfit.analysis.evidence import Evidence, GpuProcess, GpuUsage, Kept, RankPeak
from memfit.analysis.rules import RULES, rule_named, with_thresholds
from memfit.analysis.rules.base import Found
from memfit.core.errors import UsageError
from memfit.core.recording import Recording
from memfit.core.snapshot import Segment, Snapshot, SnapshotBlock
from memfit.core.trace import Action, TraceBuilder

from .cases import GIB, LAYERS, MIB, Job, configured, out_of_memory, recorded, sound_job


def look(rule: str, case: Evidence) -> list[Found]:
    """What one rule finds, if it has anything to look at."""
    chosen = rule_named(rule)
    return list(chosen.look(case)) if case.needs_met & set(chosen.needs) else []


def snapshot(*segments: Segment, **job: Any) -> Evidence:
    settings = job.pop("settings", {})
    end = Snapshot(segments=segments, settings=settings)
    recording = Recording(trace=TraceBuilder().build(), start=end, end=end)
    return Evidence(recording=recording, configuration=Configuration(**job))


def segment(address: int, *sizes: tuple[int, int, str]) -> Segment:
    """A segment of blocks ``(size, requested, state)``."""
    blocks, at = [], address
    for size, requested, state in sizes:
        block = SnapshotBlock(
            address=at,
            size_bytes=size,
            requested_bytes=requested,
            state=state,
            where="a.py:1 f",  # type: ignore[arg-type]
        )
        blocks.append(block)
        at += size
    return Segment(address=address, size_bytes=at - address, stream=0, pool="large", blocks=tuple(blocks))


# 1, 2: fragmentation


def fragmented(request: int, total_bytes: int) -> Evidence:
    """50 segments of 20 MiB, each with six buffers of 3 MiB, of which one stays."""
    builder = TraceBuilder()
    blocks = [builder.alloc(3 * MIB, where="a.py:1 f") for _ in range(300)]
    for place, block in enumerate(blocks):
        if place % 6:
            builder.free(block)
    out_of_memory(builder, request)
    return recorded(builder, total_bytes=total_bytes)


def test_frag_oom_names_the_hole_the_request_and_the_line() -> None:
    (found,) = look("FRAG_OOM", fragmented(200 * MIB, 1100 * MIB))
    finding = found.finding
    assert (finding.verdict, finding.severity) == ("fragmentation", "error")
    assert finding.bytes == 50 * 17 * MIB  # 20 MiB segments with one block of 3 MiB each
    assert finding.advice[0].typed == "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    assert finding.advice[0].saving_bytes == 200 * MIB  # never more than the request
    assert found.edit is not None and found.edit.settings == "expandable_segments:True"
    assert any("a.py:1 f" in line for line in finding.evidence)


def test_frag_oom_is_pointless_where_live_bytes_are_too_many() -> None:
    (found,) = look("FRAG_OOM", fragmented(1000 * MIB, 1100 * MIB))
    assert found.finding.verdict == "device_full" and found.edit is None
    assert found.finding.bytes == 50 * MIB  # 150 live + 1000 asked for, of 1100
    assert look("FRAG_OOM", sound_job().case(total_bytes=GIB)) == []


def test_frag_oom_offers_no_expandable_segments_beside_what_they_break() -> None:
    case = replace(fragmented(200 * MIB, 1100 * MIB), configuration=Configuration(cuda_ipc=True))
    (found,) = look("FRAG_OOM", case)
    assert found.edit is None and "expandable" not in (found.finding.advice[0].typed or "")


def test_frag_pinned_adds_up_what_is_stranded() -> None:
    pinned = [segment(n * GIB, (MIB, MIB, "allocated"), (39 * MIB, 0, "inactive")) for n in range(3)]
    (found,) = look("FRAG_PINNED", snapshot(*pinned))
    assert found.finding.bytes == 3 * 39 * MIB and found.finding.where == "a.py:1 f"
    full = [segment(n * GIB, (30 * MIB, 30 * MIB, "allocated"), (10 * MIB, 0, "inactive")) for n in range(3)]
    assert look("FRAG_PINNED", snapshot(*full)) == []


def test_frag_pinned_of_a_trace_moves_the_blocks_to_the_beginning() -> None:
    (found,) = look("FRAG_PINNED", fragmented(200 * MIB, 1100 * MIB))
    assert found.edit is not None and len(found.edit.windows) == 50
    assert all(windows[0].start == 0 for windows in found.edit.windows.values())


# 3, 4, 5: settings


def test_expandable_not_active() -> None:
    asked = {
        "alloc_conf": "expandable_segments:True",
        "alloc_variables": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    }
    held = segment(0, (20 * MIB, 20 * MIB, "allocated"))
    (found,) = look("EXPANDABLE_NOT_ACTIVE", snapshot(held, settings={"expandable_segments": False}, **asked))
    assert found.finding.advice[0].typed == "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    assert any("2.9.1" in line for line in found.finding.evidence)
    assert (
        look("EXPANDABLE_NOT_ACTIVE", snapshot(held, settings={"expandable_segments": True}, **asked)) == []
    )
    assert look("EXPANDABLE_NOT_ACTIVE", snapshot(held, settings={"expandable_segments": False})) == []


@pytest.mark.parametrize(
    "job, typed",
    [
        ({"cuda_ipc": True}, "unset PYTORCH_CUDA_ALLOC_CONF"),
        ({"cuda_graphs": True, "torch": "2.8.0"}, "unset PYTORCH_CUDA_ALLOC_CONF"),
        (
            {"alloc_conf": "expandable_segments:True,max_split_size_mb:64"},
            "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        ),
    ],
)  # fmt: skip
def test_expandable_unsafe(job: dict[str, Any], typed: str) -> None:
    (found,) = look("EXPANDABLE_UNSAFE", configured(**{"alloc_conf": "expandable_segments:True", **job}))
    assert found.finding.severity == "error" and found.finding.advice[0].typed == typed


def test_expandable_that_is_safe() -> None:
    assert look("EXPANDABLE_UNSAFE", configured(alloc_conf="expandable_segments:True", torch="2.14.1")) == []
    assert look("EXPANDABLE_UNSAFE", configured(cuda_ipc=True)) == []


def test_rounding_waste() -> None:
    held = segment(0, (64 * MIB, 40 * MIB, "allocated"))
    (found,) = look("ROUNDING_WASTE", snapshot(held))
    assert found.finding.bytes == 24 * MIB
    assert look("ROUNDING_WASTE", snapshot(segment(0, (64 * MIB, 63 * MIB, "allocated")))) == []


def test_rounding_waste_of_divisions_takes_them_out() -> None:
    builder = TraceBuilder()
    builder.alloc(129 * MIB)
    case = recorded(builder)
    recording = replace(
        case.recording, settings="roundup_power2_divisions:1,garbage_collection_threshold:0.8"
    )  # type: ignore[type-var]
    assert look("ROUNDING_WASTE", replace(case, recording=recording)) == []
    rounded = replace(case.recording, settings="roundup_power2_divisions:[256:2,>:2]")  # type: ignore[type-var]
    (found,) = look("ROUNDING_WASTE", replace(case, recording=rounded))
    assert found.finding.bytes == (192 - 129) * MIB
    assert found.edit is not None and found.edit.settings == ""


# 6, 7: the allocator's own behaviour


def test_alloc_retries() -> None:
    samples = [{"num_alloc_retries": n, "num_device_alloc": 5} for n in (0, 2, 7)]
    (found,) = look("ALLOC_RETRIES", Evidence(statistics=samples))
    assert "7 times" in found.finding.summary
    calls = [{"num_alloc_retries": 0, "num_device_alloc": n} for n in (5, 9, 12, 20, 31)]
    (found,) = look("ALLOC_RETRIES", Evidence(statistics=calls))
    assert "19 times" in found.finding.summary  # after the two samples of the warm-up
    assert (
        look("ALLOC_RETRIES", Evidence(statistics=[{"num_alloc_retries": 0, "num_device_alloc": 5}] * 4))
        == []
    )


def emptied(times: int, again: int) -> Evidence:
    builder = TraceBuilder()
    for _ in range(times):
        builder.append(Action.SEGMENT_ALLOC, size_bytes=again, address=1)
        builder.free(builder.alloc(30 * MIB))
        builder.append(Action.SEGMENT_FREE, size_bytes=again, address=1, where="train.py:9 loop")
    return recorded(builder, total_bytes=GIB)


def test_empty_cache_abuse() -> None:
    (found,) = look("EMPTY_CACHE_ABUSE", emptied(5, 40 * MIB))
    assert found.finding.where == "train.py:9 loop" and found.edit is None
    assert "160.00 MiB are taken again" in found.finding.summary
    assert look("EMPTY_CACHE_ABUSE", emptied(2, 40 * MIB)) == []
    assert look("EMPTY_CACHE_ABUSE", emptied(5, 1020 * MIB)) == []  # at the limit: PyTorch's own flush


# 8 to 11: leaks


def leaking(keep: Callable[[Job, int], None], *, steps: int = 14, **job: Any) -> Evidence:
    made = Job()
    for number in range(steps):
        activations = made.forward(2 * MIB)
        keep(made, number)
        gradients = made.backward(activations)
        made.optimizer()
        made.free(*gradients)
        made.end()
    return made.case(total_bytes=GIB, **job)


def list_of_outputs(job: Job, _number: int) -> None:
    job.take(3 * MIB, "activation", "forward", where="train.py:17 step", op="aten.clone")


def list_of_graphs(job: Job, _number: int) -> None:
    for part in range(3):
        texts = {"module": f"head.{part}", "op": "aten.mm", "where": "model.py:30 forward"}
        job.take(MIB, "activation", "forward", **texts)


def test_leak_monotonic_knows_slope_site_and_the_time_to_out_of_memory() -> None:
    case = leaking(list_of_outputs, total_steps=400)
    (found,) = look("LEAK_MONOTONIC", case)
    finding = found.finding
    assert finding.where == "train.py:17 step" and finding.severity == "error"
    assert "3.00 MiB a step" in finding.summary
    assert finding.advice[0].saving_bytes == 3 * MIB * (400 - 14)
    left = (GIB - case.peak_bytes) // (3 * MIB)
    assert any(f"after about {left:,} more steps" in line for line in finding.evidence)
    assert look("LEAK_GRAPH_RETAINED", case) == []  # one place only: no graph


def test_leak_graph_retained() -> None:
    case = leaking(list_of_graphs)
    (found,) = look("LEAK_GRAPH_RETAINED", case)
    assert found.finding.where == "model.py:30 forward" and "3.00 MiB a step" in found.finding.summary
    assert "loss.item()" in (found.finding.advice[0].typed or "")


@pytest.mark.parametrize(
    "rule", ["LEAK_MONOTONIC", "LEAK_GRAPH_RETAINED", "LEAK_GC_CYCLES", "LEAK_TRACEBACK"]
)
def test_a_sound_job_leaks_nothing(rule: str) -> None:
    assert look(rule, sound_job().case(total_bytes=GIB)) == []
    assert look(rule, leaking(lambda job, number: None)) == []


def test_a_leak_of_few_steps_is_not_judged() -> None:
    assert look("LEAK_MONOTONIC", leaking(list_of_outputs, steps=8)) == []
    (rule,) = [r for r in with_thresholds(["LEAK_MONOTONIC.least_steps=5"]) if r.id == "LEAK_MONOTONIC"]
    assert len(list(rule.look(leaking(list_of_outputs, steps=8)))) == 1


def test_leak_gc_cycles() -> None:
    waiting: list[int] = []

    def keep(job: Job, number: int) -> None:
        if number % 5 == 4:
            job.free(*waiting)
            waiting.clear()
        waiting.append(job.take(5 * MIB, "activation", "forward", where="data.py:4 batch"))

    (found,) = look("LEAK_GC_CYCLES", leaking(keep))
    assert found.finding.where == "data.py:4 batch"
    assert found.finding.bytes == (4 + 5) * 5 * MIB // 2  # the first tooth has four batches, the second five


def test_a_tensor_that_the_next_step_uses_is_no_cycle() -> None:
    last: list[int] = []

    def keep(job: Job, _number: int) -> None:
        new = job.take(8 * MIB, "activation", "forward", where="train.py:9 step")
        job.free(*last)
        last[:] = [new]

    assert look("LEAK_GC_CYCLES", leaking(keep)) == []


def failed_pass(*, kept: bool) -> Evidence:
    job = Job()
    activations = job.forward(20 * MIB)
    out_of_memory(job.builder, 900 * MIB)
    flat = [block for layer in activations for block in layer]
    if not kept:
        job.free(*flat)
    for _ in range(4):
        job.step()
    return job.case(total_bytes=GIB)


def test_leak_traceback() -> None:
    (found,) = look("LEAK_TRACEBACK", failed_pass(kept=True))
    assert found.finding.bytes == 2 * LAYERS * 20 * MIB
    assert look("LEAK_TRACEBACK", failed_pass(kept=False)) == []
    kept = [Kept(keeper="traceback", size_bytes=40 * MIB, text="40 MiB by a frame")]
    (found,) = look("LEAK_TRACEBACK", Evidence(kept=kept))
    assert found.finding.bytes == 40 * MIB and found.finding.confidence == "high"
    assert look("LEAK_TRACEBACK", Evidence(kept=[Kept(keeper="closure", size_bytes=GIB, text="")])) == []


# 12, 13: evaluation


def evaluated(*, gradients: bool) -> Evidence:
    job = sound_job(3)
    for _ in range(2):
        held: list[int] = []
        for layer in range(8):
            texts = {"module": f"layers.{layer}", "op": "aten.mm", "where": "model.py:7 forward"}
            held.append(job.take(10 * MIB, "temporary", "forward", **texts))
            if not gradients and len(held) == 2:
                job.free(held.pop(0))
        job.free(*held)
    return job.case()


def test_eval_with_grad() -> None:
    (found,) = look("EVAL_WITH_GRAD", evaluated(gradients=True))
    assert found.finding.bytes == (8 - 2) * 10 * MIB  # all but the largest pair
    assert "inference_mode" in (found.finding.advice[0].typed or "")
    assert look("EVAL_WITH_GRAD", evaluated(gradients=False)) == []
    assert look("EVAL_WITH_GRAD", sound_job().case()) == []


def predicted(*, kept: bool) -> Evidence:
    job = sound_job(3)
    for _ in range(10):
        inner = job.take(MIB, "temporary", "forward", module="layers.0", where="model.py:7 forward")
        output = job.take(6 * MIB, "temporary", "forward", module="head", where="model.py:9 forward")
        job.free(inner, *(() if kept else (output,)))
    return job.case()


def test_eval_accumulation() -> None:
    (found,) = look("EVAL_ACCUMULATION", predicted(kept=True))
    assert found.finding.bytes == 60 * MIB and found.finding.where == "model.py:9 forward"
    assert found.finding.advice[0].saving_bytes == 54 * MIB
    assert look("EVAL_ACCUMULATION", predicted(kept=False)) == []


def test_eval_accumulation_by_the_configuration() -> None:
    sizes = {"batch": 8, "sequence": 512, "vocabulary": 32_000}
    (found,) = look("EVAL_ACCUMULATION", configured(evaluates=True, **sizes))
    assert found.finding.bytes == 4 * 8 * 512 * 32_000
    assert look("EVAL_ACCUMULATION", configured(evaluates=True, eval_accumulation_steps=4, **sizes)) == []


# 14 to 18: optimizer and gradients


def test_optim_lazy() -> None:
    job = Job()
    job.backward(job.forward(2 * MIB))
    (found,) = look("OPTIM_LAZY", job.case(total_bytes=100 * MIB, optimizer="adamw_torch"))
    assert found.finding.bytes == 2 * LAYERS * 8 * MIB  # two states of fp32 for each parameter
    assert found.finding.severity == "error"  # 32 + 32 + … + 64 MiB of 100
    assert look("OPTIM_LAZY", sound_job().case(optimizer="adamw_torch")) == []
    assert look("OPTIM_LAZY", job.case(optimizer="sgd")) == []


def foreach(spike_bytes: int, activation_bytes: int = 2 * MIB) -> Evidence:
    job = Job()
    for _ in range(3):
        job.step(activation_bytes, spike_bytes=spike_bytes, state_bytes=MIB)
    return job.case()


def test_optim_foreach() -> None:
    case = foreach(8 * MIB)
    (found,) = look("OPTIM_FOREACH", case)
    assert found.finding.bytes == LAYERS * 8 * MIB
    backward = case.timeline.peak_by_phase()["backward"]
    assert found.finding.advice[0].saving_bytes == case.peak_bytes - backward
    assert look("OPTIM_FOREACH", foreach(8 * MIB, 60 * MIB)) == []  # the peak is in the backward pass
    assert look("OPTIM_FOREACH", foreach(30 * MIB)) == []  # another kind of temporaries
    assert look("OPTIM_FOREACH", replace(case, configuration=Configuration(optimizer_foreach=False))) == []


def with_states(state_bytes: int, **job: Any) -> Evidence:
    made = Job()
    for _ in range(3):
        made.step(state_bytes=state_bytes)
    return made.case(**job)


def test_optim_state_heavy() -> None:
    (found,) = look("OPTIM_STATE_HEAVY", with_states(8 * MIB, world_size=8))
    states = 2 * LAYERS * 8 * MIB
    assert found.finding.bytes == states
    assert found.finding.advice[0].saving_bytes == states - 2 * LAYERS * int(8 * MIB * 1.015 / 4)
    assert found.finding.advice[1].saving_bytes == states * 7 // 8  # ZeRO-1
    assert look("OPTIM_STATE_HEAVY", with_states(MIB)) == []
    small = with_states(8 * MIB)
    assert (
        look("OPTIM_STATE_HEAVY", replace(small, configuration=Configuration(optimizer="adamw_8bit"))) == []
    )


def test_optim_8bit_no_gain() -> None:
    job = {"optimizer": "adamw_bnb_8bit", "trainable_parameters": 100_000}
    (found,) = look("OPTIM_8BIT_NO_GAIN", with_states(MIB, **job))
    assert found.finding.bytes == int(100_000 * (8 - 2.03)) and found.edit is None
    assert (
        look("OPTIM_8BIT_NO_GAIN", with_states(MIB, optimizer="adamw_bnb_8bit")) == []
    )  # 8 M parameters: it does
    assert look("OPTIM_8BIT_NO_GAIN", with_states(MIB, optimizer="adamw")) == []


def gradients_kept(*, kept: bool, **job: Any) -> Evidence:
    made = Job()
    gradients: list[int] = []
    for number in range(3):
        if number == 0 or not kept:
            gradients = made.backward(made.forward(2 * MIB))
        else:
            made.backward(made.forward(2 * MIB), gradients=False)
        made.optimizer(state_bytes=4096)
        if not kept:
            made.free(*gradients)
        made.end()
        more = made.take(100 * MIB, "temporary", "forward", where="model.py:9 forward")
        made.free(more)
    return made.case(**job)


def test_grad_not_freed() -> None:
    (found,) = look("GRAD_NOT_FREED", gradients_kept(kept=True))
    assert found.finding.bytes == LAYERS * 8 * MIB
    assert "set_to_none=True" in (found.finding.advice[0].typed or "")
    assert look("GRAD_NOT_FREED", gradients_kept(kept=False)) == []
    assert look("GRAD_NOT_FREED", gradients_kept(kept=True, accumulation_steps=4)) == []
    assert look("GRAD_NOT_FREED", sound_job().case()) == []  # the peak is in the backward pass


# 19, 31: copies of the parameters


def copied(where: str, *, op: str = "", freed: bool = False, size: int = 8 * MIB) -> Evidence:
    job = Job()
    copy = [job.take(size, "other", "init", where=where, op=op) for _ in range(LAYERS)]
    if freed:
        job.free(*copy)
    for _ in range(3):
        job.step()
    return job.case()


def test_resume_duplicate() -> None:
    (found,) = look("RESUME_DUPLICATE", copied("train.py:8 load_checkpoint"))
    assert found.finding.bytes == LAYERS * 8 * MIB and found.finding.confidence == "high"
    assert 'map_location="cpu"' in (found.finding.advice[0].typed or "")
    assert look("RESUME_DUPLICATE", copied("train.py:8 load_checkpoint", freed=True)) == []
    assert look("RESUME_DUPLICATE", copied("train.py:8 load_checkpoint", size=7 * MIB)) == []


def test_ema_on_gpu() -> None:
    (found,) = look("EMA_ON_GPU", copied("train.py:8 make_ema", op="aten.clone"))
    assert found.finding.bytes == LAYERS * 8 * MIB
    assert look("RESUME_DUPLICATE", copied("train.py:8 make_ema", op="aten.clone")) == []
    assert look("EMA_ON_GPU", copied("train.py:8 load_checkpoint")) == []


# 20 to 22: processes and ranks

ON_GPU_0 = [GpuProcess(gpu="0", pid=pid, name="python", used_bytes=725 * MIB) for pid in (62, 63, 64)]
OWN = [GpuProcess(gpu=str(n), pid=61 + n, name="python", used_bytes=4900 * MIB) for n in range(4)]


def test_stray_contexts() -> None:
    (found,) = look("STRAY_CONTEXTS", Evidence(processes=[*OWN, *ON_GPU_0]))
    assert found.finding.bytes == 3 * 725 * MIB and found.finding.where == "GPU 0"
    assert look("STRAY_CONTEXTS", Evidence(processes=OWN)) == []


def test_non_torch_memory() -> None:
    gpus = [GpuUsage(gpu="0", used_bytes=20 * GIB, total_bytes=24 * GIB)]
    counters = [{"reserved_bytes.all.current": 14 * GIB}]
    case = Evidence(gpus=gpus, statistics=counters, configuration=Configuration(process_groups=4))
    (found,) = look("NON_TORCH_MEMORY", case)
    assert found.finding.bytes == 6 * GIB - 512 * MIB
    assert found.finding.advice[0].saving_bytes == 3 * 544 * MIB
    full = [{"reserved_bytes.all.current": 19 * GIB}]
    assert look("NON_TORCH_MEMORY", replace(case, statistics=full)) == []


def test_rank_imbalance() -> None:
    ranks = [RankPeak(name=f"rank{n}", peak_bytes=size * GIB) for n, size in enumerate((11, 5, 5, 5))]
    (found,) = look("RANK_IMBALANCE", Evidence(ranks=ranks))
    assert (found.finding.bytes, found.finding.where) == (int(4.5 * GIB), "rank0")
    assert look("RANK_IMBALANCE", Evidence(ranks=[replace(rank, peak_bytes=GIB) for rank in ranks])) == []


# 23 to 27: activations


def with_logits(
    tokens: int = 2048, words: int = 32_000, *, op: str = "aten._log_softmax", **job: Any
) -> Evidence:
    made = Job()
    for _ in range(2):
        activations = made.forward(2 * MIB)
        unit, texts = 4 * tokens * words, {"where": "train.py:15 loss"}
        logits = made.take(
            unit // 2, "activation", "forward", module="lm_head", op="aten.mm", where="model.py:9 forward"
        )
        copy = made.take(unit, "activation", "forward", op="aten._to_copy", **texts)
        softmax = made.take(unit, "activation", "forward", op=op, **texts)
        gradient = made.take(unit, "temporary", "backward", op=f"{op}_backward_data", **texts)
        made.free(copy, softmax, logits, gradient)
        made.free(*made.backward(activations))
        made.end()
    return made.case(**job)


def test_logits_spike() -> None:
    (found,) = look("LOGITS_SPIKE", with_logits(batch=2, sequence=1024, vocabulary=32_000))
    held = 14 * 2048 * 32_000  # 2 + 4 + 4 + 4 bytes an element
    assert found.finding.bytes == held
    assert found.finding.advice[0].saving_bytes == held - held // 8
    assert any("14.0 B for each element" in line for line in found.finding.evidence)
    assert look("LOGITS_SPIKE", with_logits(tokens=16)) == []
    assert look("LOGITS_SPIKE", sound_job().case()) == []


def deep(saved: int, *, steps: int = 2, **job: Any) -> Evidence:
    made = Job(parameter_bytes=MIB)
    for _ in range(steps):
        made.step(10 * MIB, saved=saved)
    return made.case(**job)


def test_act_dominant_saves_what_recomputation_would() -> None:
    case = deep(4)
    (found,) = look("ACT_DOMINANT", case)
    # 4 layers × 4 blocks − 4 outputs − the 4 blocks of one layer
    assert found.finding.advice[0].saving_bytes == (16 - 4 - 4) * 10 * MIB
    assert look("ACT_DOMINANT", deep(4, gradient_checkpointing=True)) == []
    assert look("ACT_DOMINANT", deep(1)) == []  # layers that save nothing but their output
    heavy = Job(parameter_bytes=64 * MIB)
    heavy.step(10 * MIB)
    assert look("ACT_DOMINANT", heavy.case()) == []


def checkpointed(*, kept: bool) -> Evidence:
    job = Job(parameter_bytes=MIB)
    for _ in range(2):
        stored = job.forward(10 * MIB, saved=4 if kept else 1)
        for layer in reversed(range(LAYERS)):
            texts = {"module": f"layers.{layer}.part0", "op": "aten.mm", "where": "model.py:7 forward"}
            again = [job.take(10 * MIB, "activation", "recompute", **texts) for _ in range(3)]
            job.free(job.take(512, "temporary", "backward", **texts), *again)
        job.free(*(block for layer in stored for block in layer))
        job.end()
    return job.case()


def test_ckpt_ineffective() -> None:
    (found,) = look("CKPT_INEFFECTIVE", checkpointed(kept=True))
    assert found.finding.advice[0].typed == "model.config.use_cache = False"
    assert look("CKPT_INEFFECTIVE", checkpointed(kept=False)) == []
    assert look("CKPT_INEFFECTIVE", deep(4)) == []
    assert len(look("CKPT_INEFFECTIVE", configured(gradient_checkpointing=True, use_cache=True))) == 1
    assert look("CKPT_INEFFECTIVE", configured(gradient_checkpointing=True, use_cache=False)) == []


@pytest.mark.parametrize(
    "text, advice",
    [
        ("UserWarning: None of the inputs have requires_grad=True. Gradients will be None",
        "use_reentrant=False"),
        ("Expected to mark a variable ready only once.", "static_graph=True"),
        (
            "CheckpointError: torch.utils.checkpoint: Recomputed values for the following tensors have "
            "different "
            "metadata\nsaved metadata: {'shape': torch.Size([5, 5])}\nrecomputed metadata: "
            "{'shape': torch.Size([0])}",
            "apply_activation_checkpointing",
        ),
        (
            "CheckpointError: different metadata than during the forward pass.\n"
            "saved metadata: {'shape': torch.Size([8]), 'dtype': torch.bfloat16}\n"
            "recomputed metadata: {'shape': torch.Size([8]), 'dtype': torch.float32}",
            "autocast",
        ),
        ("torch.utils.checkpoint: A different number of tensors was saved during the original forward",
        "debug=True"),
        (
            "CheckpointError: Recomputed values have different metadata\nsaved metadata: "
            "{'shape': torch.Size([99, 7])}\n"
            "recomputed metadata: {'shape': torch.Size([98, 7])}",
            "determinism_check",
        ),
    ],
)  # fmt: skip
def test_ckpt_error_classes(text: str, advice: str) -> None:
    (found,) = look("CKPT_ERROR", Evidence(text=f"Traceback\n{text}\n"))
    assert found.finding.severity == "error" and advice in (found.finding.advice[0].typed or "")


def test_other_errors_are_not_of_checkpointing() -> None:
    assert look("CKPT_ERROR", Evidence(text="RuntimeError: CUDA out of memory")) == []


def convolved(workspace: int) -> Evidence:
    builder = TraceBuilder()
    for _ in range(3):
        texts = {"op": "aten.convolution", "phase": "forward", "where": "model.py:5 forward"}
        output = builder.alloc(40 * MIB, category="activation", **texts)
        builder.free(builder.alloc(workspace, category="workspace", **texts))
        for _ in range(6):
            builder.free(builder.alloc(512))
        builder.free(output)
    return recorded(builder)


def test_cudnn_workspace() -> None:
    (found,) = look("CUDNN_WORKSPACE", convolved(600 * MIB))
    assert found.finding.bytes == 600 * MIB
    assert found.finding.advice[0].saving_bytes == 480 * MIB
    assert look("CUDNN_WORKSPACE", convolved(150 * MIB)) == []


# 28 to 30, 32


def test_stream_delayed_free() -> None:
    waiting = segment(0, (600 * MIB, 600 * MIB, "allocated"), (400 * MIB, 400 * MIB, "pending_free"))
    (found,) = look("STREAM_DELAYED_FREE", snapshot(waiting))
    assert found.finding.bytes == 400 * MIB
    assert look("STREAM_DELAYED_FREE", snapshot(segment(0, (600 * MIB, 600 * MIB, "allocated")))) == []


def test_sharding_waste_of_ddp() -> None:
    (found,) = look(
        "SHARDING_WASTE", configured(strategy="ddp", world_size=8, bucket_view=False, parameters=10**9)
    )
    assert found.finding.bytes == 4 * 10**9
    assert look("SHARDING_WASTE", configured(strategy="ddp", world_size=8, bucket_view=True)) == []
    assert look("SHARDING_WASTE", configured(strategy="ddp", world_size=1)) == []


def test_sharding_waste_of_fsdp() -> None:
    job = {"strategy": "fsdp", "parameters": 8 * 10**9, "layers": 32, "precision": "bf16"}
    (found,) = look("SHARDING_WASTE", configured(fsdp_wrap="none", **job))
    assert found.finding.bytes == (8 * 10**9 - 8 * 10**9 // 32) * 2 * 2
    assert look("SHARDING_WASTE", configured(fsdp_wrap="transformer_based_wrap", fsdp_units=33, **job)) == []


def varying(sizes: list[int]) -> Evidence:
    job = Job()
    for size in sizes:
        job.step(size * MIB)
    return job.case()


def test_shape_churn() -> None:
    (found,) = look("SHAPE_CHURN", varying([4, 6, 5, 8, 11, 13, 17, 21]))
    assert found.edit is not None and found.edit.warm_up is not None
    assert look("SHAPE_CHURN", varying([4, 6, 4, 6, 4, 6, 4, 6])) == []


def growing(*, at_once: bool) -> Evidence:
    builder = TraceBuilder()
    cache: int | None = None
    for number in range(12):
        texts = {"phase": "forward", "op": "aten.cat", "where": "generate.py:5 f"}
        if not at_once or cache is None:
            new = builder.alloc((13 if at_once else number + 2) * 2 * MIB, **texts)
            if cache is not None:
                builder.free(cache)
            cache = new
        builder.free(builder.alloc(MIB, phase="forward", where="model.py:2 f"))
    return recorded(builder)


def test_kv_growth() -> None:
    (found,) = look("KV_GROWTH", growing(at_once=False))
    assert found.finding.bytes == 26 * MIB and found.finding.where == "generate.py:5 f"
    assert look("KV_GROWTH", growing(at_once=True)) == []
    assert look("LEAK_MONOTONIC", growing(at_once=False)) == []


# the table


def test_the_table_is_complete_and_tells_what_it_does() -> None:
    assert [rule.number for rule in RULES] == list(range(1, 33))
    assert len({rule.id for rule in RULES}) == 32
    for rule in RULES:
        assert rule.title and rule.needs and rule.detection and rule.saving and rule.source
        assert set(rule.to_json()["settings"]) == set(rule.settings())
    named = [name for rule in RULES for name in rule.settings() if name in rule.detection + rule.saving]
    assert len(named) > 40  # thresholds are in the text by their names


def test_thresholds_are_set_by_name() -> None:
    changed = with_thresholds(["frag-pinned.most_live_share=0.5", "8.least_steps=3"])
    assert changed[1].settings()["most_live_share"] == 0.5 and changed[7].settings()["least_steps"] == 3
    for bad in ("NO_RULE.x=1", "FRAG_PINNED.x=1", "FRAG_PINNED.most_live_share=much", "FRAG_PINNED"):
        with pytest.raises(UsageError, match="rule|--set"):
            with_thresholds([bad])
