"""`memfit` and `python -m memfit`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit with its code."""
    from memfit.cli import main as run

    sys.exit(run())


if __name__ == "__main__":
    main()
