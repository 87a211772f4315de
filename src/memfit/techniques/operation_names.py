"""Names of a forward pass's operators that mean the same on every device: kind and number within a block.

``"convolution:2"`` is the third convolution of its block. Operators of a kind that have other implementations
on other devices (batch norm by cuDNN) share the kind's name; all others go by their own (``"relu_:0"``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from memfit.techniques.operation_kinds import HEAVY, kind_of

_KIND_OF = kind_of(
    {
        **HEAVY,
        "batch_norm": (
            "native_batch_norm",
            "cudnn_batch_norm",
            "miopen_batch_norm",
            "_batch_norm_with_update",
            "_native_batch_norm_legit",
        ),
    }
)


class OperationNames:
    """Names the operators of one forward pass, in the order in which they run."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    def next(self, block: str, base: str) -> str:
        """The name of the operator that runs next in ``block``; ``base`` is its own name, without namespace
        and overload."""
        kind = _KIND_OF.get(base, base)
        number = self._counts[block, kind]
        self._counts[block, kind] = number + 1
        return f"{kind}:{number}"


def enclosing_block(module: str, blocks: Mapping[str, object]) -> str | None:
    """The innermost of ``blocks`` that ``module`` is or lies in; ``""`` is the whole model."""
    name = module
    while name not in blocks:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return name
