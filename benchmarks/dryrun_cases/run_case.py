"""Runs one case of the coverage table: ``run_case.py 'transformers gpt2'``."""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import families
import libraries
import loops
import vision
from case import Case

CASES: dict[str, Case] = {**families.CASES, **vision.CASES, **loops.CASES, **libraries.CASES}

if __name__ == "__main__":
    CASES[sys.argv[1]].run()
