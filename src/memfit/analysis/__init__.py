"""Findings: what happened to a job's memory, on what evidence, what to change, and what that saves."""

from __future__ import annotations
