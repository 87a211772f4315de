"""What the commands that watch have in common: rules and actions of alerts from options, and the loop."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memfit.monitor.actions import Action
    from memfit.monitor.engine import Monitor
    from memfit.monitor.opening import Opened


def check_interval(seconds: float, *, shortest: float = 0.1) -> float:
    """The value of ``--interval``; raises UsageError where it is too short to be meant."""
    from memfit.core.errors import UsageError

    if not shortest <= seconds <= 86400:
        raise UsageError(f"--interval {seconds:g}: give seconds, from {shortest:g} to 86400")
    return seconds


def make_monitor(
    opened: Opened,
    *,
    rules: Path | None,
    command: str | None,
    webhook: str | None,
    keep: bool,
    log: bool = False,
) -> Monitor:
    """A monitor of what was opened.

    Args:
        opened: the sources.
        rules: a file of alert rules; the shipped ones unless given.
        command: a program that alerts run, in one text; it is split into words, and no shell reads it.
        webhook: an address that alerts are sent to.
        keep: whether devices and the host are kept on disk.
        log: whether alerts go to the log, too.
    """
    from memfit.monitor.actions import Command, Log, Webhook
    from memfit.monitor.engine import Monitor
    from memfit.monitor.identity import runs_folder
    from memfit.monitor.rules import RULES, read_rules

    actions: list[Action] = [Log()] if log else []
    if command is not None:
        actions.append(Command(words=_words(command)))
    if webhook is not None:
        actions.append(Webhook(url=webhook))
    return Monitor(
        opened.sources,
        rules=RULES if rules is None else read_rules(rules),
        actions=actions,
        history=runs_folder().parent / "devices" if keep and opened.live else None,
    )


def _words(command: str) -> list[str]:
    from memfit.core.errors import UsageError

    try:
        return shlex.split(command)
    except ValueError as error:
        raise UsageError(f"--on-alert {command!r}: {error}") from error


def repeat(act: Callable[[], bool], *, every_seconds: float, stop: threading.Event | None = None) -> None:
    """Call ``act`` at once and then at fixed times, until it gives False, ``stop`` is set, or Ctrl-C."""
    stop = stop or threading.Event()
    due = time.monotonic()
    while act():
        due = max(due + every_seconds, time.monotonic())
        if stop.wait(max(0.0, due - time.monotonic())):
            return
