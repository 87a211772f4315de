"""Tensor parallel for models as they are: which matrices of each block are cut by columns, and which by rows.

A pair of layers is cut together: the first by its outputs (columns), the second by its inputs (rows), so that
what lies between stays on its rank and one sum per pair is all that is communicated (Shoeybi et al. 2019).
The pairs are those that a transformers model names itself (``tp_plan``), or layers with the usual names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from memfit.core.errors import UsageError
from memfit.techniques.blocks import find_block_chains

Cut = Literal["columns", "gathered columns", "rows"]
"""``gathered columns``: what comes out is put together again, as of an output layer."""

_STYLES: Mapping[str, Cut] = {
    "colwise": "columns",
    "colwise_rep": "gathered columns",
    "colwise_gather_output": "gathered columns",
    "rowwise": "rows",
}
"""What transformers calls them. Others (of experts, of embeddings) are left out: their layers stay whole."""


@dataclass(frozen=True)
class Pair:
    """Names of layers in one module: those cut by columns, and the one after them that is cut by rows."""

    columns: tuple[str, ...]
    rows: str


PAIRS = (
    Pair(("q_proj", "k_proj", "v_proj"), "o_proj"),
    Pair(("q_proj", "k_proj", "v_proj"), "out_proj"),
    Pair(("q_proj", "k_proj", "v_proj"), "dense"),
    Pair(("wq", "wk", "wv"), "wo"),
    Pair(("to_q", "to_k", "to_v"), "to_out.0"),
    Pair(("q_lin", "k_lin", "v_lin"), "out_lin"),
    Pair(("self.query", "self.key", "self.value"), "output.dense"),
    Pair(("attention.query", "attention.key", "attention.value"), "output.dense"),
    Pair(("q", "k", "v"), "o"),
    Pair(("gate_proj", "up_proj"), "down_proj"),
    Pair(("w1", "w3"), "w2"),
    Pair(("wi_0", "wi_1"), "wo"),
    Pair(("wi",), "wo"),
    Pair(("fc1",), "fc2"),
    Pair(("c_fc",), "c_proj"),
    Pair(("lin1",), "lin2"),
    Pair(("linear1",), "linear2"),
    Pair(("intermediate.dense",), "output.dense"),
    Pair(("dense_h_to_4h",), "dense_4h_to_h"),
)


def find_cuts(model: nn.Module, degree: int) -> dict[str, Cut]:
    """The layers of ``model`` that are cut over ``degree`` ranks, by name.

    Raises:
        UsageError: none can be, and why.
    """
    cuts = _told_by_model(model) or _by_usual_names(model)
    if not cuts:
        raise UsageError(f"tensor parallel: {_why_none(model)}")
    for name, cut in cuts.items():
        layer: Any = model.get_submodule(name)
        size = int(layer.in_features if cut == "rows" else layer.out_features)
        if size % degree:
            raise UsageError(
                f"tensor parallel: {name} has {size} {cut}, which {degree} ranks cannot share evenly"
            )
    heads = _uneven_heads(model, degree)
    if heads:
        raise UsageError(f"tensor parallel: {heads}, which {degree} ranks cannot share evenly")
    return cuts


def parallelize(model: nn.Module, mesh: Any) -> dict[str, Cut]:
    """Cut the layers of `find_cuts` over a mesh of one dimension, in place; what was cut.

    Raises:
        UsageError: as `find_cuts`.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    cuts = find_cuts(model, mesh.size())
    styles = {
        "columns": ColwiseParallel(),
        "gathered columns": ColwiseParallel(output_layouts=Replicate()),
        "rows": RowwiseParallel(),
    }
    for name, cut in cuts.items():
        parallelize_module(model.get_submodule(name), mesh, styles[cut])
    return cuts


def _told_by_model(model: nn.Module) -> dict[str, Cut]:
    """By the patterns of a transformers model's own plan: ``layers.*.mlp.up_proj``."""
    plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {}
    rules = [
        (re.compile(re.escape(pattern).replace(r"\*", r"\d+") + "$"), _STYLES[style])
        for pattern, style in plan.items()
        if style in _STYLES
    ]
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    shared = {weight for weight, count in uses.items() if count > 1}  # an output layer's with the embedding
    found = {}
    for name, module in model.named_modules():
        cut = next((cut for rule, cut in rules if rule.search(name)), None)
        if cut is not None and isinstance(module, nn.Linear) and id(module.weight) not in shared:
            found[name] = cut
    return found


def _by_usual_names(model: nn.Module) -> dict[str, Cut]:
    found: dict[str, Cut] = {}
    for chain in find_block_chains(model):
        for block in chain.names:
            for path, module in model.get_submodule(block).named_modules():
                prefix = f"{block}.{path}." if path else f"{block}."
                for pair in PAIRS:
                    cuts = _cuts_of(module, pair, prefix)
                    if not cuts.keys() & found.keys():
                        found |= cuts
    return found


def _cuts_of(module: nn.Module, pair: Pair, prefix: str) -> dict[str, Cut]:
    """The pair's cuts, if the module has all of its layers and they fit together."""
    layers = {name: _linear(module, name) for name in (*pair.columns, pair.rows)}
    last = layers[pair.rows]
    if any(layer is None for layer in layers.values()) or last is None:
        return {}
    widths = {
        layer.out_features for name, layer in layers.items() if layer is not None and name in pair.columns
    }
    if max(widths) != last.in_features:
        return {}
    return {f"{prefix}{name}": "rows" if name == pair.rows else "columns" for name in layers}


def _linear(module: nn.Module, path: str) -> nn.Linear | None:
    for part in path.split("."):
        inner = module._modules.get(part)
        if inner is None:
            return None
        module = inner
    return module if type(module) is nn.Linear else None


def _uneven_heads(model: nn.Module, degree: int) -> str | None:
    config = getattr(model, "config", None)
    for name in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(config, name, None)
        if isinstance(count, int) and count % degree:
            return f"{name} is {count}"
    return None


def _why_none(model: nn.Module) -> str:
    chains = find_block_chains(model)
    if not chains:
        return f"{type(model).__name__} has no repeated blocks"
    block = model.get_submodule(chains[0].names[0])
    kinds = sorted(
        {type(m).__name__ for m in block.modules() if not m._modules and any(True for _ in m.parameters())}
    )
    return (
        f"no plan for the blocks of {type(model).__name__} ({chains[0].class_name}, of {', '.join(kinds)}): "
        "they have no linear layers in pairs with names that are known"
    )
