"""What the tests of dry-run scripts share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def preloaded() -> Iterator[object]:
    """A process with torch loaded, whose forks are dry runs."""
    from preloaded import Preloaded

    process = Preloaded()
    yield process
    process.close()
