"""Alerts: when they begin, end and are told; what they do; rules in files."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from memfit.core.errors import InputError, UsageError
from memfit.monitor import RULES, AlertRule, Command, Webhook
from memfit.monitor.actions import Dispatcher
from memfit.monitor.alerts import Alert, AlertBook, Change
from memfit.monitor.quantities import QUANTITIES, Quantity
from memfit.monitor.rules import read_rules

RULE = AlertRule(
    name="full", quantity="device_used_ratio", above=0.9, clear=0.8, for_seconds=10, cooldown_seconds=100
)


def run(rule: AlertRule, values: list[tuple[float, float | None]]) -> list[tuple[float, str, bool]]:
    """What happens at each time, by values of one subject."""
    book = AlertBook([rule])
    happened = []
    for at, value in values:
        found = [] if value is None else [Quantity(name=rule.quantity, subject="gpu0", value=value)]
        happened += [(at, change.kind, change.told) for change in book.judge(found, at)]
    return happened


def test_fires_only_after_its_time_and_ends_below_the_clearing_value() -> None:
    values = [(0, 0.95), (5, 0.5), (6, 0.95), (15, 0.95), (16, 0.95), (30, 0.85), (31, 0.79), (40, 0.5)]
    assert run(RULE, values) == [(16, "fired", True), (31, "ended", True)]


def test_is_not_told_again_within_its_cooldown() -> None:
    rule = replace(RULE, for_seconds=0)
    values = [(0, 0.95), (1, 0.1), (2, 0.95), (3, 0.1), (150, 0.95)]
    assert run(rule, values) == [
        (0, "fired", True), (1, "ended", True), (2, "fired", False), (3, "ended", False), (150, "fired", True)
    ]  # fmt: skip


def test_ends_when_its_subject_is_gone() -> None:
    assert run(replace(RULE, for_seconds=0), [(0, 0.95), (1, None)]) == [
        (0, "fired", True),
        (1, "ended", True),
    ]


def test_below_is_the_other_way_round() -> None:
    rule = AlertRule(name="soon", quantity="time_to_oom_seconds", below=7200, clear=9000, cooldown_seconds=0)
    assert run(rule, [(0, float("inf")), (1, 7000), (2, 8000), (3, 9000)]) == [
        (1, "fired", True),
        (3, "ended", True),
    ]


def test_subjects_have_states_of_their_own() -> None:
    book = AlertBook([replace(RULE, for_seconds=0)])
    both = [Quantity(name=RULE.quantity, subject=name, value=0.95) for name in ("gpu0", "gpu1")]
    book.judge(both[:1], 0)
    book.judge(both, 1)
    assert [(one.subject, one.fired_seconds) for one in book.firing] == [("gpu0", 0), ("gpu1", 1)]
    assert book.fired_count == {"full": 2}
    assert "gpu0" in book.firing[0].text and "95.0 %, over 90.0 %" in book.firing[0].text


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"quantity": "device_used_rato"}, "did you mean device_used_ratio"),
        ({"above": None}, "exactly one of above and below"),
        ({"below": 1.0}, "exactly one of above and below"),
        ({"clear": 0.95}, "never be over"),
        ({"severity": "fatal"}, "none of info, warning, error"),
        ({"for_seconds": -1}, "0 or more"),
    ],
)
def test_a_rule_that_cannot_be_meant(change: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=f"alert rule 'full'.*{says}"):
        replace(RULE, **change)


def test_the_shipped_rules_have_a_summary_and_a_known_quantity() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert all(rule.summary and rule.quantity in QUANTITIES for rule in RULES)


def test_rules_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "alerts.yaml"
    path.write_text(
        "rules:\n"
        "  - {name: nearly-full, quantity: device_used_ratio, above: 0.8}\n"
        "  - {name: mine, quantity: untracked_growth_bytes, above: 2GiB, for_seconds: 5}\n"
    )
    by_name = {rule.name: rule for rule in read_rules(path)}
    assert by_name["nearly-full"].above == 0.8 and by_name["mine"].above == 2 << 30
    assert set(by_name) == {rule.name for rule in RULES} | {"mine"}
    path.write_text("defaults: false\n" + path.read_text())
    assert [rule.name for rule in read_rules(path)] == ["nearly-full", "mine"]


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("- {name: x, abov: 1}", UsageError, "rule 1: unknown key 'abov'; did you mean above"),
        ("- {name: x}", UsageError, "needs `name` and `quantity`"),
        ("- {name: x, quantity: shm_used_ratio, above: high}", UsageError, "above is 'high', not a number"),
        ("- 3", UsageError, "rule 1: 3 is not a mapping"),
        ("rules: 3", InputError, "expected a list"),
        ("{", InputError, "is not YAML"),
        ("!!python/object/apply:os.system [echo]", InputError, "is not YAML"),
    ],
)  # fmt: skip
def test_a_file_of_rules_that_cannot_be_meant(
    text: str, error: type[Exception], says: str, tmp_path: Path
) -> None:
    path = tmp_path / "alerts.yaml"
    path.write_text(text)
    with pytest.raises(error, match=says):
        read_rules(path)


# ----------------------------------------------------------------- actions


def fired(subject: str = "gpu0") -> Change:
    alert = Alert(rule=RULE, subject=subject, value=0.97, since_seconds=1, fired_seconds=11)
    return Change(kind="fired", alert=alert, told=True)


def test_a_command_gets_the_alert_and_no_shell_reads_it(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    code = (
        "import json, os, sys\n"
        "json.dump([json.load(sys.stdin), os.environ['MEMFIT_ALERT'], sys.argv[2]], open(sys.argv[1], 'w'))"
    )
    hostile = f"; touch {tmp_path / 'bad'} $(touch {tmp_path / 'bad'})"
    Command(words=[sys.executable, "-c", code, str(out), hostile]).run(fired(hostile))
    alert, name, word = json.loads(out.read_text())
    assert (alert["alert"], alert["subject"], name, word) == ("full", hostile, "full", hostile)
    assert not (tmp_path / "bad").exists()
    with pytest.raises(UsageError, match="list of words"):
        Command(words="rm -rf x")


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A webhook that remembers; /away redirects, /broken fails."""
    received: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response({"/away": 302, "/broken": 500}.get(self.path, 200))
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        do_GET = do_POST

        def log_message(self, *_: Any) -> None: ...

    http = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}", received
    http.shutdown()
    thread.join()
    http.server_close()


def test_a_webhook_is_sent_the_alert_and_follows_no_redirect(
    server: tuple[str, list[dict[str, Any]]],
) -> None:
    url, received = server
    Webhook(url=f"{url}/x").run(fired())
    assert received[0]["alert"] == "full" and received[0]["text"].startswith("memfit: fired: gpu0")
    for path in ("away", "broken"):
        with pytest.raises(OSError, match="HTTP Error"):
            Webhook(url=f"{url}/{path}").run(fired())
    assert len(received) == 3
    for bad in ("file:///etc/passwd", "ftp://x", "x", "http://"):
        with pytest.raises(UsageError, match="no http or https address"):
            Webhook(url=bad)


def test_an_action_that_fails_stops_nothing(server: tuple[str, list[dict[str, Any]]]) -> None:
    url, received = server
    dispatcher = Dispatcher([Command(words=["/no/such/program"]), Webhook(url=f"{url}/x")])
    dispatcher.tell(fired())
    dispatcher.tell(replace(fired(), told=False))
    dispatcher.tell(fired("gpu1"))
    dispatcher.close()
    assert [one["subject"] for one in received] == ["gpu0", "gpu1"]
    assert dispatcher.failures == 2
