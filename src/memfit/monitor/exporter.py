"""The Prometheus endpoint: ``/metrics`` from the last reading, ``/healthz``; loopback unless told otherwise.

A thread polls at most once a second. A scrape only hands out bytes that are ready: it touches no driver, no
CUDA and no file.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from memfit.core.errors import CannotRunHere
from memfit.monitor.engine import Monitor, Status
from memfit.monitor.exposition import StepTotals, render

LOGGER = logging.getLogger("memfit.monitor")
SHORTEST_INTERVAL_SECONDS = 1.0
_OPENMETRICS = "application/openmetrics-text"
_LOOPBACK_NAMES = ("localhost", "ip6-localhost")


class Exporter:
    """Polls a monitor and serves what it knew last.

    Args:
        monitor: what is exported.
        bind: the address to listen on.
        port: 0 for any that is free.
        interval_seconds: between readings; not less than `SHORTEST_INTERVAL_SECONDS`.
        process_labels: see `render`.

    Raises:
        CannotRunHere: the address cannot be listened on, or prometheus-client is not installed.
    """

    def __init__(
        self,
        monitor: Monitor,
        *,
        bind: str = "127.0.0.1",
        port: int = 9464,
        interval_seconds: float = SHORTEST_INTERVAL_SECONDS,
        process_labels: bool = False,
    ) -> None:
        self._monitor = monitor
        self._interval = max(SHORTEST_INTERVAL_SECONDS, interval_seconds)
        self._process_labels = process_labels
        self._steps: dict[str, StepTotals] = {}
        self._answers: dict[bool, tuple[bytes, str]] = {}
        self._read_at = 0.0
        self._stop = threading.Event()
        self.poll()
        self._server = _listen(bind, port, self)
        self.url = f"http://{_in_url(bind)}:{self._server.server_port}"
        self.only_loopback = is_loopback(bind)
        self._threads = [
            threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True),
            threading.Thread(target=self._work, daemon=True),
        ]

    def start(self) -> Exporter:
        """Begin to poll and to serve, each in a thread."""
        for thread in self._threads:
            thread.start()
        return self

    def close(self) -> None:
        """Stop both, and close the monitor."""
        self._stop.set()
        if self._threads[0].is_alive():
            self._server.shutdown()
        self._server.server_close()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout=5)
        self._monitor.close()

    def poll(self) -> Status:
        """Read all sources and make both answers ready."""
        status = self._monitor.poll()
        for step in status.sample.steps:
            self._steps.setdefault(step.key, StepTotals()).add(step)
        for openmetrics in (True, False):
            self._answers[openmetrics] = render(
                status,
                f"{_OPENMETRICS}; version=1.0.0" if openmetrics else "",
                steps=self._steps,
                process_labels=self._process_labels,
            )
        self._read_at = time.monotonic()
        return status

    def answer(self, accept: str) -> tuple[bytes, str]:
        """What a scrape gets."""
        return self._answers[_OPENMETRICS in accept]

    @property
    def healthy(self) -> bool:
        """Whether readings are no older than they should be."""
        return time.monotonic() - self._read_at < 3 * self._interval + 5

    def _work(self) -> None:
        while not self._stop.wait(self._interval):
            try:
                self.poll()
            except Exception:
                LOGGER.exception("a reading for the exporter failed")


def is_loopback(bind: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(bind).is_loopback
    except ValueError:
        return bind.lower() in _LOOPBACK_NAMES


def host_allowed(header: str, *, only_loopback: bool, more: tuple[str, ...] = ()) -> bool:
    """Whether a request's ``Host`` is a name of this server, so that no foreign page can speak through a
    browser to it under a name of its own (DNS rebinding).

    An address is always one: only names can be made to point elsewhere.
    """
    name = header.rsplit(":", 1)[0] if not header.endswith("]") and ":" in header else header
    name = name.strip("[]").lower()
    if name in _LOOPBACK_NAMES or name in (text.lower() for text in more):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return not only_loopback and name == socket.gethostname().lower()
    return address.is_loopback if only_loopback else True


def _in_url(bind: str) -> str:
    return f"[{bind}]" if ":" in bind else bind


def _listen(bind: str, port: int, exporter: Exporter) -> ThreadingHTTPServer:
    class Server(ThreadingHTTPServer):
        daemon_threads = True
        address_family = socket.AF_INET6 if ":" in bind else socket.AF_INET

    class Handler(_Handler):
        served = exporter

    try:
        return Server((bind, port), Handler)
    except (OSError, OverflowError) as error:
        raise CannotRunHere(
            f"cannot listen on {bind} port {port}: {error}; choose another --bind or --port"
        ) from error


class _Handler(BaseHTTPRequestHandler):
    served: Exporter
    server_version = "memfit"
    sys_version = ""
    timeout = 10

    def do_GET(self) -> None:
        """The two pages, and a line that names them."""
        if self.served.only_loopback and not host_allowed(self.headers.get("Host", ""), only_loopback=True):
            self._send(421, b"this is not the server that the Host header names\n")
        elif self.path.split("?")[0] == "/metrics":
            content, content_type = self.served.answer(self.headers.get("Accept", ""))
            self._send(200, content, {"Content-Type": content_type})
        elif self.path == "/healthz":
            healthy = self.served.healthy
            self._send(200 if healthy else 503, b"ok\n" if healthy else b"the last reading is too old\n")
        elif self.path == "/":
            self._send(200, b"memfit export: /metrics, /healthz\n")
        else:
            self._send(404, b"there are /metrics and /healthz\n")

    def _send(self, code: int, content: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(code)
        sent = {"Content-Type": "text/plain; charset=utf-8", "X-Content-Type-Options": "nosniff"}
        for name, value in {**sent, **(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not logged one by one."""
        LOGGER.debug(format, *args)
