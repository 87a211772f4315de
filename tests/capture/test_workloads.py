"""Texts to workloads: each key does what it says, each slip gets one line, references cross processes."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from models import mlp

from memfit.capture.spec import literal, parse_spec
from memfit.capture.step import build_step, takes_size
from memfit.capture.workloads import from_reference, load_workload, workload_reference
from memfit.core.errors import InputError, UsageError, WorkloadFailed
from memfit.dryrun.worker import Worker

FAMILIES = [
    "hf:gpt2",
    "hf:bert",
    "hf:llama,num_hidden_layers=3,num_key_value_heads=8",
    "hf:t5",
    "hf:vit",
    "hf:resnet",
    "hf:distilbert",
    "hf:opt,num_hidden_layers=2",
    "tv:resnet50",
]


@pytest.mark.parametrize("spec", FAMILIES)
def test_small_has_the_names_of_full_and_runs(spec):
    workload = load_workload(spec)
    assert takes_size(workload)
    full = build_step(workload, device="meta")
    small = build_step(workload, device="cpu", size="small")
    assert [name for name, _ in small.model.named_modules()] == [
        name for name, _ in full.model.named_modules()
    ]
    assert [name for name, _ in small.model.named_parameters()] == [
        n for n, _ in full.model.named_parameters()
    ]
    small.run()
    assert small.steps_done == 1


def test_gpt2_is_gpt2():
    step = build_step(load_workload("hf:gpt2,batch=8,seq=1024"), device="meta")
    assert sum(p.numel() for p in step.model.parameters()) == 124_439_808
    assert step.batch["input_ids"].shape == (8, 1024)
    assert step.batch["labels"] is step.batch["input_ids"]
    assert step.model.config.use_cache is False
    assert type(step.optimizer) is torch.optim.AdamW
    assert step.workload.spec == "hf:gpt2,batch=8,seq=1024"


@pytest.mark.parametrize(
    ("spec", "cls"),
    [
        ("hf:gpt2", "GPT2LMHeadModel"),
        ("hf:bert", "BertForMaskedLM"),
        ("hf:t5", "T5ForConditionalGeneration"),
        ("hf:vit", "ViTForImageClassification"),
        ("hf:deit", "DeiTForImageClassification"),
        ("hf:bert,task=sequence-classification", "BertForSequenceClassification"),
        ("hf:bert,task=causal-lm", "BertLMHeadModel"),
    ],
)
def test_the_task_follows_the_model_type(spec, cls):
    assert type(build_step(load_workload(spec), device="meta").model).__name__ == cls


def test_configuration_settings_reach_the_model_under_either_name():
    step = build_step(
        load_workload("hf:gpt2,hidden_size=128,n_layer=3,n_head=2,resid_pdrop=0.0"), device="meta"
    )
    config = step.model.config
    assert (config.n_embd, config.n_layer, config.n_head, config.resid_pdrop) == (128, 3, 2, 0.0)
    assert len(step.model.transformer.h) == 3


def test_attention_implementation():
    step = build_step(load_workload("hf:gpt2,attn_implementation=eager,n_layer=1"), device="meta")
    assert step.model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("word", "weights", "precision"),
    [
        ("fp32", torch.float32, "fp32"),
        ("bf16", torch.bfloat16, "fp32"),
        ("bf16-autocast", torch.float32, "bf16-autocast"),
        ("fp16-autocast", torch.float32, "fp16-autocast"),
    ],
)
@pytest.mark.parametrize("model", ["hf:gpt2,n_layer=1", "hf:vit,num_hidden_layers=1", "tv:resnet18"])
def test_dtypes(model, word, weights, precision):
    step = build_step(load_workload(f"{model},dtype={word}"), device="meta")
    assert {p.dtype for p in step.model.parameters()} == {weights}
    assert step.workload.precision == precision


@pytest.mark.parametrize(
    ("word", "cls", "expected"),
    [
        ("adamw", "AdamW", {"fused": None, "foreach": None}),
        ("adamw-fused", "AdamW", {"fused": True}),
        ("adamw-foreach", "AdamW", {"foreach": True}),
        ("adam", "Adam", {}),
        ("sgd", "SGD", {"momentum": 0}),
        ("sgd-momentum", "SGD", {"momentum": 0.9}),
        ("adafactor", "Adafactor", {}),
    ],
)
def test_optimizers(word, cls, expected):
    step = build_step(load_workload(f"tv:resnet18,optimizer={word}"), device="cpu", size="small")
    assert type(step.optimizer).__name__ == cls
    assert {key: step.optimizer.defaults[key] for key in expected} == expected


def test_loss_weights_count_labels():
    labels = torch.tensor([[1, 2, -100, 4], [-100, 6, 7, 8]])
    assert (
        load_workload("hf:gpt2").loss_weight({"labels": labels}) == 5
    )  # the first label of a row predicts nothing
    assert load_workload("hf:bert").loss_weight({"labels": labels}) == 6
    assert load_workload("tv:resnet18").loss_weight is None


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("hf:gpt3", r"'gpt3' is no model type.*did you mean.*gpt2"),
        ("hf:gpt2,hiden_size=3", r"'hiden_size' is no setting of gpt2; did you mean hidden_size"),
        ("hf:gpt2,bach=3", r"'bach' is no setting of gpt2; did you mean batch"),
        ("hf:gpt2,batch=0", "batch=0"),
        ("hf:gpt2,batch=2.5", "batch=2.5"),
        ("hf:gpt2,batch", "'batch' in workload .* is not key=value"),
        ("hf:gpt2,batch=1,batch=2", "given twice"),
        ("hf:", "names no model"),
        ("hf:gpt2,seq=4096", r"seq=4096 is more than the 1024 positions.*max_position_embeddings=4096"),
        ("hf:gpt2,dtype=fp8", "dtype 'fp8'.*fp32"),
        ("hf:gpt2,optimizer=adamm", "optimizer 'adamm'.*adam"),
        ("hf:gpt2,task=captioning", "task 'captioning'"),
        ("hf:gpt2,task=image-classification", "AutoModelForImageClassification for model type 'gpt2'"),
        ("hf:clap", "none of the tasks"),
        ("tv:resnet51", "'resnet51'; did you mean.*resnet50"),
        ("tv:resnet50,widht_per_group=3", "'widht_per_group'.*width_per_group"),
        ("tv:resnet50,size=big", "size=big"),
    ],
)
def test_slips_in_a_text(spec, text):
    with pytest.raises(UsageError, match=text):
        load_workload(spec)


def test_longer_sequences_with_more_positions():
    step = build_step(
        load_workload("hf:gpt2,batch=1,seq=2048,max_position_embeddings=2048,n_layer=1"), device="meta"
    )
    assert step.batch["input_ids"].shape == (1, 2048)


def test_a_local_folder(tmp_path):
    from transformers import GPT2Config

    GPT2Config(n_embd=32, n_head=2, n_layer=2, vocab_size=99).save_pretrained(tmp_path)
    step = build_step(load_workload(f"hf:{tmp_path},batch=1,seq=8,n_layer=1"), device="meta")
    assert step.model.config.vocab_size == 99 and step.model.config.n_layer == 1


FILE = """
import torch
from memfit.core.workload import Workload
import neighbour

def make():
    return Workload(
        name="toy", model=lambda: torch.nn.Linear(4, 2), batch=lambda: torch.ones(3, 4),
        loss=lambda model, batch: model(batch).sum() * neighbour.FACTOR,
    )

def raises():
    return 1 / 0

def other():
    return 3

def leaves():
    raise SystemExit(2)

ready = make()
_private = make
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "neighbour.py").write_text("FACTOR = 2.0\n")
    path = tmp_path / "train.py"
    path.write_text(FILE)
    yield path
    with contextlib.suppress(ValueError):  # not there if the test never loaded it
        sys.path.remove(str(tmp_path))
    sys.modules.pop("neighbour", None)


def test_a_function_of_a_file(file):
    workload = load_workload(f"{file}:make")
    assert (workload.name, workload.spec) == ("toy", f"{file}:make")
    build_step(workload, device="cpu").run()
    assert load_workload(f"{file}:ready").name == "toy"


def test_no_such_function_lists_those_there_are(file):
    with pytest.raises(UsageError, match=r"no function 'mak'; it defines make, raises, other, leaves"):
        load_workload(f"{file}:mak")
    with pytest.raises(UsageError, match=r"which function of .*train.py\?.* it defines make"):
        load_workload(str(file))


def test_a_function_that_fails(file):
    line = FILE.splitlines().index("    return 1 / 0") + 1
    with pytest.raises(
        WorkloadFailed, match=rf"ZeroDivisionError: division by zero \(.*train.py:{line} in raises\)"
    ):
        load_workload(f"{file}:raises")
    with pytest.raises(UsageError, match="must return a memfit.Workload, not int"):
        load_workload(f"{file}:other")
    with pytest.raises(WorkloadFailed, match="SystemExit: 2"):
        load_workload(f"{file}:leaves")


def test_files_that_are_none(tmp_path):
    with pytest.raises(InputError, match=r"no such file: .*missing.py"):
        load_workload(f"{tmp_path}/missing.py:make")
    broken = tmp_path / "broken.py"
    broken.write_text("x = 1\nif x\n")
    with pytest.raises(WorkloadFailed, match=r"SyntaxError: .*broken.py:2"):
        load_workload(f"{broken}:make")
    text = tmp_path / "notes.txt"
    text.write_text("no code")
    with pytest.raises(InputError, match="not a Python file"):
        load_workload(f"{text}:make")
    with contextlib.suppress(ValueError):  # not there if the test never loaded it
        sys.path.remove(str(tmp_path))


@pytest.fixture(scope="module")
def other_process():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        patch.chdir("/")
        with Worker(None) as worker:
            yield lambda reference: worker.call("targets:run_small", reference=reference)


def test_references_cross_processes(other_process, file, tmp_path, monkeypatch):
    by_text = workload_reference(load_workload("tv:resnet18,batch=2"))
    assert by_text["spec"] == "tv:resnet18,batch=2"
    assert other_process(by_text)[1] == "tv:resnet18,batch=2"
    monkeypatch.chdir(tmp_path)
    assert other_process(workload_reference(load_workload("train.py:make"))) == ["toy", "train.py:make"]


def test_a_workload_made_in_python_is_pickled(other_process):
    reference = workload_reference(mlp())
    assert set(reference) == {"pickle", "path"}
    assert other_process(reference) == ["mlp", None]


def test_a_changed_workload_is_not_sent_as_its_text():
    loaded = load_workload("tv:resnet18")
    changed = dataclasses.replace(loaded, batch=lambda size="full": loaded.batch("small"))
    reference = workload_reference(changed)
    assert "pickle" in reference
    assert len(from_reference(reference).batch()[0]) == 2


def test_what_cannot_be_pickled_is_said():
    import threading

    lock = threading.Lock()
    with pytest.raises(UsageError, match="cannot be sent to the dry run"):
        workload_reference(mlp(loss_weight=lambda batch: float(lock.locked())))


def test_the_grammar():
    spec = parse_spec("hf:gpt2, batch=8 ,lr=1e-3")
    assert (spec.kind, spec.name, spec.settings) == ("hf", "gpt2", {"batch": "8", "lr": "1e-3"})
    assert [literal(t) for t in ("3", "0.5", "true", "None", "gelu", "1e-3")] == [
        3,
        0.5,
        True,
        None,
        "gelu",
        1e-3,
    ]
