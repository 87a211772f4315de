"""Who may ask: this machine only, unless a token is shown; never a foreign page, under whatever name.

A browser lets any page send requests to this server, and a name of the page's own may be made to point here
(DNS rebinding). So the ``Host`` must be a name of ours, ``Origin`` must be that host, and anything but
reading is refused: there is nothing that a request could change.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlsplit

from memfit.monitor.exporter import host_allowed

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

COOKIE = "memfit_token"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class Guard:
    """Stands before the application.

    Args:
        app: what answers.
        only_loopback: whether the server listens on loopback only.
        token: what must be shown; None for nothing (on loopback only).
        hosts: more names that this server has, as behind a proxy.
    """

    def __init__(
        self, app: App, *, only_loopback: bool, token: str | None, hosts: Iterable[str] = ()
    ) -> None:
        assert token or only_loopback, "a server that others can reach needs a token"
        self._app = app
        self._only_loopback = only_loopback
        self._token = token
        self._hosts = tuple(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]
        }
        refusal = self._refusal(scope, headers)
        if refusal:
            await _answer(send, *refusal)
        elif self._enters(scope):
            token = self._token or ""
            cookie = f"{COOKIE}={token}; HttpOnly; SameSite=Strict; Path=/; Max-Age=604800"
            await _answer(send, 303, "", {"location": "/", "set-cookie": cookie})
        elif self._token and not self._shown(headers):
            await _answer(send, 401, "Open the address that memfit dashboard printed: it has the token.")
        else:
            await self._app(scope, receive, _with_headers(send))

    def _refusal(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str] | None:
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "This page only shows: nothing can be changed through it."
        host = headers.get("host", "")
        if not host_allowed(host, only_loopback=self._only_loopback, more=self._hosts):
            return 421, "This server has another name; memfit dashboard --allow-host NAME gives it one."
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            return 403, "Other pages may not ask."
        if headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
            return 403, "Other pages may not ask."
        return None

    def _enters(self, scope: Scope) -> bool:
        """Whether this is the address with the right token, which then goes into a cookie, out of sight."""
        if not self._token or scope["path"] != "/":
            return False
        shown = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        return _same(shown, self._token)

    def _shown(self, headers: dict[str, str]) -> bool:
        assert self._token is not None
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and _same(bearer.strip(), self._token):
            return True
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            return False
        return cookie is not None and _same(cookie.value, self._token)


def _same(shown: str, token: str) -> bool:
    """Compared in a time that does not tell how much of it was right."""
    return hmac.compare_digest(shown.encode(), token.encode())


def _with_headers(send: Send) -> Send:
    async def send_with(message: Any) -> None:
        if message["type"] == "http.response.start":
            ours = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
            message = {**message, "headers": [*message.get("headers", []), *ours]}
        await send(message)

    return send_with


async def _answer(send: Send, code: int, text: str, more: dict[str, str] | None = None) -> None:
    content = text.encode()
    headers = {
        **HEADERS,
        "content-type": "text/plain; charset=utf-8",
        "content-length": str(len(content)),
        **(more or {}),
    }
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": code, "headers": pairs})
    await send({"type": "http.response.body", "body": content})
