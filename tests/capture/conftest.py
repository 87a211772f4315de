"""Fixtures of the capture tests."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.fixture
def python_without_torch():
    """Runs code in a new Python; returns ``"torch"`` if that loaded torch, else ``""``."""

    def run(code):
        script = f"{code}\nimport sys; print('torch' if 'torch' in sys.modules else '', end='')"
        return subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        ).stdout

    return run
