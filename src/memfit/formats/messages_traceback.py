"""What a traceback tells of where memory ran out: the user's own line, and the phase of the step."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_FRAME = re.compile(r'File "([^"]{1,300})", line (\d{1,7})(?:, in (\S{1,80}))?')
_LIBRARY = ("site-packages", "dist-packages", "/lib/python", "\\lib\\", "<frozen", "<string>", "importlib")
_PHASES: Mapping[str, tuple[str, ...]] = {
    "loading a checkpoint": (
        "torch.load(",
        "load_state_dict(",
        "_load(",
        "persistent_load",
        "load_checkpoint",
    ),
    "saving": ("torch.save(", "state_dict()", "save_checkpoint", "save_pretrained"),
    "optimizer step": ("optimizer.step(", "_multi_tensor", "torch/optim/", "_foreach_", "_init_group"),
    "evaluation": ("validation", "evaluate(", "eval_step", "evaluation_loop", "prediction_step", "test_step"),
    "generation": (".generate(", "generation/utils", "past_key_values", "kv_cache", "key_value"),
    "loss": ("cross_entropy", "lm_head", "logits", "nll_loss", "log_softmax"),
    "attention": (
        "scaled_dot_product",
        "softmax(",
        "attention_scores",
        "attn_weights",
        "attn_bias",
        "baddbmm",
        "matmul(query",
        "einsum",
    ),
    "backward": (".backward(", "run_backward", "autograd/__init__", "_engine_run_backward"),
    "moving the model to the device": (
        ".to(device",
        ".cuda(",
        ".to('cuda",
        '.to("cuda',
        "module._apply(",
        "_apply(fn)",
        "from_pretrained(",
    ),
    "convolution": ("conv2d(", "conv3d(", "conv1d(", "conv_transpose"),
}
"""Phases by what stands in their tracebacks, the most telling first."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where an error was raised.

    Attributes:
        where: the innermost line of the user's own code, ``"train.py:88 in step"``; empty where unknown.
        phase: what was going on; empty where the traceback does not tell.
        windows: whether its paths are those of Windows.
    """

    where: str = ""
    phase: str = ""
    windows: bool = False


def read_place(lines: Sequence[str]) -> Place:
    """The place that the last traceback in these lines tells of."""
    begin = max(
        (place for place, line in enumerate(lines) if "Traceback (most recent call last)" in line), default=0
    )
    lines = lines[begin:]
    frames = [found for line in lines if (found := _FRAME.search(line)) is not None]
    own = [found for found in frames if not any(mark in found[1].replace("\\\\", "\\") for mark in _LIBRARY)]
    where = ""
    if own:
        name = re.split(r"[\\/]", own[-1][1])[-1]
        where = f"{name}:{own[-1][2]}" + (f" in {own[-1][3]}" if own[-1][3] else "")
    text = "\n".join(lines).lower()
    phase = next(
        (name for name, marks in _PHASES.items() if frames and any(mark in text for mark in marks)), ""
    )
    windows = any(re.match(r"[A-Za-z]:\\", found[1]) for found in frames)
    return Place(where=where, phase=phase, windows=windows)
