"""What gradient checkpointing of every layer would leave: the trace with recomputed layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from memfit.analysis.blocks import Blocks, Mask
from memfit.analysis.edits import Edit, Window
from memfit.analysis.evidence import Evidence
from memfit.analysis.layers import chain_of, layer_of


class _Pass(NamedTuple):
    """One layer's part of one step."""

    members: list[int]
    ends: int
    backward: int
    through: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Layers:
    """The activations of repeated layers.

    Attributes:
        mask: blocks that layers of the chain save in forward passes.
        at_peak: bytes of them at the peak, by layer.
        edit: the trace with each layer computed again in the backward pass.
        kept_bytes: what each layer keeps at the peak by that edit: its output.
    """

    mask: Mask
    at_peak: Mapping[str, int]
    edit: Edit
    kept_bytes: int


def layers_of(case: Evidence, *, least_layers: int = 2) -> Layers | None:
    """The chain of layers with the most activation bytes at the peak; ``None`` where there is none."""
    blocks = case.blocks
    saved = case.category_mask("activation") & blocks.has("phase", ("forward", "recompute"))
    chains: dict[str, dict[str, int]] = {}
    for index in np.flatnonzero(saved & case.live_at_peak).tolist():
        module = blocks.text("module", index)
        layers = chains.setdefault(chain_of(module), {})
        layers[layer_of(module)] = layers.get(layer_of(module), 0) + int(blocks.size[index])
    chains.pop("?", None)
    deep = {name: layers for name, layers in chains.items() if len(layers) >= least_layers}
    if not deep:
        return None
    name = max(deep, key=lambda chain: sum(deep[chain].values()))
    mask = saved & _in_chain(blocks, name)
    windows, kept = _recomputed(case, mask)
    return Layers(mask=mask, at_peak=deep[name], edit=Edit(windows=windows), kept_bytes=kept)


def _in_chain(blocks: Blocks, chain: str) -> Mask:
    strings = blocks.trace.strings
    codes = [code for code, text in enumerate(strings) if text and chain_of(text) == chain]
    mask: Mask = np.isin(blocks.codes("module"), codes)
    return mask


def _recomputed(case: Evidence, mask: Mask) -> tuple[dict[int, tuple[Window, ...]], int]:
    """Windows of the saved blocks: all but a layer's last live until its forward pass is through, and again
    from where its backward pass begins."""
    blocks = case.blocks
    windows: dict[int, tuple[Window, ...]] = {}
    kept = 0
    for layer in _passes(case, mask):
        last = layer.members[-1]  # the layer's output, which is the next one's input
        if case.live_at_peak[last]:
            kept += int(blocks.size[last])
        for index in layer.members[:-1]:
            born, freed = int(blocks.born[index]), int(blocks.freed[index])
            size, number = int(blocks.size[index]), int(blocks.ids[index])
            if freed > layer.backward > layer.ends:
                again = Window(layer.backward, min(freed, layer.through), size)
                windows[number] = (Window(born, max(layer.ends, born + 1), size), again)
    return windows, kept


def _passes(case: Evidence, mask: Mask) -> Sequence[_Pass]:
    """The layers' saved blocks, forward pass by forward pass."""
    blocks = case.blocks
    backwards = np.array([start for phase, start, _ in case.phase_runs if phase == "backward"])
    groups: dict[tuple[str, int], list[int]] = {}
    for index in np.flatnonzero(mask).tolist():
        turn = int(np.searchsorted(backwards, blocks.born[index]))
        groups.setdefault((layer_of(blocks.text("module", index)), turn), []).append(index)
    passes = []
    for (layer, turn), members in groups.items():
        if turn >= len(backwards):
            continue
        begins = _backward_of(case, layer, int(backwards[turn]))
        ends = int(blocks.born[members[-1]]) + 1
        passes.append(_Pass(members, ends, begins, _through(case, layer, begins)))
    return passes


def _through(case: Evidence, layer: str, begins: int) -> int:
    """The first event after ``begins`` at which the backward pass works in another layer."""
    others = [
        starts[place]
        for name, starts in _backward_starts(case).items()
        if name != layer and (place := int(np.searchsorted(starts, begins + 1))) < len(starts)
    ]
    return min(others, default=len(case.blocks.trace))


def _backward_of(case: Evidence, layer: str, begins: int) -> int:
    """The first event after ``begins`` at which the backward pass works in a layer."""
    starts = _backward_starts(case).get(layer, [])
    place = int(np.searchsorted(starts, begins))
    return starts[place] if place < len(starts) else begins


def _backward_starts(case: Evidence) -> dict[str, list[int]]:
    """By layer, the births of its blocks in backward passes; kept with the case's blocks."""
    blocks = case.blocks
    cached: dict[str, list[int]] | None = blocks.__dict__.get("_backward_starts")
    if cached is None:
        cached = {}
        for index in np.flatnonzero(blocks.has("phase", ("backward", "recompute"))).tolist():
            module = blocks.text("module", index)
            if module:
                cached.setdefault(layer_of(module), []).append(int(blocks.born[index]))
        blocks.__dict__["_backward_starts"] = cached
    return cached
