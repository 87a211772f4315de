"""Configuration: what is read, from where, and what is said of every mistake."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from memfit.config import Settings, leaves, load_configuration
from memfit.config.kinds import slip
from memfit.core.errors import InputError, MemfitError, UsageError

SHIPPED = Path(__file__).parents[2] / "configs"
AS_PROMISED = """
memory:
  gpu_memory: {total_memory: "8GB", available_memory: "6GB", allocation_strategy: dynamic}
  memory_pool: {enabled: true, pool_size: "4GB", chunk_size: "64MB"}
  memory_profiling: {enabled: true, profiling_frequency: 100, save_profiles: true}
optimization:
  gradient_checkpointing: {enabled: true, checkpoint_frequency: 4, memory_savings: 0.5}
  mixed_precision: {enabled: true, precision: fp16, loss_scaling: true}
  memory_compression: {enabled: true, compression_ratio: 0.8, compression_algorithm: gzip}
distributed:
  num_gpus: 4
  memory_synchronization: {enabled: true, sync_frequency: 10}
  load_balancing: {enabled: true, strategy: round_robin}
  fault_tolerance: {enabled: true, checkpoint_frequency: 100}
"""


def load(folder: Path, text: str, **given):
    file = folder / "settings.yaml"
    file.write_text(text)
    return load_configuration(file, environment=given.pop("environment", {}), **given)


def mistakes(folder: Path, text: str) -> list[str]:
    with pytest.raises(InputError) as caught:
        load(folder, text)
    return [line.removeprefix(f"{folder}/settings.yaml:") for line in str(caught.value).splitlines()]


def test_the_promised_keys_load_as_they_stand(tmp_path):
    configuration = load(tmp_path, AS_PROMISED)
    settings = configuration.settings
    assert settings.memory.gpu_memory.total_memory == 8 * 10**9
    assert settings.memory.gpu_memory.available_memory == 6 * 10**9
    assert settings.memory.gpu_memory.allocation_strategy == "dynamic"
    assert (settings.memory.memory_pool.pool_size, settings.memory.memory_pool.chunk_size) == (
        4 * 10**9,
        64 * 10**6,
    )
    assert settings.memory.memory_profiling.save_profiles is True
    assert settings.optimization.gradient_checkpointing.memory_savings == 0.5
    assert settings.optimization.mixed_precision.loss_scaling == "dynamic"
    assert settings.optimization.memory_compression.compression_algorithm == "gzip"
    assert settings.distributed.num_gpus == 4
    assert settings.distributed.fault_tolerance.checkpoint_frequency == 100
    assert configuration.warnings == ()


def test_the_shipped_files_are_the_defaults_and_have_every_key():
    configuration = load_configuration(SHIPPED, environment={})
    assert configuration.settings == Settings()
    ours = {".".join(path) for path, _ in leaves() if path[0] != "planning"}
    assert set(configuration.given) == ours
    assert {value.origin.rpartition(":")[0] for value in configuration.given.values()} == {
        str(SHIPPED / f"{part}_config.yaml") for part in ("memory", "optimization", "distributed")
    }


def test_later_sources_win_and_are_named(tmp_path):
    configuration = load(
        tmp_path,
        AS_PROMISED,
        environment={
            "MEMFIT_MEMORY__GPU_MEMORY__TOTAL_MEMORY": "24GB",
            "MEMFIT_DISTRIBUTED__NUM_GPUS": "8",
            "MEMFIT_GPU_NAME": "not a setting",
        },
        flags=["distributed.num_gpus=2"],
    )
    assert configuration.settings.memory.gpu_memory.total_memory == 24 * 10**9
    assert configuration.settings.distributed.num_gpus == 2
    assert "MEMFIT_MEMORY__GPU_MEMORY__TOTAL_MEMORY" in configuration.origin("memory.gpu_memory.total_memory")
    assert configuration.origin("distributed.num_gpus") == "--set distributed.num_gpus=2"
    assert configuration.origin("memory.gpu_memory.available_memory").endswith("settings.yaml:3")
    assert configuration.origin("planning.gpu") == "default"


# ruff: noqa: E501
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("memory_budjet: 80GB\nbatchsize: 8\n", ["1: memory_budjet: .*memory_budget", "2: batchsize: .*batch_size"]),
        ("memory:\n  gpu_memory:\n    total: 8GB\n", ["3: memory.gpu_memory.total: .*total_memory"]),
        ("memory: {gpu_memory: {total_memory: 8 bananas}}\n", ["1: .*total_memory: '8 bananas' is refused.*valid is a size"]),
        ("distributed: {num_gpus: 0}\n", ["1: distributed.num_gpus: '0' is refused.*1 or more"]),
        ("distributed: {num_gpus: 010}\n", ["1: distributed.num_gpus: '010' is refused.*write 10"]),
        ("distributed: {num_gpus: 12:30}\n", ["1: .*base 60"]),
        ("distributed: {num_gpus: 0,1}\n", []),
        ("distributed:\n  load_balancing: {strategy: round-robin}\n", ["2: .*did you mean round_robin"]),
        ("optimization:\n  memory_compression:\n    compression_ratio: 80%\n", ["3: .*write it as a share of 1, like 0.8"]),
        ("optimization: {mixed_precision: {enabled: maybe}}\n", ["1: .*enabled: 'maybe' is refused.*true or false"]),
        ("optimization: {mixed_precision: {enabled: }}\n", ["1: .*enabled: has no value"]),
        ("optimization: {mixed_precision: {precision: [fp16]}}\n", ["1: .*precision: is one of .*not a list"]),
        ("memory: 8GB\n", ["1: memory: has keys .*not '8GB'"]),
        ("memory:\n\tgpu_memory:\n", ["2: not YAML: a tab"]),
        ("distributed: {num_gpus: 2}\ndistributed: {num_gpus: 4}\n", ["2: distributed: given twice, in line 1"]),
        ("a: 1\n---\nb: 2\n", ["2: not YAML"]),
        ("- 1\n", ["1: keys like memory: are expected, not a list"]),
        ("planning:\n  gpu: !!python/object/apply:os.mkdir [run]\n", ["2: .*not a list"]),
    ],
)  # fmt: skip
def test_mistakes_name_line_key_value_and_what_is_valid(tmp_path, text, said):
    found = mistakes(tmp_path, text)
    for pattern in said:
        assert any(re.match(pattern, line) for line in found), (pattern, found)


def test_every_mistake_of_a_file_is_told_at_once(tmp_path):
    text = "distributed:\n  num_gpus: none\n  sync: 1\nmemory:\n  memory_pool: {enabled: 2}\n"
    assert [line.split(":")[0] for line in mistakes(tmp_path, text)] == ["2", "3", "5"]


def test_numbers_are_read_as_people_mean_them(tmp_path):
    text = (
        "optimization:\n  mixed_precision: {enabled: on, precision: FP16, loss_scaling: 1e4}\n"
        "  memory_compression: {compression_ratio: .8}\nmemory:\n  gpu_memory: {total_memory: 8_589_934_592}\n"
    )
    settings = load(tmp_path, text).settings
    assert settings.optimization.mixed_precision.enabled is True
    assert settings.optimization.mixed_precision.precision == "fp16"
    assert settings.optimization.mixed_precision.loss_scaling == 1e4
    assert settings.optimization.memory_compression.compression_ratio == 0.8
    assert settings.memory.gpu_memory.total_memory == 2**33


@pytest.mark.parametrize("text", ["010", "08", "12:30:45", "0,1", "1e-5", "5e-4", "1e9"])
def test_slips_are_what_yaml_reads_otherwise_than_written(text):
    read = yaml.safe_load(f"a: {text}")["a"]
    assert slip(text) is not None
    assert str(read) != text or isinstance(read, str)
    assert slip("1.0e-5") is None and slip("8GB") is None and slip("10") is None


def test_the_reported_slips_are_answered_in_lines(tmp_path):
    folder = Path(__file__).parents[1] / "data" / "cases" / "39-yaml-settings-with-slips"
    for name in ("slips", "unknown_keys", "tabs", "tag", "aliases"):
        with pytest.raises(InputError) as caught:
            load_configuration(folder / f"{name}.yaml", environment={})
        lines = str(caught.value).splitlines()
        assert all(re.match(rf".*{name}\.yaml:\d+: ", line) for line in lines)
        if name == "slips":
            told = {
                key: next(line for line in lines if f": {key}: " in line)
                for key in ("lr", "weight_decay", "big")
            }
            assert [told[key].split("write ")[1].rstrip(")") for key in told] == ["1.0e-5", "5.0e-4", "1.0e9"]
            assert any(
                "offload: given twice, in line 12 as 'off' and here as 'true'" in line for line in lines
            )
    assert not Path("case39_code_was_run").exists()


def test_an_endless_alias_and_a_huge_file_end_at_once(tmp_path):
    assert mistakes(tmp_path, "memory: &m\n  gpu_memory: *m\n") == ["2: memory.gpu_memory.gpu_memory: no such key; "
        "there are total_memory, available_memory, allocation_strategy"]  # fmt: skip
    (tmp_path / "settings.yaml").write_bytes(b"a: " + b"x" * (2 << 20))
    with pytest.raises(InputError, match="more than 1 MiB"):
        load_configuration(tmp_path / "settings.yaml")


def test_one_key_in_two_files_of_a_folder_is_told(tmp_path):
    (tmp_path / "a.yaml").write_text("distributed: {num_gpus: 2}\n")
    (tmp_path / "b.yml").write_text("distributed:\n  num_gpus: 4\n")
    with pytest.raises(InputError, match=r"b\.yml:2: distributed\.num_gpus: given in .*a\.yaml:1 as well"):
        load_configuration(tmp_path, environment={})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("optimization: {gradient_checkpointing: {enabled: true}}", "neither checkpoint_frequency nor memory_savings"),
        ("optimization: {mixed_precision: {enabled: true, precision: bf16, loss_scaling: dynamic}}", "bf16 .* needs no"),
        ("memory: {gpu_memory: {total_memory: 4GB, available_memory: 6GB}}", "more than total_memory"),
        ("memory: {gpu_memory: {total_memory: 2GB}, memory_pool: {enabled: true, pool_size: 4GB}}", "pool_size: is more"),
    ],
)  # fmt: skip
def test_what_is_doubtful_is_a_warning_with_its_place(tmp_path, text, said):
    (warning,) = load(tmp_path, text).warnings
    assert re.search(said, warning) and "settings.yaml:1" in warning


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"flags": ["distributed.gpus=2"]}, "did you mean distributed.num_gpus"),
        ({"flags": ["distributed.num_gpus"]}, "write it as"),
        ({"flags": ["distributed.num_gpus=two"]}, "'two' is refused"),
        (
            {"environment": {"MEMFIT_DISTRIBUTED__NUM_GPU": "2"}},
            "MEMFIT_DISTRIBUTED__NUM_GPU: there is no setting",
        ),
    ],
)
def test_flags_and_variables_that_name_nothing(given, said):
    with pytest.raises(UsageError, match=said):
        load_configuration(**{"environment": {}, **given})


def test_a_missing_file_or_an_empty_folder(tmp_path):
    for place in (tmp_path / "no.yaml", tmp_path):
        with pytest.raises(MemfitError, match=str(place)):
            load_configuration(place)


def test_the_documentation_has_every_key_with_its_default():
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z_.]+)` \| (.*?) \|", page, re.MULTILINE))
    assert list(rows) == [".".join(path) for path, _ in leaves()]
    for path, key in leaves():
        shown, default = rows[".".join(path)], key.default
        if (
            isinstance(default, int | float | str)
            and not isinstance(default, bool)
            and default not in (4 * 10**9, 64 * 10**6)
        ):
            assert f"`{default}`" in shown
