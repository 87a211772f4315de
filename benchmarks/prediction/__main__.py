"""Runs `prediction.command`.

Python puts this very folder first on its path, where ``sources`` would be the name of a module for every
import of this process. The folder above goes to the end of it instead.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE]
sys.path.append(str(HERE.parent))

from prediction.command import main  # noqa: E402  (found by the path above)

if __name__ == "__main__":
    sys.exit(main())
