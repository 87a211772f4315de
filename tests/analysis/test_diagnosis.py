"""The whole diagnosis: which findings stand, what following them saves together, and what files are read."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from memfit.analysis.chain import chain_of
from memfit.analysis.configuration import Configuration
from memfit.analysis.diagnosis import diagnose
from memfit.analysis.edits import Edit, Window, edited
from memfit.analysis.evidence import Evidence, source_line
from memfit.analysis.findings import Advice, Finding
from memfit.analysis.inputs import read_evidence
from memfit.analysis.rules import RULES
from memfit.analysis.rules.base import Found
from memfit.core.errors import InputError, UsageError
from memfit.core.timeline import Timeline
from memfit.core.trace import Trace, TraceBuilder
from memfit.dryrun.result import DryRunResult

from .cases import LAYERS, MIB, Job, sound_job
from .test_rules import configured, fragmented, leaking, list_of_graphs, varying


def rules_of(case: Evidence) -> set[str]:
    return {finding.rule for finding in diagnose(case=case).findings}


def test_a_sound_job_has_no_finding() -> None:
    diagnosis = diagnose(case=sound_job().case(total_bytes=1 << 34))
    assert diagnosis.findings == () and diagnosis.total_saving_bytes == 0
    assert "STRAY_CONTEXTS" in diagnosis.skipped and "LEAK_MONOTONIC" in diagnosis.looked


# what one finding says, another does not repeat


def test_a_graph_that_is_kept_is_not_also_any_leak() -> None:
    assert rules_of(leaking(list_of_graphs)) == {"LEAK_GRAPH_RETAINED"}


def test_eight_bits_without_gain_are_not_advised() -> None:
    job = Job()
    for _ in range(3):
        job.step(state_bytes=4 * MIB)
    states = {"optimizer": "adamw_bnb_8bit", "trainable_parameters": 1000}
    assert rules_of(job.case(**states)) == {"OPTIM_8BIT_NO_GAIN"}


def test_expandable_segments_are_not_advised_where_they_are_unsafe() -> None:
    job = Configuration(cuda_ipc=True, alloc_conf="expandable_segments:True")
    case = replace(fragmented(200 * MIB, 1100 * MIB), configuration=job)
    findings = {finding.rule: finding for finding in diagnose(case=case).findings}
    assert findings["EXPANDABLE_UNSAFE"].severity == "error"
    assert "expandable" not in (findings["FRAG_OOM"].advice[0].typed or "")


# the chain


def heavy() -> Evidence:
    """Activations are most of the peak, and optimizer states a quarter."""
    job = Job()
    for _ in range(3):
        job.step(10 * MIB, saved=5, state_bytes=14 * MIB)
    return job.case()


def test_savings_are_followed_one_after_another() -> None:
    diagnosis = diagnose(case=heavy())
    steps = {step.rule: step for step in diagnosis.chain.steps}
    assert diagnosis.chain.of == "reserved"
    assert diagnosis.chain.before_bytes - diagnosis.total_saving_bytes == diagnosis.chain.after_bytes
    assert diagnosis.total_saving_bytes == sum(step.saving_bytes for step in steps.values())
    assert set(steps) == {"OPTIM_STATE_HEAVY", "ACT_DOMINANT"}
    finding = next(finding for finding in diagnosis.findings if finding.rule == "OPTIM_STATE_HEAVY")
    assert finding.advice[0].saving_bytes == steps["OPTIM_STATE_HEAVY"].alone_bytes


def test_recomputation_exposes_the_optimizers_temporaries() -> None:
    job = Job(parameter_bytes=16 * MIB)
    for _ in range(3):
        job.step(8 * MIB, saved=5, spike_bytes=16 * MIB, state_bytes=MIB)
    case = job.case()
    assert case.peak_phase in ("forward", "backward")
    diagnosis = diagnose(case=case)
    steps = diagnosis.chain.steps
    assert [(step.rule, step.exposed) for step in steps] == [("ACT_DOMINANT", False), ("OPTIM_FOREACH", True)]
    assert diagnosis.total_saving_bytes > sum(
        step.alone_bytes for step in steps
    )  # alone, the second saves none
    assert "OPTIM_FOREACH" in {finding.rule for finding in diagnosis.findings}


def test_a_run_that_ended_without_memory_is_measured_by_what_it_needs() -> None:
    diagnosis = diagnose(case=fragmented(200 * MIB, 1100 * MIB))
    chain = diagnosis.chain
    assert chain.of == "needed"
    # 50 segments of 20 MiB are pinned, and 200 MiB are asked for; the best is 900 MiB live before.
    assert 1200 * MIB <= chain.before_bytes <= 1204 * MIB
    assert chain.after_bytes < 1000 * MIB


def test_a_warm_up_with_the_largest_batch_is_simulated() -> None:
    case = varying([4, 6, 5, 8, 11, 13, 17, 21])
    diagnosis = diagnose(case=case)
    (step,) = [step for step in diagnosis.chain.steps if step.rule == "SHAPE_CHURN"]
    assert step.saving_bytes > 0 and step.peak_bytes >= case.peak_bytes


def test_without_a_trace_savings_are_capped_by_what_there_is() -> None:
    dry_run = _dry_run(peak_by_category={"optimizer_state": 400 * MIB, "activation": 100 * MIB})
    diagnosis = diagnose(case=Evidence(dry_run=dry_run))
    (step,) = diagnosis.chain.steps
    assert step.rule == "OPTIM_STATE_HEAVY"
    assert step.saving_bytes == int(400 * MIB * (1 - 1.015 / 4)) == diagnosis.total_saving_bytes
    twice = Found(
        finding=Finding(rule="OPTIM_STATE_HEAVY", summary="", advice=[Advice(action="")]),
        edit=Edit(by_category={"optimizer_state": 350 * MIB}),
    )
    assert chain_of(Evidence(dry_run=dry_run), [twice, twice], RULES).total_saving_bytes == 400 * MIB


# edits


def test_an_edited_trace_is_what_a_job_would_have_done() -> None:
    builder = TraceBuilder(meta={"step_ends": [4]})
    first, second, third = builder.alloc(100), builder.alloc(20), builder.alloc(3)
    builder.free(second)
    builder.alloc(4000)
    builder.free(third)
    windows = {first: (), second: (Window(0, 1, 50), Window(3, 6, 20)), third: (Window(2, 3, 3),)}
    after = edited(builder.build(), Edit(windows=windows))
    assert [(event.action.name, event.size_bytes) for event in after] == [
        ("ALLOC", 50), ("FREE", 50), ("ALLOC", 3), ("FREE", 3), ("ALLOC", 20), ("ALLOC", 4000),
    ]  # fmt: skip
    assert Timeline.of(after).peak_bytes == 4020
    assert after.meta["step_ends"] == [5]


# files


def _dry_run(**known: object) -> DryRunResult:
    size = sum(known.get("peak_by_category", {"other": MIB}).values())  # type: ignore[attr-defined]
    plain: dict[str, object] = {
        "gpu": "a100-80gb", "torch": "2.14.1", "peak_requested_bytes": size, "peak_allocated_bytes": size,
        "peak_reserved_bytes": size, "context_bytes": 400 * MIB, "device_total_bytes": size + 400 * MIB,
        "nvml_total_bytes": 80 << 30, "runtime_total_bytes": 79 << 30, "event_count": 0, "wall_seconds": 1.0,
    }  # fmt: skip
    return DryRunResult(**{**plain, **known})  # type: ignore[arg-type]


def write(folder: Path, name: str, content: object) -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_files_of_all_kinds_make_one_case(tmp_path: Path) -> None:
    trace = sound_job().case(total_bytes=1 << 30).recording
    assert trace is not None
    trace.trace.save(tmp_path / "run.memfit-trace")
    arguments = {"per_device_train_batch_size": 4, "optim": "adamw_bnb_8bit", "gradient_checkpointing": True}
    llama = {"model_type": "llama", "vocab_size": 32_000, "use_cache": True, "num_hidden_layers": 12}
    fsdp = "distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  fsdp_auto_wrap_policy: NO_WRAP\n"
    rows = "0, 61, python, 4903 MiB\n0, 62, python, 725 MiB\n1, 62, python, 4893 MiB\n"
    counters = [{"allocated_bytes.all.current": 1, "num_alloc_retries": n} for n in (0, 3)]
    files = [
        tmp_path / "run.memfit-trace",
        write(tmp_path, "dry.json", _dry_run().to_json()),
        write(tmp_path, "stats.json", counters),
        write(tmp_path, "training_args.json", {**arguments, "max_steps": 900, "bf16": True}),
        write(tmp_path, "config.json", llama),
        write(tmp_path, "ds.json", {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 4}),
        write(tmp_path, "accelerate.yaml", fsdp),
        write(tmp_path, "job.yaml", "job:\n  sequence: 2048\n  cuda_ipc: true\n"),
        write(tmp_path, "env.json", {"environment": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}}),
        write(tmp_path, "apps.csv", f"gpu_index, pid, process_name, used_gpu_memory [MiB]\n{rows}"),
        write(tmp_path, "train.log", "step 3\nUserWarning: None of the inputs have requires_grad=True.\n"),
    ]
    case = read_evidence(files)
    job = case.configuration
    assert case.trace is not None and len(case.trace) and len(case.statistics) == 2
    assert (job.optimizer, job.total_steps, job.precision, job.batch) == ("adamw_bnb_8bit", 900, "bf16", 4)
    assert (job.vocabulary, job.layers, job.use_cache, job.sequence) == (32_000, 12, True, 2048)
    assert (job.strategy, job.zero_stage, job.world_size, job.fsdp_wrap) == ("fsdp", 2, 8, "none")
    assert job.cuda_ipc and job.asks_for_expandable and job.torch == "2.14.1"
    assert rules_of(case) >= {
        "STRAY_CONTEXTS", "CKPT_ERROR", "EXPANDABLE_UNSAFE", "ALLOC_RETRIES", "SHARDING_WASTE",
        "CKPT_INEFFECTIVE",
    }  # fmt: skip


def test_several_traces_are_ranks(tmp_path: Path) -> None:
    for rank, size in enumerate((60, 20, 20)):
        builder = TraceBuilder()
        builder.alloc(size * MIB)
        builder.build().save(tmp_path / f"rank{rank}.memfit-trace")
    diagnosis = diagnose(*sorted(tmp_path.glob("rank*")))
    assert [finding.rule for finding in diagnosis.findings] == ["RANK_IMBALANCE"]
    assert diagnosis.case.peak_bytes == 60 * MIB  # the highest is looked at


@pytest.mark.parametrize(
    "name, content, error",
    [
        ("a.json", {"what": 1}, InputError),
        ("a.yaml", "job:\n  parameter: 5\n", InputError),
        ("a.yaml", "!!python/object/apply:os.system ['echo']", InputError),
        ("a.json", "{broken", InputError),
        ("a.bin", "\x00\x01", InputError),
    ],
)
def test_files_of_no_known_kind_are_told(
    tmp_path: Path, name: str, content: object, error: type[Exception]
) -> None:
    with pytest.raises(error, match="a\\."):
        diagnose(write(tmp_path, name, content))


def test_nothing_to_look_at() -> None:
    with pytest.raises(UsageError, match="name a file"):
        diagnose()
    with pytest.raises(InputError, match="cannot read"):
        diagnose("/nowhere/at/all.pickle")


def test_this_process_can_be_looked_at() -> None:
    diagnosis = diagnose(live=True)
    assert diagnosis.case.names == ("this process",)
    assert diagnosis.case.recording is None  # no CUDA is started to look


def test_lines_of_code_come_from_python_files_only(tmp_path: Path) -> None:
    code = write(tmp_path, "train.py", "import torch\nckpt = torch.load(path)\n")
    secret = write(tmp_path, "secret.txt", "one\ntwo\n")
    assert source_line(f"{code}:2 main") == "ckpt = torch.load(path)"
    assert source_line(f"{secret}:2 main") == source_line("nowhere.py:1 f") == source_line("") == ""


def test_everything_is_plain_json(tmp_path: Path) -> None:
    value = json.loads(json.dumps(diagnose(case=heavy()).to_json()))
    assert value["schema_version"] == 1 and value["findings"][0]["advice"][0]["typed"]
    assert isinstance(value["total_saving_bytes"], int)
    value = json.loads(json.dumps(diagnose(case=configured(strategy="ddp", parameters=10**8)).to_json()))
    assert value["findings"][0]["rule"] == "SHARDING_WASTE"


def test_held_blocks_are_part_of_the_trace() -> None:
    case = heavy()
    assert (
        isinstance(case.trace, Trace)
        and case.bytes_at_peak(case.category_mask("parameter")) == LAYERS * 8 * MIB
    )


def test_the_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "diagnose_run.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert "LEAK_MONOTONIC at train.py:31 step" in shown and "all the advice saves 512.00 MiB" in shown
