"""Configuration: YAML files, environment and flags into one tree of settings, with the place of each mistake.

`load_configuration` reads; `memfit.configure` puts the settings into effect on a model.
"""

from __future__ import annotations

from memfit.config.loading import Configuration, Value, load_configuration
from memfit.config.tree import Settings, leaves

__all__ = ["Configuration", "Settings", "Value", "leaves", "load_configuration"]
