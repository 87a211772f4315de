"""The version of memfit, for every floor."""

from __future__ import annotations

VERSION = "0.1.0"
