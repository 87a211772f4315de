"""Every message that is known, in the order in which they are tried on a line."""

from __future__ import annotations

from memfit.formats import (
    messages_host,
    messages_libraries,
    messages_other,
    messages_serving,
    messages_tables,
    messages_torch,
    messages_xla,
)
from memfit.formats.messages import Signature

SIGNATURES: tuple[Signature, ...] = (
    *messages_torch.SIGNATURES,
    *messages_libraries.SIGNATURES,
    *messages_host.SIGNATURES,
    *messages_xla.SIGNATURES,
    *messages_serving.SIGNATURES,
    *messages_tables.SIGNATURES,
    *messages_other.SIGNATURES,
)
