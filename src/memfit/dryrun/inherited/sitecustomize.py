"""Runs at the start of every Python that a guarded script starts: its writes go to the scratch folder too.

The folder of this file is in PYTHONPATH of the script's children. A ``sitecustomize`` of the user's own,
which this one stands in front of, is run afterwards.
"""

import importlib.machinery
import importlib.util
import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))


def _guard() -> None:
    sources = os.path.dirname(os.path.dirname(os.path.dirname(_FOLDER)))
    sys.path.insert(0, sources)  # the child may be another Python, without memfit
    try:
        from memfit.dryrun import writes
    finally:
        sys.path.remove(sources)
    exempt = os.environ.get(writes.EXEMPT_VARIABLE, "").split(os.pathsep)
    scratch = os.environ.get(writes.SCRATCH_VARIABLE)
    if scratch:
        writes.guard_writes(writes.WriteSettings(scratch=scratch, exempt=tuple(filter(None, exempt))))


def _run_the_users_own() -> None:
    others = [entry for entry in sys.path if os.path.abspath(entry or ".") != _FOLDER]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


_guard()
_run_the_users_own()
