"""State of a training run as JSON and tensors, and back: no pickle, so that reading one runs nothing.

`split_state` takes the tensors out of nested dicts, lists and tuples and leaves a skeleton that is JSON;
`join_state` puts tensors back. Small tensors of things that have no shards (a generator's state) can stay in
the JSON as text: `encode` and `decode`.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import torch

from memfit.core.errors import UsageError

_PLAIN = (str, int, float, bool, type(None))


def split_state(state: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """The skeleton of nested state, and its tensors by path (``"optimizer/state/weight/exp_avg"``).

    Raises:
        UsageError: state of a type that is neither (says where).
    """
    tensors: dict[str, torch.Tensor] = {}
    return _encoded(state, "", tensors), tensors


def join_state(skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The state of a skeleton and its tensors."""
    return _decoded(skeleton, tensors)


def encode(state: Any) -> Any:
    """State with tensors in the text: for what is small."""
    return _encoded(state, "", None)


def decode(text: Any) -> Any:
    """What `encode` was given; tensors on the CPU."""
    return _decoded(text, {})


def _encoded(value: Any, path: str, tensors: dict[str, torch.Tensor] | None) -> Any:  # noqa: PLR0911
    if isinstance(value, torch.Tensor):
        if tensors is None:
            dtype = str(value.dtype).removeprefix("torch.")
            data = _text(_bytes_of(value))
            return {"!": "tensor", "dtype": dtype, "shape": list(value.shape), "data": data}
        tensors[path.lstrip("/")] = value
        return {"!": "at", "path": path.lstrip("/")}
    if type(value) in _PLAIN:
        return value
    if isinstance(value, bytes | bytearray):
        return {"!": "bytes", "data": _text(bytes(value))}
    if isinstance(value, Mapping):
        pairs = [[_key(key, path), _encoded(one, f"{path}/{key}", tensors)] for key, one in value.items()]
        return {"!": "dict", "items": pairs}
    if isinstance(value, list | tuple):
        items = [_encoded(one, f"{path}/{number}", tensors) for number, one in enumerate(value)]
        return items if isinstance(value, list) else {"!": "tuple", "items": items}
    number = getattr(value, "item", None)  # numpy's scalars
    if callable(number) and type(number()) in _PLAIN:
        return number()
    raise UsageError(
        f"state at {path or '/'} is a {type(value).__name__}, which a checkpoint does not take: numbers, "
        "text, bytes, tensors, and lists, tuples and dicts of them"
    )


def _key(key: Any, path: str) -> Any:
    if type(key) not in (str, int):
        raise UsageError(
            f"state at {path or '/'} has the key {key!r}: a checkpoint takes texts and whole numbers"
        )
    return key


def _decoded(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:  # noqa: PLR0911
    if isinstance(value, list):
        return [_decoded(one, tensors) for one in value]
    if not isinstance(value, dict):
        return value
    kind = value["!"]
    if kind == "at":
        return tensors[value["path"]]
    if kind == "dict":
        return {key: _decoded(one, tensors) for key, one in value["items"]}
    if kind == "tuple":
        return tuple(_decoded(one, tensors) for one in value["items"])
    data = base64.b64decode(value["data"])
    if kind == "bytes":
        return data
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return raw.view(getattr(torch, value["dtype"])).reshape(value["shape"])


def _bytes_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
