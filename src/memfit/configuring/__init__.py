"""Puts a configuration into effect: `memfit.configure` in a script, ``memfit run`` around one."""

from __future__ import annotations

from memfit.configuring.configured import Configured, configure

__all__ = ["Configured", "configure"]
