"""The server of the page: FastAPI, with a stream of server-sent events for what changes."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from importlib.resources import files
from typing import Any

from memfit.core.errors import CannotRunHere, MemfitError
from memfit.dashboard.api import QUESTIONS
from memfit.dashboard.feeds import Feed
from memfit.dashboard.guard import Guard
from memfit.monitor.exporter import is_loopback

LOGGER = logging.getLogger("memfit.dashboard")
SHORTEST_INTERVAL_SECONDS = 0.05
FINDINGS_SECONDS = 30.0
_LOOK_SECONDS = 0.05
_KEEP_ALIVE_SECONDS = 15.0
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml",
          ".txt": "text/plain"}  # fmt: skip


def make_app(feed: Feed, stop: threading.Event) -> Any:
    """The application, without its guard; ``stop`` ends its streams.

    Raises:
        CannotRunHere: FastAPI is not installed.
    """
    try:
        from fastapi import FastAPI
        from starlette.requests import Request
        from starlette.responses import JSONResponse, Response, StreamingResponse
        from starlette.routing import BaseRoute, Route
    except ImportError as error:
        raise CannotRunHere("the dashboard needs FastAPI and uvicorn: pip install 'memfit[web]'") from error

    pages = _static_files()

    def api(request: Request) -> Response:
        question = request.path_params["question"]
        ask = QUESTIONS.get(question)
        if ask is None:
            return JSONResponse({"error": f"there is no {question[:40]!r}"}, status_code=404)
        try:
            return Response(_json(ask(feed, request.query_params)), media_type="application/json")
        except MemfitError as error:
            return JSONResponse({"error": str(error)}, status_code=400)

    async def stream(_: Request) -> Response:
        return StreamingResponse(_events(feed, stop), media_type="text/event-stream")

    async def page(request: Request) -> Response:
        found = pages.get(request.path_params["path"] or "index.html")
        if found is None:
            return Response("not found", status_code=404, media_type="text/plain")
        return Response(found[0], media_type=found[1])

    routes: list[BaseRoute] = [
        Route("/api/stream", stream),
        Route("/api/{question}", api),
        Route("/{path:path}", page),
    ]
    return FastAPI(routes=routes, docs_url=None, redoc_url=None, openapi_url=None)


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


async def _events(feed: Feed, stop: threading.Event) -> AsyncIterator[bytes]:
    """The state whenever it has changed; a comment every 15 s, so that a lost connection is noticed."""
    sent, quiet = 0, 0.0
    while not stop.is_set():
        if feed.version != sent:
            sent, quiet = feed.version, 0.0
            yield b"event: state\ndata: " + _json(feed.state) + b"\n\n"
        elif quiet >= _KEEP_ALIVE_SECONDS:
            quiet = 0.0
            yield b": still here\n\n"
        await asyncio.sleep(_LOOK_SECONDS)
        quiet += _LOOK_SECONDS


def _static_files() -> dict[str, tuple[bytes, str]]:
    """Every file of the page, by its path."""
    found = {}
    root = files("memfit.dashboard").joinpath("static")
    for folder, prefix in ((root, ""), (root.joinpath("vendor"), "vendor/")):
        for entry in folder.iterdir():
            kind = _KINDS.get("." + entry.name.rsplit(".", 1)[-1])
            if entry.is_file() and kind:
                found[prefix + entry.name] = entry.read_bytes(), f"{kind}; charset=utf-8"
    return found


class Dashboard:
    """Polls a feed and serves its page.

    Args:
        feed: what is shown.
        bind: the address to listen on; other machines can reach anything but loopback, and then a token is
            needed (and made, unless given).
        port: 0 for any that is free.
        token: what the first visit must show in its address.
        hosts: more names of this server, as behind a proxy.
        interval_seconds: between readings.

    Raises:
        CannotRunHere: the address cannot be listened on, or FastAPI or uvicorn are not installed.
    """

    def __init__(
        self,
        feed: Feed,
        *,
        bind: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        hosts: Sequence[str] = (),
        interval_seconds: float = 1.0,
    ) -> None:
        loopback = is_loopback(bind)
        self.feed = feed
        self.token = token or (None if loopback else secrets.token_urlsafe(24))
        self._interval = max(SHORTEST_INTERVAL_SECONDS, interval_seconds)
        self._stop = threading.Event()
        guarded = Guard(make_app(feed, self._stop), only_loopback=loopback, token=self.token, hosts=hosts)
        self._socket = _listen(bind, port)
        address = f"[{bind}]" if ":" in bind else bind
        self.url = f"http://{address}:{self._socket.getsockname()[1]}/"
        self._server = _uvicorn(guarded)
        self._threads = [
            threading.Thread(target=self._serve, name="memfit-dashboard", daemon=True),
            threading.Thread(target=self._poll, name="memfit-poll", daemon=True),
            threading.Thread(target=self._find, name="memfit-findings", daemon=True),
        ]

    @property
    def first_url(self) -> str:
        """The address to open: with the token, where one is needed."""
        return self.url if self.token is None else f"{self.url}?token={self.token}"

    def start(self) -> Dashboard:
        """Poll once, then begin to poll and to serve, each in a thread."""
        self.feed.poll()
        for thread in self._threads:
            thread.start()
        return self

    def close(self) -> None:
        """Stop serving and polling, and close the feed."""
        self._stop.set()
        self._server.should_exit = True
        for thread in self._threads[:2]:
            if thread.is_alive():
                thread.join(timeout=5)
        self._socket.close()
        self.feed.close()

    def _serve(self) -> None:
        self._server.run(sockets=[self._socket])

    def _find(self) -> None:
        """Once of what is over; of what is live every half minute."""
        self.feed.find()
        while self.feed.opened.live and not self._stop.wait(FINDINGS_SECONDS):
            self.feed.find()

    def _poll(self) -> None:
        while not self._stop.wait(self._interval):
            try:
                if not self.feed.poll():
                    return
            except Exception:
                LOGGER.exception("a reading for the dashboard failed")


def _listen(bind: str, port: int) -> socket.socket:
    listening = socket.socket(socket.AF_INET6 if ":" in bind else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((bind, port))
        listening.listen(128)  # from here on visitors wait until the server is there
    except (OSError, OverflowError) as error:
        listening.close()
        reason = f"cannot listen on {bind} port {port}: {error}"
        raise CannotRunHere(f"{reason}; choose another --bind or --port") from error
    return listening


def _uvicorn(app: Any) -> Any:
    try:
        import uvicorn
    except ImportError as error:
        raise CannotRunHere("the dashboard needs FastAPI and uvicorn: pip install 'memfit[web]'") from error
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    return uvicorn.Server(config)
