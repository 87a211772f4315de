"""All random generators of a process: read and set."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from memfit.distributed.state_json import decode, encode


def random_state(generators: Mapping[str, torch.Generator] | None = None) -> dict[str, Any]:
    """The state of Python's, numpy's and PyTorch's generators (CPU and this process's GPUs), and of
    ``generators``, as JSON."""
    kind, keys, *rest = numpy.random.get_state(legacy=True)
    own = {name: generator.get_state() for name, generator in (generators or {}).items()}
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "python": encode(random.getstate()),
        "numpy": encode(
            (kind, torch.from_numpy(numpy.asarray(keys, dtype=numpy.uint32).view(numpy.int32)), *rest)
        ),
        "torch": encode(torch.get_rng_state()),
        "cuda": encode(cuda),
        "own": encode(own),
    }


def set_random_state(
    state: Mapping[str, Any], generators: Mapping[str, torch.Generator] | None = None
) -> None:
    """Set what `random_state` read. GPUs that are no more, and generators that it does not know, are left."""
    random.setstate(decode(state["python"]))
    kind, keys, *rest = decode(state["numpy"])
    numpy.random.set_state((kind, keys.numpy().view(numpy.uint32), *rest))
    torch.set_rng_state(decode(state["torch"]))
    cuda = decode(state["cuda"])
    if cuda and torch.cuda.is_available():
        for device, one in enumerate(cuda[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(one, device)
    own = decode(state["own"])
    for name, generator in (generators or {}).items():
        if name in own:
            generator.set_state(own[name])


def seed_for_new_rank(seed: int) -> None:
    """Seed all generators of a rank that no checkpoint knows: there are more ranks than before."""
    random.seed(seed)
    numpy.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)
