"""What ``accelerate launch`` makes of its options and its configuration file, in the script's environment.

Accelerate's launcher turns both into variables, which its library reads in the script: the names and defaults
here are those of accelerate 1.x (``commands/launch.py``, ``utils/launch.py``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memfit.core.errors import InputError, UsageError

_FSDP_DEFAULTS: Mapping[str, str | None] = {
    "fsdp-version": "1",
    "fsdp-sharding-strategy": "FULL_SHARD",
    "fsdp-reshard-after-forward": "true",
    "fsdp-offload-params": "false",
    "fsdp-min-num-params": "100000000",
    "fsdp-auto-wrap-policy": None,
    "fsdp-transformer-layer-cls-to-wrap": None,
    "fsdp-backward-prefetch": None,
    "fsdp-state-dict-type": None,
    "fsdp-forward-prefetch": "false",
    "fsdp-use-orig-params": "true",
    "fsdp-cpu-ram-efficient-loading": "true",
    "fsdp-sync-module-states": "true",
    "fsdp-activation-checkpointing": "false",
    "fsdp-activation-checkpointing-offload": "false",
    "fsdp-ignored-modules": None,
}
_OTHER_NAMES = {"FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP": "FSDP_TRANSFORMER_CLS_TO_WRAP"}
_AS_WRITTEN = {
    "fsdp-sharding-strategy", "fsdp-auto-wrap-policy", "fsdp-transformer-layer-cls-to-wrap",
    "fsdp-backward-prefetch", "fsdp-state-dict-type", "fsdp-ignored-modules",
}  # fmt: skip
"""Options whose value keeps its case; the others are words like ``true``."""

_ENGINES = {"DEEPSPEED": "use-deepspeed", "MEGATRON_LM": "use-megatron-lm", "XLA": "tpu", "TPU": "tpu"}
_UNSUPPORTED = ("use-deepspeed", "use-megatron-lm", "use-parallelism-config", "tpu")


def with_configuration(options: Mapping[str, str]) -> dict[str, str]:
    """The options, and where they say nothing what the configuration file says: the one that is named, or
    accelerate's default file if there is one. Names have dashes.

    Raises:
        InputError: a file that cannot be read.
        UsageError: DeepSpeed, Megatron-LM, parallelism configurations and TPUs, which cannot be dry-run.
    """
    named = options.get("config-file")
    path = Path(named) if named else _default_file()
    told = {**(_read(path) if named or path.is_file() else {}), **options}
    for name in _UNSUPPORTED:
        if name in told:
            place = f" (in {path})" if name not in options else ""
            raise UsageError(f"accelerate launch --{name}{place} cannot be dry-run")
    return told


def environment_of(told: Mapping[str, str]) -> dict[str, str]:
    """The variables that accelerate's launcher sets for these options."""
    found = {"ACCELERATE_MIXED_PRECISION": told.get("mixed-precision", "no").lower()}
    if "gradient-accumulation-steps" in told:
        found["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = told["gradient-accumulation-steps"]
    if told.get("dynamo-backend", "no").lower() != "no":
        found["ACCELERATE_DYNAMO_BACKEND"] = told["dynamo-backend"].upper()
        found["ACCELERATE_DYNAMO_MODE"] = told.get("dynamo-mode", "default")
        for name in ("fullgraph", "dynamic", "regional-compilation"):
            variable = f"ACCELERATE_DYNAMO_USE_{name.replace('-', '_').upper()}"
            found[variable] = str(told.get(f"dynamo-use-{name}", "false").lower() in ("", "true"))
    return {**found, **(_fsdp(told) if uses_fsdp(told) else {})}


def uses_fsdp(told: Mapping[str, str]) -> bool:
    """Whether FSDP is asked for, by ``--use_fsdp`` or by the file's ``distributed_type``."""
    return "use-fsdp" in told


def _fsdp(told: Mapping[str, str]) -> dict[str, str]:
    found = {"ACCELERATE_USE_FSDP": "true"}
    for name, default in _FSDP_DEFAULTS.items():
        value = told.get(name, default)
        if value is not None:
            variable = name.replace("-", "_").upper()
            found[_OTHER_NAMES.get(variable, variable)] = value if name in _AS_WRITTEN else value.lower()
    return found


def _default_file() -> Path:
    cache = os.environ.get(
        "HF_HOME", os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    )
    return Path(cache).expanduser() / "accelerate" / "default_config.yaml"


def _read(path: Path) -> dict[str, str]:
    """The file's values by the options' names: nested ones (``fsdp_config``) as if they stood outside."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read accelerate's configuration {path}: {error}") from error
    except yaml.YAMLError as error:
        first = str(error).split("\n")[0]
        raise InputError(f"{path}: not YAML: {first}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: accelerate's configuration is a mapping, not {type(content).__name__}")
    found: dict[str, str] = {}
    for key, value in content.items():
        prefix = {"fsdp_config": "fsdp_", "dynamo_config": "dynamo_"}.get(str(key), "")
        inner = value if isinstance(value, dict) else {key: value}
        for name, part in inner.items():
            whole = str(name) if str(name).startswith(prefix) else f"{prefix}{name}"
            if part is not None and not isinstance(part, dict):
                found[whole.replace("_", "-")] = _word(part)
    kind = found.pop("distributed-type", "").upper()
    found |= {"use-fsdp": ""} if kind == "FSDP" else {_ENGINES[kind]: ""} if kind in _ENGINES else {}
    found.pop("module", None)
    if content.get("parallelism_config"):
        found["use-parallelism-config"] = ""
    return found


def _word(value: Any) -> str:
    """As the command line would have it."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
