"""The monitor: accounts that add up, sources that fail, history on disk, every shipped alert from samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memfit.monitor.engine import DEVICE_COLUMNS, Monitor
from memfit.monitor.history import History
from memfit.monitor.rules import RULES, AlertRule
from memfit.monitor.samples import HostSample, ProcessSample, Sample, Step
from monitor.fakes import GIB, FakeSource, a_gpu, a_rank

MIB = 1 << 20


def parts(monitor: Monitor, device: str = "GPU-0") -> dict[str, int]:
    status = monitor.poll(0.0)
    return {part.key: part.held_bytes for part in status.accounts[device]}


def test_the_account_adds_up_to_the_device() -> None:
    """16 of the 30 GiB used are the rank's, 2 its context's, 12 another process's."""
    processes = tuple(
        ProcessSample(device="GPU-0", pid=pid, used_bytes=used)
        for pid, used in ((100, 18 * GIB), (5, 12 * GIB))
    )
    sample = Sample(time_seconds=0, devices=(a_gpu(),), allocators=(a_rank(),), processes=processes)
    found = parts(Monitor([FakeSource(sample)]))
    assert found == {
        "allocated": 10 * GIB, "waiting": 1 * GIB, "cached": 3 * GIB, "stranded": 2 * GIB, "context": 2 * GIB,
        "others": 12 * GIB, "driver": 1 * GIB, "free": 49 * GIB,
    }  # fmt: skip
    assert sum(found.values()) == 80 * GIB
    unnamed = replace(sample, processes=())
    assert parts(Monitor([FakeSource(unnamed)]))["outside"] == 14 * GIB


def test_categories_and_rounding_stand_for_the_tensors() -> None:
    rank = a_rank(by_category={"parameter": 4 * GIB, "activation": 5 * GIB})
    found = parts(Monitor([FakeSource(Sample(time_seconds=0, devices=(a_gpu(),), allocators=(rank,)))]))
    assert (found["parameter"], found["activation"], found["rounding"]) == (4 * GIB, 5 * GIB, GIB)
    assert sum(found.values()) == 80 * GIB


def test_a_device_that_only_a_record_knows_of_is_shown() -> None:
    rank = a_rank(uuid="", total_bytes=80 * GIB)
    status = Monitor([FakeSource(Sample(time_seconds=0, allocators=(rank,)))]).poll(0.0)
    (device,) = status.sample.devices
    assert (device.used_bytes, device.free_bytes) == (16 * GIB, 64 * GIB)
    assert "record or a trace" in device.unknown["busy_ratio"]


def test_a_source_that_fails_is_a_note_and_the_rest_goes_on() -> None:
    class Broken(FakeSource):
        name = "broken"

        def read(self, now_seconds: float) -> Sample:
            raise ZeroDivisionError("oops")

    status = Monitor([Broken(), FakeSource(Sample(time_seconds=0, devices=(a_gpu(),)))]).poll(0.0)
    assert status.sample.notes == ("broken could not be read: ZeroDivisionError: oops",)
    assert status.errors == 1 and len(status.sample.devices) == 1


def test_alerts_are_kept_on_disk(tmp_path: Path) -> None:
    """A later monitor knows what an earlier one saw, also beside lines that are broken."""
    rule = AlertRule(name="full", quantity="device_used_ratio", above=0.3, for_seconds=0)

    def monitor() -> Monitor:
        sample = Sample(time_seconds=0, devices=(a_gpu(),))
        return Monitor([FakeSource(sample)], rules=(rule,), history=tmp_path)

    first = monitor()
    shown = first.poll(5.0)
    assert not shown.earlier_changes and len(shown.changes) == 1
    second = monitor()  # may read, and does not write while the first has the folder
    (kept,) = second.poll(6.0).earlier_changes
    assert (kept["kind"], kept["alert"], kept["at_seconds"]) == ("fired", "full", 0)
    assert kept["text"] == shown.firing[0].text
    second.close()
    first.close()
    with (tmp_path / "alerts.jsonl").open("a") as file:
        file.write('{"kind": "fired"}\nno JSON\n[]\n' + (tmp_path / "alerts.jsonl").read_text() * 2500)
    third = monitor()
    assert len(third.poll(7.0).earlier_changes) == 200
    third.close()
    assert len((tmp_path / "alerts.jsonl").read_text().splitlines()) <= 1001


def test_devices_are_kept_on_disk_by_one_monitor_at_a_time(tmp_path: Path) -> None:
    def at(time: float, used: int) -> Sample:
        return Sample(time_seconds=time, devices=(a_gpu(used_bytes=used),), host=HostSample(total_bytes=1))

    first = Monitor([FakeSource(at(1.0, 5), at(2.0, 9))], history=tmp_path)
    second = Monitor([FakeSource(at(3.0, 99))], history=tmp_path)
    for monitor in (first, first, second):
        monitor.poll()
    first.close()
    second.close()
    history = History(tmp_path / "gpu-GPU-0")
    assert history.samples().values["used_bytes"].tolist() == [5, 9]
    assert tuple(history.samples().values) == DEVICE_COLUMNS
    third = Monitor([FakeSource(at(4.0, 7))], history=tmp_path)
    third.poll()
    third.close()
    assert history.samples().values["used_bytes"].tolist() == [5, 9, 7]


def steps(key: str, held: list[int]) -> tuple[Step, ...]:
    return tuple(
        Step(key=key, number=n + 1, time_seconds=float(n), seconds=0.5, end_bytes=bytes_, peak_bytes=bytes_)
        for n, bytes_ in enumerate(held)
    )


def samples(seconds: int, **figures: Any) -> list[Sample]:
    """Two ranks over time; every figure is a function of the second."""
    rank = {name: of for name, of in figures.items() if name not in ("used_bytes", "host", "other_rank")}
    made = []
    for second in range(0, seconds, 10):
        device = a_gpu(used_bytes=figures["used_bytes"](second)) if "used_bytes" in figures else a_gpu()
        first = a_rank(0, **{name: of(second) for name, of in rank.items()})
        other = a_rank(1, **figures.get("other_rank", {}))
        made.append(
            Sample(
                time_seconds=float(second),
                devices=(device, a_gpu(1)),
                allocators=(first, other),
                host=figures.get("host"),
                steps=steps(first.process_key, [8 * GIB + 10 * MIB * n for n in range(40)])
                if second == 0
                else (),
            )
        )
    return made


SITUATIONS: dict[str, dict[str, Any]] = {
    "out-of-memory": {"ooms": lambda second: int(second > 20)},
    "alloc-retries": {"alloc_retries": lambda second: second // 50},
    "fragmentation": {"inactive_split_bytes": lambda second: 50 * GIB},
    "nearly-full": {"used_bytes": lambda second: 79 * GIB},
    "untracked-growth": {"used_bytes": lambda second: (20 + second // 60) * GIB},
    "rank-imbalance": {"other_rank": {"allocated_peak_bytes": 20 * GIB}},
    "shm-full": {"host": HostSample(shm_total_bytes=100, shm_used_bytes=95)},
    "host-memory": {"host": HostSample(total_bytes=100, available_bytes=1)},
    "leak": {},
    "time-to-oom": {},
}


@pytest.mark.parametrize("name", [rule.name for rule in RULES])
def test_every_shipped_alert_fires_in_its_situation(name: str) -> None:
    monitor = Monitor([FakeSource(*samples(1000, **SITUATIONS[name]))])
    for _ in range(100):
        status = monitor.poll()
    leaking = {"leak", "time-to-oom"}
    assert {rule for rule, count in status.fired_count.items() if count} == {name, *leaking}
    if name in leaking:
        trend = status.trends[status.sample.allocators[0].key]
        assert trend.per_step is not None and trend.per_step.bytes_per_unit == 10 * MIB
        # 10 MiB a step of half a second into 49 GiB of the device and 5 of the cache
        assert trend.seconds_to_oom == pytest.approx(54 * 1024 / 20)


def test_quiet_samples_fire_nothing() -> None:
    quiet = [replace(sample, steps=()) for sample in samples(1000)]
    monitor = Monitor([FakeSource(*quiet)])
    for _ in range(100):
        status = monitor.poll()
    assert not any(status.fired_count.values())
    json = status.to_json()
    assert json["schema_version"] == 1 and json["alerts"] == []
    assert json["allocators"][0]["trend"]["seconds_to_oom"] is None
