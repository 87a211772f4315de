"""From a text to a `Workload`, and from a workload to a reference that another process of ours can follow."""

from __future__ import annotations

import base64
import dataclasses
import functools
import importlib.util
import inspect
import os
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from memfit.core.errors import InputError, MemfitError, ToolFailure, UsageError
from memfit.core.workload import Workload
from memfit.dryrun.places import workload_failed

# Workloads exactly as `load_workload` made them: only these may be sent as their text.
_LOADED: weakref.WeakValueDictionary[int, Workload] = weakref.WeakValueDictionary()


def load_workload(spec: str) -> Workload:
    """The workload that a text names.

    Args:
        spec: ``file.py:function`` (a function that returns a `Workload`), ``hf:gpt2,batch=8,seq=1024`` (see
            `memfit.capture.hf`) or ``tv:resnet50,batch=32`` (see `memfit.capture.tv`).

    Raises:
        InputError: no such file.
        UsageError: no such function, key, model or value; or the function returns something else.
        WorkloadFailed: the file or the function raised.
    """
    kind, colon, _ = spec.partition(":")
    if kind == "hf" and colon:
        from memfit.capture.hf import load_hub_workload

        workload = load_hub_workload(spec)
    elif kind == "tv" and colon:
        from memfit.capture.tv import load_vision_workload

        workload = load_vision_workload(spec)
    else:
        workload = _load_from_file(spec)
    _LOADED[id(workload)] = workload
    return workload


def workload_reference(workload: Workload) -> dict[str, Any]:
    """A JSON-able reference for `from_reference` in another process: the text, or else the pickled workload.

    Raises UsageError when a workload built in Python holds something that cannot be pickled.
    """
    if workload.spec is not None and _LOADED.get(id(workload)) is workload:
        return {"spec": workload.spec, "folder": os.getcwd()}
    import cloudpickle

    try:
        data = cloudpickle.dumps(workload)
    except Exception as problem:  # whatever the user's objects raise
        raise UsageError(
            f"workload {workload.name!r} cannot be sent to the dry run: {type(problem).__name__}: {problem}; "
            "let its factories build what they need, rather than hold it"
        ) from problem
    return {
        "pickle": base64.b64encode(data).decode("ascii"),
        "path": [os.path.abspath(entry) for entry in sys.path],
    }


def from_reference(reference: Mapping[str, Any]) -> Workload:
    """The workload behind a reference of `workload_reference`, which must come from a process of our own.

    With ``samples`` in it, the batch is repeated or cut to that many samples.
    """
    workload = _followed(reference)
    samples = reference.get("samples")
    return workload if samples is None else _with_samples(workload, int(samples))


def _with_samples(workload: Workload, samples: int) -> Workload:
    """The workload with a batch of ``samples``: its own samples over and over, or the first of them."""

    @functools.wraps(workload.batch)
    def batch(*args: Any, **settings: Any) -> Any:
        import torch
        from torch.utils._pytree import tree_map

        def resized(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or leaf.shape[0] == 0:
                return leaf
            times = -(-samples // leaf.shape[0])
            return leaf.repeat(times, *[1] * (leaf.dim() - 1))[:samples].clone()

        return tree_map(resized, workload.batch(*args, **settings))

    return dataclasses.replace(workload, batch=batch)


def _followed(reference: Mapping[str, Any]) -> Workload:
    if "spec" in reference:
        spec = str(reference["spec"])
        if spec.startswith(("hf:", "tv:")):
            return load_workload(spec)
        return dataclasses.replace(load_workload(os.path.join(reference["folder"], spec)), spec=spec)
    import cloudpickle

    sys.path.extend(entry for entry in reference["path"] if entry not in sys.path)
    try:
        workload = cloudpickle.loads(base64.b64decode(reference["pickle"]))
    except Exception as problem:  # whatever the user's modules raise on import
        raise workload_failed(problem, "sending the workload to the dry run") from problem
    if not isinstance(workload, Workload):
        raise ToolFailure(f"a workload reference held a {type(workload).__name__}")
    return workload


def _load_from_file(spec: str) -> Workload:
    file, colon, name = spec.rpartition(":")
    if not colon or not file or os.sep in name:
        file, name = spec, ""
    path = Path(file)
    if not path.is_file():
        raise InputError(f"no such file: {file} (a workload is file.py:function, hf:MODEL or tv:MODEL)")
    module = _import_file(path)
    maker = getattr(module, name, None) if name else None
    if isinstance(maker, Workload):
        return dataclasses.replace(maker, spec=spec)
    if not callable(maker):
        raise _no_function(file, name, module)
    with _blamed(f"{path.name}:{name}()"):
        workload = maker()
    if not isinstance(workload, Workload):
        raise UsageError(f"{spec} must return a memfit.Workload, not {type(workload).__name__}")
    return dataclasses.replace(workload, spec=spec)


def _no_function(file: str, name: str, module: ModuleType) -> UsageError:
    own = [
        key
        for key, value in vars(module).items()
        if not key.startswith("_") and inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    problem = (
        f"{file} has no function {name!r}" if name else f"which function of {file}? write {file}:function"
    )
    return UsageError(f"{problem}; it defines {', '.join(own) or 'none'}")


def _import_file(path: Path) -> ModuleType:
    """The file as a fresh module, its folder importable, as if it were run from there."""
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = f"memfit_workload_{path.stem}"
    specification = importlib.util.spec_from_file_location(name, path.resolve())
    if specification is None or specification.loader is None:
        raise InputError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    with _blamed(f"importing {path.name}"):
        specification.loader.exec_module(module)
    return module


@contextmanager
def _blamed(doing: str) -> Iterator[None]:
    """What the user's code raises leaves as WorkloadFailed with its file and line; ``sys.exit`` too."""
    try:
        yield
    except (MemfitError, KeyboardInterrupt):
        raise
    except (Exception, SystemExit) as problem:
        raise workload_failed(problem, doing) from problem
