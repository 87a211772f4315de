"""The exporter: names and units by Prometheus's conventions; boards and rules mention only what exists."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from memfit import cli
from memfit.core.errors import CannotRunHere
from memfit.monitor import AlertRule
from memfit.monitor.engine import Monitor, Status
from memfit.monitor.exporter import Exporter, host_allowed, is_loopback
from memfit.monitor.exposition import StepTotals, render
from memfit.monitor.metrics import METRICS
from memfit.monitor.samples import HostSample, ProcessSample, Sample, Step
from monitor.fakes import GIB, FakeSource, a_gpu, a_rank

pytest.importorskip("prometheus_client")
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics  # noqa: E402
from prometheus_client.parser import text_string_to_metric_families as parse_text  # noqa: E402

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
MIB = 1 << 20


def everything(seconds: float = 0.0) -> Sample:
    """A sample in which every metric has a value, with names that need escaping."""
    ranks = [
        a_rank(
            rank, job='odd "job"\n\\', device_allocs=9, device_frees=2, allocated_total_bytes=10**12,
            segments=3, live_blocks=99, step_peak_bytes=11 * GIB, by_category={"parameter": 4 * GIB},
        )
        for rank in (0, 1)
    ]  # fmt: skip
    steps = [
        Step(key=rank.process_key, number=n, time_seconds=n, seconds=0.5, end_bytes=8 * GIB + n * 10 * MIB,
             peak_bytes=(50 * MIB, 5 * GIB, 1 << 40)[n % 3])
        for rank in ranks for n in range(1, 31)
    ]  # fmt: skip
    processes = [
        ProcessSample(device=f"GPU-{rank}", pid=100 + rank, used_bytes=17 * GIB, name="python")
        for rank in (0, 1)
    ]
    figures = {"temperature_celsius": 40.0, "power_watts": 300.0}
    return Sample(
        time_seconds=seconds,
        devices=(a_gpu(0, **figures), a_gpu(1, **figures)),
        processes=tuple(processes),
        allocators=tuple(ranks),
        host=HostSample(
            total_bytes=100,
            available_bytes=50,
            rss_bytes=5,
            shm_total_bytes=10,
            shm_used_bytes=1,
            pinned_bytes=0,
        ),
        steps=tuple(steps),
    )


RULE = AlertRule(name="any", quantity="device_used_ratio", above=0)


@pytest.fixture(scope="module")
def status() -> Status:
    return Monitor([FakeSource(everything())], rules=[RULE]).poll()


@pytest.fixture(scope="module")
def steps() -> dict[str, StepTotals]:
    totals: dict[str, StepTotals] = {}
    for step in everything().steps:
        totals.setdefault(step.key, StepTotals()).add(step)
    return totals


def families(status: Status, **settings: Any) -> dict[str, Any]:
    content, content_type = render(status, OPENMETRICS, **settings)
    assert content_type.startswith("application/openmetrics-text")
    return {family.name: family for family in parse_openmetrics(content.decode())}


def test_both_forms_parse_and_have_every_metric(status: Status, steps: dict[str, StepTotals]) -> None:
    found = families(status, steps=steps)
    assert set(found) == {f"memfit_{name}" for name in METRICS}
    assert all(family.samples for family in found.values())
    text, content_type = render(status, steps=steps)
    assert content_type.startswith("text/plain")
    names = {sample.name for family in parse_text(text.decode()) for sample in family.samples}
    assert names == {sample.name for family in found.values() for sample in family.samples}


def test_figures_and_labels(status: Status, steps: dict[str, StepTotals]) -> None:
    found = families(status, steps=steps)

    def value(family: str, name: str = "", **labels: str) -> float:
        rows = [
            sample.value for sample in found[family].samples
            if sample.name == (name or family) and labels.items() <= sample.labels.items()
        ]  # fmt: skip
        assert len(rows) == 1, (family, labels, rows)
        return float(rows[0])

    assert value("memfit_device_memory_used_bytes", gpu="0") == 30 * GIB
    pools = found["memfit_allocator_allocated_bytes"].samples
    assert sum(row.value for row in pools if row.labels["rank"] == "1") == 10 * GIB
    assert value("memfit_context_memory_bytes", rank="0") == GIB
    assert value("memfit_untracked_memory_bytes", gpu="1") == 14 * GIB
    assert value("memfit_allocator_fragmentation_ratio", rank="0") == 0.75
    assert value("memfit_growth_bytes_per_step", rank="0") == 10 * MIB
    assert value("memfit_alerts", "memfit_alerts_total", rule="any") == 2
    account = [row.value for row in found["memfit_account_bytes"].samples if row.labels["gpu"] == "0"]
    assert sum(account) == 80 * GIB
    assert {row.labels["job"] for row in pools} == {'odd "job"\n\\'}
    histogram = "memfit_step_peak_bytes"
    assert value(histogram, f"{histogram}_bucket", rank="0", le="67108864.0") == 10
    assert value(histogram, f"{histogram}_bucket", rank="0", le="8589934592.0") == 20
    assert (
        value(histogram, f"{histogram}_bucket", rank="0", le="+Inf")
        == value(histogram, f"{histogram}_count", rank="0")
        == 30
    )
    assert value("memfit_step_duration_seconds", "memfit_step_duration_seconds_sum", rank="1") == 15


def test_what_is_unknown_has_no_series_and_no_growth_is_no_time() -> None:
    sample = Sample(
        time_seconds=0,
        devices=(a_gpu(used_bytes=None, free_bytes=None, total_bytes=None, unknown={"used_bytes": "x"}),),
        allocators=(a_rank(alloc_retries=None),),
    )
    found = families(Monitor([FakeSource(sample)]).poll())
    for name in (
        "device_memory_used_bytes",
        "allocator_alloc_retries",
        "untracked_memory_bytes",
        "step_peak_bytes",
    ):
        assert found[f"memfit_{name}"].samples == []
    steady = Monitor(
        [FakeSource(*(Sample(time_seconds=t, devices=(a_gpu(),), allocators=(a_rank(),)) for t in range(30)))]
    )
    for _ in range(30):
        last = steady.poll()
    (row,) = families(last)["memfit_predicted_oom_seconds"].samples
    assert math.isnan(row.value)


def test_names_follow_the_conventions() -> None:
    """What ``promtool check metrics`` looks for, and the rules of the naming page."""
    for metric in METRICS.values():
        name = metric.sample_name
        assert re.fullmatch(r"memfit_[a-z][a-z0-9]*(_[a-z0-9]+)*", name), name
        assert metric.help and metric.help[0].isupper() and metric.help.endswith("."), name
        assert name.endswith("_total") == (metric.kind == "counter"), name
        assert name.endswith("_info") == (metric.kind == "info"), name
        words = set(name.split("_"))
        assert not words & {
            "mib", "gib", "kib", "mb", "gb", "kb", "ms", "percent", "percentage",
            "milliseconds", "minutes", "hours",
            "gauge", "counter", "histogram", "summary", "bucket", "count", "sum",
        }, name  # fmt: skip
        assert not metric.unit or metric.name.endswith(f"_{metric.unit}"), name
        for base in ("bytes", "seconds", "ratio", "celsius", "watts"):
            if metric.name.endswith(f"_{base}"):
                assert metric.unit == base, name
        assert not set(metric.labels) & {"pid", "le", "quantile", "instance", "host"}, name
        named = {"category"} if name == "memfit_category_bytes" else set()  # the established name
        assert not set(metric.labels) & words - named, f"{name} has a label in its name"


def test_process_numbers_are_labels_only_on_request(status: Status) -> None:
    assert b"pid=" not in render(status)[0]
    rows = families(status, process_labels=True)["memfit_allocator_reserved_bytes"].samples
    assert [row.labels["pid"] for row in rows] == ["100", "101"]


# ----------------------------------------------------------------- what is shipped


def mentioned(text: str) -> set[str]:
    return set(re.findall(r"\bmemfit_[a-z0-9_]+", text))


def exported() -> set[str]:
    names = {metric.sample_name for metric in METRICS.values()}
    for metric in METRICS.values():
        if metric.kind in ("histogram", "summary"):
            names |= {
                f"{metric.sample_name}_{part}"
                for part in ("sum", "count", "bucket")[: 3 if metric.kind == "histogram" else 2]
            }
    return names


def shipped(name: str) -> str:
    return files("memfit.monitor").joinpath("data", name).read_text(encoding="utf-8")


def test_the_grafana_board_asks_only_for_what_exists() -> None:
    board = json.loads(shipped("grafana-dashboard.json"))
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(panels) >= 20 and all(expressions)
    assert mentioned("\n".join(expressions)) <= exported()
    variables = board["templating"]["list"]
    assert {one["name"] for one in variables} == {"datasource", "instance", "job", "gpu", "rank"}
    assert mentioned(json.dumps(variables)) <= exported()
    used = set(re.findall(r"\$(\w+)", "\n".join(expressions)))
    assert used <= {one["name"] for one in variables}
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in panels:
        labels = re.findall(
            r"\{\{(\w+)\}\}", json.dumps([target["legendFormat"] for target in panel["targets"]])
        )
        known = {label for metric in METRICS.values() for label in metric.labels}
        assert set(labels) <= known, panel["title"]


def test_the_prometheus_rules_ask_only_for_what_exists() -> None:
    groups = yaml.safe_load(shipped("prometheus-rules.yml"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    recorded = {rule["record"] for rule in rules if "record" in rule}
    alerts = [rule for rule in rules if "alert" in rule]
    assert len(alerts) == 10 and len({rule["alert"] for rule in alerts}) == 10
    for rule in rules:
        assert mentioned(rule["expr"]) <= exported(), rule
        assert set(re.findall(r"memfit:[a-z_:]+", rule["expr"])) <= recorded, rule
        assert rule["expr"].count("(") == rule["expr"].count(")")
    assert all(rule["annotations"]["summary"] and rule["labels"]["severity"] for rule in alerts)
    assert all(re.fullmatch(r"\d+[smh]", rule.get("for", "1m")) for rule in alerts)


def test_the_command_writes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", "--write-data", str(tmp_path / "new")]) == 0
    written = {path.name: path.read_text() for path in (tmp_path / "new").iterdir()}
    assert written == {name: shipped(name) for name in ("grafana-dashboard.json", "prometheus-rules.yml")}


# ----------------------------------------------------------------- serving


class Counting(FakeSource):
    polls = 0

    def read(self, now_seconds: float) -> Sample:
        self.polls += 1
        return super().read(now_seconds)


@pytest.fixture
def served() -> Iterator[tuple[Exporter, Counting]]:
    source = Counting(everything())
    exporter = Exporter(Monitor([source], rules=[RULE]), port=0, interval_seconds=3600).start()
    yield exporter, source
    exporter.close()


def get(url: str, **headers: str) -> tuple[int, Any, str]:
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read().decode()


def test_a_scrape_hands_out_what_is_ready(served: tuple[Exporter, Counting]) -> None:
    exporter, source = served
    before = source.polls
    for _ in range(20):
        code, headers, text = get(f"{exporter.url}/metrics", Accept=OPENMETRICS)
        assert code == 200
    assert source.polls == before == 1
    assert headers["Content-Type"].startswith("application/openmetrics-text") and text.endswith("# EOF\n")
    code, headers, text = get(f"{exporter.url}/metrics")
    assert (code, headers["Content-Type"].split(";")[0]) == (200, "text/plain")
    assert 'le="+Inf"' in text
    assert get(f"{exporter.url}/healthz")[::2] == (200, "ok\n")
    assert get(f"{exporter.url}/")[0] == 200 and get(f"{exporter.url}/etc/passwd")[0] == 404


def test_an_old_reading_is_not_healthy(served: tuple[Exporter, Counting]) -> None:
    exporter, _ = served
    exporter._read_at -= 4 * 3600
    assert get(f"{exporter.url}/healthz")[0] == 503


def test_a_foreign_host_name_is_refused_on_loopback(served: tuple[Exporter, Counting]) -> None:
    exporter, _ = served
    port = exporter.url.rsplit(":", 1)[1]
    assert get(f"{exporter.url}/metrics", Host=f"evil.example:{port}")[0] == 421
    assert get(f"{exporter.url}/metrics", Host=f"localhost:{port}")[0] == 200


@pytest.mark.parametrize(
    ("header", "loopback", "anywhere"),
    [
        ("127.0.0.1:1", True, True), ("localhost", True, True), ("[::1]:9", True, True),
        ("LOCALHOST:8", True, True),
        ("10.0.0.5:80", False, True), ("evil.example", False, False),
        ("localhost.evil.example", False, False),
        ("", False, False), ("127.0.0.1.evil.example:80", False, False),
    ],
)  # fmt: skip
def test_host_names(header: str, loopback: bool, anywhere: bool) -> None:
    assert host_allowed(header, only_loopback=True) is loopback
    assert host_allowed(header, only_loopback=False) is anywhere
    assert host_allowed("box.example:80", only_loopback=False, more=("box.example",))


def test_which_addresses_are_loopback() -> None:
    assert is_loopback("127.0.0.1") and is_loopback("::1") and is_loopback("localhost")
    assert not is_loopback("0.0.0.0") and not is_loopback("::") and not is_loopback("example.org")


def test_a_port_that_is_taken_is_said(served: tuple[Exporter, Counting]) -> None:
    exporter, _ = served
    port = int(exporter.url.rsplit(":", 1)[1])
    with pytest.raises(CannotRunHere, match=f"cannot listen on 127.0.0.1 port {port}.*--port"):
        Exporter(Monitor([FakeSource(everything())]), port=port)


def test_the_command_serves_until_ctrl_c(tmp_path: Path) -> None:
    code = "import sys; from memfit.cli import main; sys.exit(main(['export', '--port', '0']))"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    url = process.stderr.readline().removeprefix("Metrics: ").strip()
    text = get(url)[2]
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=30)
    assert "memfit_host_memory_total_bytes" in text and (process.returncode, rest) == (0, "")


def test_once_prints_the_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", "-1"]) == 0
    assert "memfit_exporter_build_info" in capsys.readouterr().out
    assert cli.main(["export", "-1", "--interval", "0.2"]) == 2
