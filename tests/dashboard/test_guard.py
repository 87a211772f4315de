"""Who may ask, over HTTP: rebinding, foreign origins, tokens, methods, headers, the stream."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any

import pytest

from dashboard.conftest import Serve, a_trace, live_feed, trace_feed
from memfit import cli
from memfit.core.errors import CannotRunHere
from memfit.dashboard.guard import Guard
from memfit.dashboard.server import Dashboard
from memfit.monitor.samples import Sample
from monitor.fakes import FakeSource, a_gpu

TOKEN = "a-token-of-some-length"


def ask(
    served: Dashboard, path: str = "/", method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    port = int(served.url.rsplit(":", 1)[1].strip("/"))
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    sent = {"Host": f"127.0.0.1:{port}", **{name.replace("_", "-"): value for name, value in headers.items()}}
    try:
        connection.request(method, path, headers=sent)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def test_on_loopback_this_machine_may_ask_and_nobody_else(serve: Serve) -> None:
    served = serve(trace_feed(a_trace()))
    port = served.url.rsplit(":", 1)[1].strip("/")
    assert served.token is None and served.first_url == served.url
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", "[::1]"):
        assert ask(served, "/api/state", Host=host)[0] == 200
    for host in (f"evil.example:{port}", f"10.0.0.1:{port}", f"127.0.0.1.evil.example:{port}", ""):
        assert ask(served, "/api/state", Host=host)[0] == 421, host
    assert ask(served, "/api/state", Origin=served.url.strip("/"))[0] == 200
    for origin in ("http://evil.example", "null", f"http://localhost:{port}", "http://127.0.0.1:1"):
        assert ask(served, "/api/state", Origin=origin)[0] == 403, origin
    assert ask(served, "/api/state", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="cors")[0] == 403
    assert ask(served, "/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")[0] == 200


def test_nothing_can_be_changed(serve: Serve) -> None:
    served = serve(trace_feed(a_trace()))
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        for path in ("/", "/api/state", "/api/webhook"):
            assert ask(served, path, method)[0] == 405
    code, _, content = ask(served, "/api/webhook?url=http://evil.example")
    assert code == 404 and json.loads(content) == {"error": "there is no 'webhook'"}


def test_every_answer_has_the_headers_that_keep_the_page_to_itself(serve: Serve) -> None:
    served = serve(trace_feed(a_trace()))
    for path in (
        "/",
        "/app.js",
        "/vendor/uPlot.iife.min.js",
        "/vendor/LICENSE.uplot.txt",
        "/api/state",
        "/nothing",
    ):
        _, headers, _ = ask(served, path)
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        assert headers["x-content-type-options"] == "nosniff" and headers["cache-control"] == "no-store"
    assert ask(served, "/")[1]["content-type"] == "text/html; charset=utf-8"
    assert ask(served, "/app.js")[1]["content-type"] == "text/javascript; charset=utf-8"
    for path in (
        "/../guard.py",
        "/..%2fguard.py",
        "/%2e%2e/guard.py",
        "/vendor/../../server.py",
        "/docs",
        "/openapi.json",
    ):
        assert ask(served, path)[0] == 404, path


def test_bad_parameters_are_an_answer(serve: Serve) -> None:
    served = serve(trace_feed(a_trace()))
    code, _, content = ask(served, "/api/timeline?begin=%3Cscript%3E")
    assert code == 400 and json.loads(content) == {"error": "begin='<script>' is no number"}


def test_beyond_loopback_a_token_is_needed(serve: Serve) -> None:
    served = serve(trace_feed(a_trace()), bind="0.0.0.0")
    assert served.token and len(served.token) >= 32 and served.first_url.endswith(f"?token={served.token}")
    for path in ("/", "/app.js", "/api/state", "/api/stream"):
        assert ask(served, path)[0] == 401
        assert ask(served, path, Authorization="Bearer wrong")[0] == 401
        assert ask(served, path, Cookie="memfit_token=wrong")[0] == 401
    assert ask(served, "/?token=wrong")[0] == 401
    code, headers, _ = ask(served, f"/?token={served.token}")
    assert (code, headers["location"]) == (303, "/")
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert ask(served, "/api/state", Cookie=cookie.split(";")[0])[0] == 200
    assert ask(served, "/api/state", Authorization=f"Bearer {served.token}")[0] == 200
    assert ask(served, "/api/state", Host="evil.example", Authorization=f"Bearer {served.token}")[0] == 421
    assert ask(served, "/api/state", Host="192.168.3.4:80", Authorization=f"Bearer {served.token}")[0] == 200


def test_a_token_and_names_of_ones_own(serve: Serve) -> None:
    served = serve(trace_feed(a_trace()), token=TOKEN, hosts=["gpu.example"])
    assert ask(served, "/api/state")[0] == 401
    assert ask(served, "/api/state", Host="gpu.example", Authorization=f"Bearer {TOKEN}")[0] == 200
    with pytest.raises(AssertionError, match="needs a token"):
        Guard(lambda *_: None, only_loopback=False, token=None)  # type: ignore[arg-type, return-value]


def test_the_stream_tells_every_change(serve: Serve) -> None:
    samples = [Sample(time_seconds=float(n), devices=(a_gpu(used_bytes=n),)) for n in range(200)]
    served = serve(live_feed(FakeSource(*samples)), interval_seconds=0.05)
    port = int(served.url.rsplit(":", 1)[1].strip("/"))
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/api/stream")
    answer = connection.getresponse()
    assert answer.getheader("content-type", "").startswith("text/event-stream")
    seen: list[dict[str, Any]] = []
    while len(seen) < 3:
        line = answer.readline()
        if line.startswith(b"data: "):
            seen.append(json.loads(line[6:]))
    connection.close()
    used = [one["devices"][0]["used_bytes"] for one in seen]
    assert used == sorted(set(used)) and [one["version"] for one in seen] == sorted(
        {one["version"] for one in seen}
    )


def test_a_port_that_is_taken_is_said() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(CannotRunHere, match="cannot listen on 127.0.0.1 port"):
            Dashboard(trace_feed(a_trace()), port=taken.getsockname()[1])


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--source", "missing"], 5, "cannot read"),
        (["--token", "short"], 2, "12 to 200 letters"),
        (["--bind", "256.1.1.1"], 6, "cannot listen"),
        (["--speed", "2"], 2, "--speed is for records"),
    ],
)
def test_the_command_says_what_cannot_be(
    words: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["dashboard", *words, "--no-keep"]) == code
    captured = capsys.readouterr()
    assert captured.out == "" and says in captured.err
