#!/usr/bin/env python3
"""Profile the memory of a training script, and say what the profile shows.

    python scripts/profile_memory.py --output profile -- train.py --any args

`memfit profile`, then `memfit analyze` on what it saved, as text and as one HTML page.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from memfit.cli import main as memfit


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("memfit-profile"), help="folder of the profile")
    parser.add_argument("--every", type=int, default=10, help="every how many steps one is noted in detail")
    parser.add_argument("script", nargs="+", metavar="SCRIPT", help="after --: the script and its arguments")
    given = parser.parse_args(words)
    code = memfit(
        ["profile", "--every", str(given.every), "--output", str(given.output), "--", *given.script]
    )
    if code not in (0, 1):  # 1: the script failed, and what it did until then was saved
        return code
    return memfit(["analyze", str(given.output), "--report", str(given.output / "analysis.html")]) or code


if __name__ == "__main__":
    sys.exit(main())
