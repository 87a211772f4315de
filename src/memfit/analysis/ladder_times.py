"""Which techniques the time model has no term for: their effect on a step's time is not predicted.

The model is a roofline over the operators that PyTorch's dispatcher sees (`memfit.capture.costs`). What
copies over the bus, runs on the host, calls kernels past the dispatcher or wins by layout and fusion is not
in it.
"""

from __future__ import annotations

from collections.abc import Mapping

from memfit.planning.figures import Settings

_BUS = "copies over the bus, and how far they hide behind computation, are not in the time model"
_PAST = "its kernels are called past PyTorch's dispatcher, so the time model does not see them"
_NO_TERM: Mapping[str, str] = {
    "offload": _BUS,
    "prefetch": _BUS,
    "memory_compression": "packing and unpacking run in codecs that the time model does not see",
    "low_memory_optimizer": _PAST,
    "qlora": _PAST,
    "partial_quantization": _PAST,
    "optimizer_in_backward": "many small steps between the kernels of the backward pass are not in the model",
    "channels_last": "the time model knows shapes and types, not layouts",
    "vocabulary_padding": "the time model knows sizes, not which of them suit tensor cores",
    "compile": "fused kernels and what compiling costs are not in the time model",
}
"""Words of techniques' names, and why their time is not predicted."""


def no_time_term(settings: Settings) -> str | None:
    """Why the time of a step with this technique is not predicted; None where it is."""
    name = str(settings.get("technique"))
    return next((reason for word, reason in _NO_TERM.items() if word in name), None)
