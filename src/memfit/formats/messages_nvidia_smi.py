"""What nvidia-smi prints in all its forms: the table, ``--query-gpu``, ``--query-compute-apps``, ``-q -x``.

A value that the tool could not get is unknown, with the reason that it gave: never 0, and never taken from
the product's name.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from xml.etree import ElementTree

from memfit.core.errors import InputError
from memfit.formats.messages_amounts import read_amount
from memfit.formats.messages_devices import Device, Process, Reading, Slice

LARGEST_XML_BYTES = 32 << 20
_REASONS = (
    "Insufficient Permissions",
    "Not Supported",
    "N/A",
    "Unknown Error",
    "GPU is lost",
    "ERR!",
    "Requested functionality has been deprecated",
    "No Permission",
    "Not Available",
    "Not Found",
    "GPU requires reset",
)


def read_output(text: str) -> Reading | None:
    """What an output of nvidia-smi says; None where the text is none.

    Raises:
        InputError: it is its XML, and broken.

    Examples:
        >>> reading = read_output("index, memory.used [MiB], memory.total [MiB]\\n0, 100 MiB, [N/A]")
        >>> reading.devices[0].used_bytes, reading.devices[0].total_bytes, reading.devices[0].unknown["total"]
        (104857600, None, 'N/A')
    """
    stripped = text.lstrip("\ufeff \t\r\n")
    if stripped.startswith("<") and "nvidia_smi_log" in stripped[:4000]:
        return _xml(stripped)
    if "FB Memory Usage" in text and re.search(r"^GPU [0-9A-Fa-f]{8}:", text, re.MULTILINE):
        return _long(text)
    if "NVIDIA-SMI" in text or re.search(r"\|\s{0,3}\d{1,7}MiB /\s{1,7}\d{1,7}MiB \|", text):
        return table(text.splitlines())
    return _csv(stripped)


def _value(text: str | None) -> tuple[int | None, str | None]:
    """An amount in bytes, or why there is none."""
    plain = (text or "").strip().strip("[]").strip()
    reason = next((known for known in _REASONS if plain.lower() == known.lower()), None)
    if reason is not None or not plain:
        return None, reason or "not given"
    size = read_amount(plain)
    return (size, None) if size is not None else (None, f"unreadable: {plain[:40]}")


def _amounts(values: Mapping[str, str | None]) -> tuple[dict[str, int | None], dict[str, str]]:
    sizes: dict[str, int | None] = {}
    unknown: dict[str, str] = {}
    for name, text in values.items():
        size, reason = _value(text)
        sizes[name] = size
        if reason is not None:
            unknown[name] = reason
    return sizes, unknown


def _number(text: str | None) -> int | None:
    found = re.match(r"\s{0,4}(\d{1,6})", text or "")
    return None if found is None else int(found[1])


# -q -x


def _xml(text: str) -> Reading:
    if len(text) > LARGEST_XML_BYTES or "<!ENTITY" in text:
        raise InputError("this is not the XML that nvidia-smi writes: it is huge, or declares entities")
    end = text.rfind("</nvidia_smi_log>")
    try:
        root = ElementTree.fromstring(text if end < 0 else text[: end + len("</nvidia_smi_log>")])
    except ElementTree.ParseError as error:
        raise InputError(f"the XML of nvidia-smi is broken: {error}") from error
    devices, processes = [], []
    driver = root.findtext("driver_version", "")
    for place, gpu in enumerate(root.iter("gpu")):
        index = gpu.findtext("minor_number") or str(place)
        devices.append(_xml_device(gpu, index.strip() if index.strip().isdigit() else str(place), driver))
        for info in gpu.iter("process_info"):
            used, _ = _value(info.findtext("used_memory"))
            pid = _number(info.findtext("pid"))
            processes.append(
                Process(pid, used, (info.findtext("process_name") or "").strip(), devices[-1].index)
            )
    return Reading(devices=tuple(devices), processes=tuple(processes))


def _xml_device(gpu: ElementTree.Element, index: str, driver: str) -> Device:
    sizes, unknown = _amounts(
        {name: gpu.findtext(f"fb_memory_usage/{name}") for name in ("total", "used", "free")}
    )
    mode = (gpu.findtext("mig_mode/current_mig") or "").strip()
    return Device(
        index=index,
        name=(gpu.findtext("product_name") or "").strip(),
        uuid=(gpu.findtext("uuid") or "").strip(),
        unknown=unknown,
        mig=None if mode in ("", "N/A") else mode == "Enabled",
        slices=tuple(_xml_slice(part) for part in gpu.iter("mig_device")),
        temperature_celsius=_number(gpu.findtext("temperature/gpu_temp")),
        utilization_percent=_number(gpu.findtext("utilization/gpu_util")),
        driver=driver,
        mode=(gpu.findtext("compute_mode") or "").strip(),
        total_bytes=sizes.get("total"),
        used_bytes=sizes.get("used"),
        free_bytes=sizes.get("free"),
    )


def _xml_slice(part: ElementTree.Element) -> Slice:
    sizes, _ = _amounts(
        {name: part.findtext(f"fb_memory_usage/{name}") for name in ("total", "used", "free")}
    )
    return Slice(
        index=(part.findtext("index") or "").strip(),
        gpu_instance=(part.findtext("gpu_instance_id") or "").strip(),
        compute_instance=(part.findtext("compute_instance_id") or "").strip(),
        total_bytes=sizes.get("total"),
        used_bytes=sizes.get("used"),
        free_bytes=sizes.get("free"),
    )


# -q


def _long(text: str) -> Reading:
    devices, processes = [], []
    driver = re.search(r"^Driver Version\s{0,60}: (\S{1,20})", text, re.MULTILINE)
    blocks = re.split(r"^GPU [0-9A-Fa-f]{8}:[0-9A-Fa-f]{2}:\S{1,8}\s{0,4}$", text, flags=re.MULTILINE)[1:]
    for place, block in enumerate(blocks):
        usage = re.search(r"FB Memory Usage\s{0,4}\n((?:\s{4,40}\w[\w ]{0,20}:[^\n]{0,80}\n?){1,6})", block)
        fields = dict(re.findall(r"(Total|Used|Free)\s{0,60}: ([^\n]{1,60})", usage[1] if usage else ""))
        sizes, unknown = _amounts({name: fields.get(name.capitalize()) for name in ("total", "used", "free")})
        name = re.search(r"Product Name\s{0,60}: ([^\n]{1,80})", block)
        mig = re.search(r"MIG Mode\s{0,4}\n\s{4,40}Current\s{0,60}: (\w[\w/]{0,20})", block)
        devices.append(
            Device(
                index=str(place),
                name=name[1].strip() if name else "",
                driver=driver[1] if driver else "",
                unknown=unknown,
                mig=None if mig is None or mig[1] == "N/A" else mig[1] == "Enabled",
                total_bytes=sizes.get("total"),
                used_bytes=sizes.get("used"),
                free_bytes=sizes.get("free"),
            )
        )
        for found in re.finditer(
            r"Process ID\s{0,60}: (\d{1,10})(.{0,400}?)Used GPU Memory\s{0,60}: ([^\n]{1,40})",
            block,
            re.DOTALL,
        ):
            title = re.search(r"Name\s{0,60}: ([^\n]{0,200})", found[2])
            processes.append(
                Process(int(found[1]), _value(found[3])[0], title[1].strip() if title else "", str(place))
            )
    return Reading(devices=tuple(devices), processes=tuple(processes))


# --query-…=… --format=csv


def _csv(text: str) -> Reading | None:
    try:
        rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text[: 4 << 20])) if row]
    except csv.Error:  # a cell without end, or a line end inside one
        return None
    rows = [row for row in rows if any(row)]
    if not rows:
        return None
    header = [re.sub(r"\s{0,4}\[[\w%]{1,6}\]$", "", cell).lower() for cell in rows[0]]
    units = [found[1] if (found := re.search(r"\[(\w{1,6})\]$", cell)) else "" for cell in rows[0]]
    if any(cell.startswith("memory.") or cell in ("used_gpu_memory", "used_memory") for cell in header):
        named = [_named(row, header, units) for row in rows[1:]]
        if "pid" in header or "used_gpu_memory" in header or "used_memory" in header:
            return Reading(processes=tuple(_csv_process(row) for row in named))
        return Reading(devices=tuple(_csv_device(row, place) for place, row in enumerate(named)))
    return _headless(rows)


def _named(row: Sequence[str], header: Sequence[str], units: Sequence[str]) -> dict[str, str]:
    """A row by its header; a bare number has the header's unit."""
    cells = {}
    for name, cell, unit in zip(header, row, units, strict=False):
        bare = re.fullmatch(r"\d{1,12}", cell) is not None
        cells[name] = f"{cell} {unit}" if bare and unit.endswith("B") else cell
    return cells


def _csv_process(row: Mapping[str, str]) -> Process:
    used = row.get("used_gpu_memory", row.get("used_memory"))
    gpu = next(
        (row[name] for name in ("gpu_index", "index", "gpu", "gpu_uuid", "gpu_bus_id") if name in row), ""
    )
    return Process(
        _number(row.get("pid")), _value(used)[0], row.get("process_name", row.get("name", "")), gpu
    )


def _csv_device(row: Mapping[str, str], place: int) -> Device:
    given = {name: row[f"memory.{name}"] for name in ("total", "used", "free") if f"memory.{name}" in row}
    sizes, unknown = _amounts(given)
    mig = row.get("mig.mode.current", "").strip("[]")
    return Device(
        index=row.get("index", str(place)),
        name=row.get("name", row.get("gpu_name", "")),
        uuid=row.get("uuid", row.get("gpu_uuid", "")),
        unknown=unknown | _unknown_of(row, "utilization", "utilization.gpu"),
        mig={"Enabled": True, "Disabled": False}.get(mig),
        temperature_celsius=_number(row.get("temperature.gpu")),
        utilization_percent=_number(row.get("utilization.gpu")),
        driver=row.get("driver_version", ""),
        total_bytes=sizes.get("total"),
        used_bytes=sizes.get("used"),
        free_bytes=sizes.get("free"),
    )


def _unknown_of(row: Mapping[str, str], name: str, key: str) -> dict[str, str]:
    reason = _value(row.get(key))[1] if key in row and _number(row[key]) is None else None
    return {} if reason is None else {name: reason}


_PRODUCT = re.compile(r"(?:NVIDIA|GeForce|Tesla|Quadro|GRID)\b.{1,80}")


def _headless(rows: Sequence[Sequence[str]]) -> Reading | None:
    """Without a header only a refusal or an amount tells that this is nvidia-smi's."""
    if len(rows) > 64 or any(len(row) > 24 for row in rows):
        return None
    devices = []
    for place, row in enumerate(rows):
        values = [(cell, *_value(cell)) for cell in row]
        refused = [
            reason for cell, _, reason in values if reason and cell.startswith("[") and reason != "not given"
        ]
        amounts = [size for cell, size, _ in values if size is not None and re.search(r"\d MiB$", cell)]
        named = next((cell for cell in row if _PRODUCT.match(cell)), "")
        if not refused and not amounts and not (named and len(row) > 1):
            return None
        if len(row) == 1 and amounts:  # one column: which one is not said
            devices.append(Device(index=str(place), unknown={"memory": "the column has no name"}))
        else:
            numbers = any(re.fullmatch(r"\d{1,9}(?: MiB)?", cell) for cell in row)
            reason = refused[0] if refused and not numbers else "the columns have no names"
            devices.append(Device(index=str(place), name=named, unknown={"memory": reason}))
    return Reading(devices=tuple(devices))


# the table


_ROW_NAME = re.compile(r"\|\s{1,4}(\d{1,3})\s{1,4}(\S.{0,60}?)\s{1,30}(?:On|Off|N/A|TCC|WDDM|MCDM)\s{0,8}\|")
_ROW_MEMORY = re.compile(
    r"\|\s{0,30}(?:(\d{1,8})MiB\s{0,3}/\s{1,8}(\d{1,8})MiB|([A-Z][\w /!]{2,30}?))\s{0,30}"
    r"\|\s{1,8}(\d{1,3}%|N/A|ERR!)\s{1,30}(\S[\w. ]{0,20}?)\s{0,8}\|"
)
_ROW_SLICE = re.compile(
    r"\|\s{1,4}(\d{1,3})\s{1,5}(\d{1,4})\s{1,5}(\d{1,4})\s{1,5}(\d{1,4})\s{1,4}"
    r"\|\s{0,12}(?:(\d{1,8})MiB\s{0,3}/\s{1,8}(\d{1,8})MiB|(\S.{2,24}?))\s{0,12}\|"
)
_ROW_PROCESS = re.compile(
    r"\|\s{1,6}(\d{1,3})\s{1,6}(?:(?:N/A|\d{1,4})\s{1,6}(?:N/A|\d{1,4})\s{1,16})?(\d{1,10})\s{1,6}"
    r"(?:([CGM+]{1,3})\s{1,6})?(\S.{0,80}?)\s{1,60}(?:(\d{1,8})Mi?B|(N/A|\d{1,8}))\s{0,6}\|"
)
_DRIVER = re.compile(r"Driver Version:\s{1,4}(\S{1,20})")


def table(lines: Sequence[str]) -> Reading:
    """The table that nvidia-smi prints without options."""
    devices: list[Device] = []
    processes: list[Process] = []
    driver, open_row, part = "", None, "devices"
    for line in lines:
        if found := _DRIVER.search(line):
            driver = found[1]
        part = "slices" if "MIG devices:" in line else "processes" if "Processes:" in line else part
        if part == "devices" and (found := _ROW_NAME.search(line)):
            open_row = (found[1], found[2])
        elif part == "devices" and open_row and (found := _ROW_MEMORY.search(line)):
            devices.append(_table_device(open_row, found, driver))
            open_row = None
        elif part == "devices" and devices and re.search(r"\|\s{1,40}Enabled\*?\s{0,6}\|\s{0,4}$", line):
            devices[-1] = replace(devices[-1], mig=True)
        elif part == "slices" and (found := _ROW_SLICE.search(line)):
            _add_slice(devices, found)
        elif part == "processes" and (found := _ROW_PROCESS.search(line)):
            used = None if found[5] is None else int(found[5]) << 20
            processes.append(Process(int(found[2]), used, found[4].strip(), found[1]))
    return Reading(devices=tuple(devices), processes=tuple(processes))


def _table_device(row: tuple[str, str], found: re.Match[str], driver: str) -> Device:
    index, name = row
    used, total = (None if text is None else int(text) << 20 for text in found.group(1, 2))
    reason = None if found[3] is None else found[3].strip()
    return Device(
        index=index,
        name=name,
        driver=driver,
        total_bytes=total,
        used_bytes=used,
        unknown={} if reason is None else {"total": reason, "used": reason},
        utilization_percent=_number(found[4]),
        mode=found[5].strip(),
    )


def _add_slice(devices: list[Device], found: re.Match[str]) -> None:
    gpu, instance, compute, index = found.group(1, 2, 3, 4)
    used, total = (None if text is None else int(text) << 20 for text in found.group(5, 6))
    part = Slice(
        index=index,
        gpu_instance=instance,
        compute_instance=compute,
        total_bytes=total,
        used_bytes=used,
        free_bytes=None,
    )
    for place, device in enumerate(devices):
        if device.index == gpu:
            devices[place] = replace(device, slices=(*device.slices, part), mig=True)
            return
    devices.append(
        Device(index=gpu, slices=(part,), mig=True, unknown={"total": "not shown", "used": "not shown"})
    )
