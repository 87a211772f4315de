"""What an alert does: a line in the log, a command, a request to a webhook.

They run in a thread of their own, so that a slow one delays no sample; one that fails is counted and logged,
and stops nothing. Commands are lists of words and never go through a shell. Commands and addresses come from
the caller or the command line only: nothing that is received over the network can set them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from memfit.core.errors import UsageError
from memfit.monitor.alerts import Change

LOGGER = logging.getLogger("memfit.monitor")
_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_MOST_WAITING = 100


class Action(Protocol):
    """Something that is done when an alert begins or ends."""

    def run(self, change: Change) -> None:
        """Do it; any exception counts as a failure."""


@dataclass(frozen=True, kw_only=True)
class Log:
    """A line in the log ``memfit.monitor``, at the alert's severity."""

    def run(self, change: Change) -> None:
        """Log it."""
        level = _LEVELS[change.alert.rule.severity] if change.kind == "fired" else logging.INFO
        LOGGER.log(level, "alert %s %s: %s", change.alert.rule.name, change.kind, change.alert.text)


@dataclass(frozen=True, kw_only=True)
class Command:
    """A program of the user's; the alert is JSON on its standard input, and its name in ``MEMFIT_ALERT``.

    Args:
        words: the program and its arguments, as they are; no shell reads them.
        timeout_seconds: after so long it is ended.
    """

    words: Sequence[str]
    timeout_seconds: float = 10.0

    def __post_init__(self) -> None:
        if not self.words or isinstance(self.words, str):
            raise UsageError(f"an alert's command is a list of words, not {self.words!r}")

    def run(self, change: Change) -> None:
        """Run it, and fail as it does."""
        alert = change.alert
        more = {
            "MEMFIT_ALERT": alert.rule.name,
            "MEMFIT_ALERT_STATE": change.kind,
            "MEMFIT_ALERT_TEXT": alert.text,
        }
        subprocess.run(
            list(self.words),
            input=json.dumps(alert.to_json()).encode(),
            env={**os.environ, **more},
            timeout=self.timeout_seconds,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


@dataclass(frozen=True, kw_only=True)
class Webhook:
    """A POST of the alert as JSON; ``text`` in it suits Slack, Mattermost and Teams as it is.

    Args:
        url: http or https.
        timeout_seconds: after so long it has failed.
    """

    url: str
    timeout_seconds: float = 5.0

    def __post_init__(self) -> None:
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"webhook {self.url!r} is no http or https address")

    def run(self, change: Change) -> None:
        """Send it; an answer of 400 or more is a failure. Redirects are not followed."""
        content = json.dumps(
            {**change.alert.to_json(), "text": f"memfit: {change.kind}: {change.alert.text}"}
        )
        request = urllib.request.Request(
            self.url, data=content.encode(), headers={"Content-Type": "application/json"}, method="POST"
        )
        opener = urllib.request.build_opener(_NoRedirects)
        with opener.open(request, timeout=self.timeout_seconds) as answer:
            answer.read(1)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """An alert goes to the address that was given, and to no other."""

    def redirect_request(self, *_: object, **__: object) -> None:
        return None


class Dispatcher:
    """Runs actions, one change after another, in a thread that begins with the first."""

    def __init__(self, actions: Sequence[Action]) -> None:
        self._actions = tuple(actions)
        self._waiting: queue.Queue[Change | None] = queue.Queue(_MOST_WAITING)
        self._thread: threading.Thread | None = None
        self.failures = 0

    def tell(self, change: Change) -> None:
        """Put a change in the queue; if a hundred wait already, it is dropped and counted."""
        if not self._actions or not change.told:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="memfit-alerts", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(change)
        except queue.Full:
            self.failures += 1

    def close(self, timeout_seconds: float = 5.0) -> None:
        """Let what waits be done, for so long at most."""
        if self._thread is None:
            return
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=timeout_seconds)
            self._thread.join(timeout_seconds)
        self._thread = None

    def _work(self) -> None:
        while (change := self._waiting.get()) is not None:
            for action in self._actions:
                try:
                    action.run(change)
                except Exception as error:  # noqa: BLE001  # a user's program or server may fail in any way
                    self.failures += 1
                    LOGGER.warning(
                        "%s of alert %s failed: %s", type(action).__name__, change.alert.rule.name, error
                    )
