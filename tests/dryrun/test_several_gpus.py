"""Several GPUs in one process: each has its own account, and PyTorch's own numbers agree with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from preloaded import Preloaded

pytestmark = pytest.mark.dryrun


def run(preloaded: Preloaded, tmp_path: Path, text: str, **settings: object):  # type: ignore[no-untyped-def]
    script = tmp_path / "script.py"
    script.write_text(text)
    outcome = preloaded.run(script, folder=tmp_path, **settings)
    assert outcome.result.exit_code == 0, outcome.stderr
    return outcome
