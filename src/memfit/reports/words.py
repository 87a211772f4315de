"""A plan in words: what each technique does to which part of the model, one row each."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Settings = Mapping[str, Any]

EXACTNESS_WORDS: Mapping[str, str] = {
    "exact": "gradients, buffers and random numbers bitwise equal to plain training",
    "reordered": "the same mathematics in another floating-point order",
    "approximate": "an error that is stated and bounded",
    "changes training": "something else is trained, such as adapters in place of the weights",
}


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One row of the plan.

    Attributes:
        where: the part of the model, ``"transformer.h.0–7 (8 blocks)"`` or ``"loss"``.
        keeps: what stays in memory between forward and backward there, or how that part runs.
        recomputes: what is computed again during backward; empty where nothing is.
    """

    where: str
    keeps: str
    recomputes: str = ""


ORDINALS = "Numbers count the operators of that kind in the order in which the block runs them."


def mentions_ordinals(techniques: Sequence[Settings]) -> bool:
    """Whether the rows of this plan name operators by number, as in "linear 4"."""
    checkpointed = [s for s in techniques if s["technique"] == "gradient_checkpointing"]
    blocks = [settings.get("blocks") or {} for settings in checkpointed]
    return any(":" in name for saves in blocks for saved in saves.values() for name in saved)


def plan_rows(techniques: Sequence[Settings]) -> tuple[PlanRow, ...]:
    """The rows of a plan, technique by technique, in the order in which they are applied."""
    rows: list[PlanRow] = []
    for settings in techniques:
        describe = _DESCRIBE.get(settings["technique"], _unknown)
        rows.extend(describe(settings))
    return tuple(rows)


def count(number: int, noun: str, plural: str | None = None) -> str:
    """``"1 block"``, ``"12 blocks"``."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def block_ranges(names: Iterable[str]) -> str:
    """Blocks of a chain in short: ``h.0, h.1, h.2, h.5`` → ``"h.0–2, 5"``; other names are listed."""
    chains: dict[tuple[str, str], list[int]] = {}
    for name in names:
        match = re.fullmatch(r"(.*?)(\d+)(\D*)", name)
        prefix, number, suffix = match.groups() if match else (name, "-1", "")
        chains.setdefault((prefix, suffix), []).append(int(number))
    return ", ".join(_chain(prefix, suffix, sorted(numbers)) for (prefix, suffix), numbers in chains.items())


def _chain(prefix: str, suffix: str, numbers: list[int]) -> str:
    if numbers == [-1]:
        return prefix
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return (
        prefix + ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs) + suffix
    )


def saved_in_words(saved: Sequence[str]) -> str:
    """What a block keeps: ``("linear:0", "linear:3", "attention")`` → ``"linear 1 and 4, attention"``."""
    kinds: dict[str, list[int]] = {}
    for name in saved:
        kind, _, ordinal = name.partition(":")
        kinds.setdefault(kind, []).extend([int(ordinal) + 1] if ordinal.isdigit() else [])
    return ", ".join(
        f"{kind.replace('_', ' ')} {_and(sorted(places))}".strip() for kind, places in kinds.items()
    )


def _and(numbers: Sequence[int]) -> str:
    texts = [str(number) for number in numbers]
    return " and ".join([", ".join(texts[:-1]), texts[-1]]) if len(texts) > 1 else "".join(texts)


def _checkpointing(settings: Settings) -> list[PlanRow]:
    blocks: Mapping[str, Sequence[str]] | None = settings.get("blocks")
    if blocks is None:
        return [_every_kth(settings)]
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, saved in blocks.items():
        groups.setdefault(tuple(saved), []).append(name)
    return [_group(names, saved) for saved, names in groups.items()]


def _group(names: Sequence[str], saved: Sequence[str]) -> PlanRow:
    keeps = "its input" if not saved else f"its input, and the outputs of {saved_in_words(saved)}"
    return PlanRow(
        where=f"{block_ranges(names)} ({count(len(names), 'block')})",
        keeps=keeps,
        recomputes="everything else" if saved else "the whole block",
    )


_MOST_KINDS = 5


def _rematerialization(settings: Settings) -> list[PlanRow]:
    """One row: what is kept differs from block to block; the kinds of operators tell most of it."""
    blocks: Mapping[str, Sequence[str]] | None = settings.get("blocks")
    if blocks is None:
        return [
            PlanRow(where="every block", keeps="linear layers, attention, convolutions", recomputes=_REST)
        ]
    kinds = Counter(name.partition(":")[0].strip("_") for kept in blocks.values() for name in kept)
    shown = [f"{number} {kind.replace('_', ' ')}" for kind, number in kinds.most_common(_MOST_KINDS)]
    more = sum(kinds.values()) - sum(number for _, number in kinds.most_common(_MOST_KINDS))
    names = [name for name in blocks if name]
    where = f"{block_ranges(names)} ({count(len(names), 'block')})" if names else "the model"
    rest = f" and {more} other" if more else ""
    keeps = f"the results of {', '.join(shown)}{rest} operators" if shown else "nothing"
    return [PlanRow(where=where, keeps=keeps, recomputes=_REST)]


_REST = "each other result, when the backward pass asks for it"


def _every_kth(settings: Settings) -> PlanRow:
    every = settings.get("checkpoint_frequency") or 1
    saved = tuple(settings.get("save") or ())
    where = (
        "every block"
        if every == 1
        else f"every {every}th block"
        if every > 3
        else f"every {('', '', '2nd', '3rd')[every]} block"
    )
    return PlanRow(
        where=where,
        keeps="its input" if not saved else f"its input, and the outputs of {saved_in_words(saved)}",
        recomputes="everything else" if saved else "the whole block",
    )


def _chunked_loss(settings: Settings) -> list[PlanRow]:
    chunks = settings.get("chunks", 8)
    return [
        PlanRow(
            where="the loss",
            keeps=f"logits of one of {chunks} chunks of the tokens at a time",
            recomputes="the last linear layer, chunk by chunk" if settings.get("recompute", False) else "",
        )
    ]


def _micro_batching(settings: Settings) -> list[PlanRow]:
    parts = settings.get("micro_batches", 2)
    return [
        PlanRow(
            where="the batch",
            keeps=f"{count(parts, 'micro-batch', 'micro-batches')} one after another, gradients added up",
        )
    ]


_OPTIMIZERS = {
    "fused": "one fused kernel: no temporary copies of the parameters in step()",
    "foreach": "many tensors at a time: fast, with temporaries as large as the parameters",
    "for-loop": "one tensor at a time: the fewest temporaries, slower",
}


def _optimizer(settings: Settings) -> list[PlanRow]:
    implementation = str(settings.get("implementation", "fused"))
    return [PlanRow(where="the optimizer", keeps=_OPTIMIZERS.get(implementation, implementation))]


def _allocator(settings: Settings) -> list[PlanRow]:
    grows = settings.get("expandable_segments", True)
    keeps = "segments that grow page by page, so few holes" if grows else "segments of fixed sizes"
    return [PlanRow(where="PyTorch's allocator", keeps=keeps)]


def _where(settings: Settings, key: str = "blocks", whole: str = "every block") -> str:
    """The blocks or layers that the settings name; ``whole`` where they name none."""
    names = settings.get(key)
    return block_ranges(names) if names else whole


def _mixed_precision(settings: Settings) -> list[PlanRow]:
    precision = settings.get("precision", "auto")
    low = "16 bits (bf16 where the device has it)" if precision == "auto" else precision
    rows = [PlanRow(where="matrix products and convolutions", keeps=f"activations in {low}")]
    if settings.get("keep_fp32"):
        rows.append(PlanRow(where=", ".join(settings["keep_fp32"]), keeps="fp32, by name"))
    if settings.get("weights") == "bf16":
        how = settings.get("rounding", "split")
        rows.append(PlanRow(where="the weights", keeps=f"bf16 only; small updates survive by {how}"))
    return rows


_STATES = {
    "adamw8bit": "both moments in 8 bits with a scale for each group",
    "adamw4bit": "both moments in 4 bits with a scale for each group",
    "paged": "both moments in 8 bits, in memory that moves to the host when the GPU is full",
    "lion8bit": "Lion in place of it: one moment, in 8 bits",
    "adafactor": "Adafactor in place of it: rows and columns of the second moment only",
}


def _low_memory_optimizer(settings: Settings) -> list[PlanRow]:
    kind = str(settings.get("kind", "adamw8bit"))
    return [PlanRow(where="the optimizer", keeps=_STATES.get(kind, kind))]


def _optimizer_in_backward(settings: Settings) -> list[PlanRow]:
    return [
        PlanRow(where="the gradients", keeps="each only until its parameter is stepped, in the backward pass")
    ]


def _offloaded_state(settings: Settings) -> list[PlanRow]:
    return [PlanRow(where="the optimizer", keeps="its state in host memory, where it steps")]


def _lora(settings: Settings) -> list[PlanRow]:
    rank = settings.get("rank", 8)
    frozen = "frozen, in 4 bits (NF4)" if settings["technique"] == "qlora" else "frozen"
    rows = [
        PlanRow(
            where=_where(settings, "targets", "every linear layer but the output layer"),
            keeps=f"its weight, {frozen}; adapters of rank {rank} train",
        )
    ]
    if settings.get("train"):
        rows.append(PlanRow(where=", ".join(settings["train"]), keeps="training, as before"))
    return rows


def _compression(settings: Settings) -> list[PlanRow]:
    algorithm = str(settings.get("compression_algorithm", "auto"))
    how = "a codec chosen by measuring" if algorithm == "auto" else algorithm
    return [PlanRow(where=_where(settings), keeps=f"what it saves, packed by {how}", recomputes="unpacking")]


_PLACES = {"host": "in host memory", "disk": "on disk"}


def _activation_offload(settings: Settings) -> list[PlanRow]:
    place = _PLACES.get(str(settings.get("to", "host")), "elsewhere")
    return [PlanRow(where=_where(settings), keeps=f"what it saves, {place} until its backward pass")]


def _parameter_offload(settings: Settings) -> list[PlanRow]:
    place = _PLACES.get(str(settings.get("to", "host")), "elsewhere")
    return [PlanRow(where=_where(settings), keeps=f"its parameters, {place} until it runs")]


def _attention(settings: Settings) -> list[PlanRow]:
    backend = settings.get("backend", "flash")
    scores = "the scores of all pairs of tokens" if backend == "math" else "no scores"
    heads = settings.get("pad_heads_to")
    padded = f"; heads padded to a multiple of {heads}" if heads else ""
    return [PlanRow(where="attention", keeps=f"{scores}: the {backend} kernel{padded}")]


def _channels_last(settings: Settings) -> list[PlanRow]:
    return [PlanRow(where="convolutions", keeps="weights with their channels last in memory")]


def _vocabulary(settings: Settings) -> list[PlanRow]:
    multiple = settings.get("multiple", 64)
    keeps = f"rows of zeros up to a multiple of {multiple}, whose logits are cut off"
    return [PlanRow(where="the output layer", keeps=keeps)]


def _pruning(settings: Settings) -> list[PlanRow]:
    where = _where(settings, "layers", "every linear and convolution layer but the last")
    share = (
        "two of each four weights"
        if settings.get("pattern") == "2:4"
        else f"{settings.get('share', 0.5):.0%} of its weights"
    )
    return [PlanRow(where=where, keeps=f"zeros in place of {share}, the smallest")]


def _quantization(settings: Settings) -> list[PlanRow]:
    bits = "4 bits (NF4)" if settings.get("kind") == "nf4" else "8 bits"
    where = _where(settings, "layers", "every linear layer but the output layer")
    return [PlanRow(where=where, keeps=f"its weight in {bits}, frozen")]


def _compiled(settings: Settings) -> list[PlanRow]:
    backend = str(settings.get("backend", "inductor"))
    where = f"the compiler's graph ({backend})"
    if settings.get("peak") is not None:
        keeps = f"what holds live bytes within {float(settings['peak']):.0%} of those with everything kept"
    else:
        keeps = f"what PyTorch's partitioner keeps, memory budget {float(settings.get('budget', 1.0)):g}"
    return [PlanRow(where=where, keeps=keeps, recomputes="the operators whose results are not kept")]


def _unknown(settings: Settings) -> list[PlanRow]:
    rest = {key: value for key, value in settings.items() if key != "technique"}
    return [
        PlanRow(where=str(settings["technique"]).replace("_", " "), keeps=json.dumps(rest, sort_keys=True))
    ]


_DESCRIBE: Mapping[str, Callable[[Settings], list[PlanRow]]] = {
    "gradient_checkpointing": _checkpointing,
    "rematerialization": _rematerialization,
    "chunked_cross_entropy": _chunked_loss,
    "micro_batching": _micro_batching,
    "optimizer_implementation": _optimizer,
    "allocator_settings": _allocator,
    "mixed_precision": _mixed_precision,
    "low_memory_optimizer": _low_memory_optimizer,
    "optimizer_in_backward": _optimizer_in_backward,
    "offloaded_optimizer_state": _offloaded_state,
    "lora": _lora,
    "qlora": _lora,
    "memory_compression": _compression,
    "activation_offload": _activation_offload,
    "parameter_offload": _parameter_offload,
    "attention_backend": _attention,
    "channels_last": _channels_last,
    "vocabulary_padding": _vocabulary,
    "pruning": _pruning,
    "partial_quantization": _quantization,
    "compiled_partition": _compiled,
}
