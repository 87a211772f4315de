"""Profiling a running job: what its memory is used for, step by step, on the CPU or on CUDA."""

from __future__ import annotations
