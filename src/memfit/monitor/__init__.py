"""Live monitoring: samples of devices, allocators and the host; history; alerts; export to Prometheus.

PyTorch is never imported here, only looked at where the process has loaded it. `memfit.watch` is the one line
for a training script; the commands are `memfit monitor`, `memfit export` and `memfit dashboard`.
"""

from __future__ import annotations

from memfit.monitor.actions import Command, Log, Webhook
from memfit.monitor.rules import RULES, AlertRule
from memfit.monitor.watching import Watcher, watch

__all__ = ["RULES", "AlertRule", "Command", "Log", "Watcher", "Webhook", "watch"]
