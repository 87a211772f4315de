"""What each process of a launch tells: one JSON file, written when it begins and again when it ends.

A process that is killed leaves the first, which says ``running``; how it ended, the launcher knows.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from memfit.core.files import write_atomically

ROUND_VARIABLE = "MEMFIT_LAUNCH_ROUND"
Outcome = Literal["running", "done", "failed", "out_of_memory", "killed", "hung", "stopped"]


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """One process of a launch.

    Attributes:
        rank, local_rank, world_size: as the launcher numbers them.
        attempt: 0 for the first start, one more after each restart.
        pid, host: of the process.
        outcome: how it ended; ``stopped``: by the launcher, as another rank had failed.
        exit_code: negative for a signal; None while it runs.
        error: the error's first line, with its class.
        place: file and line of the script where it was raised.
        account: of an out-of-memory error: amounts in bytes by name, as the message and the allocator tell.
        message: the whole text of an out-of-memory error.
        began_seconds, ended_seconds: since the epoch.
    """

    rank: int
    local_rank: int
    world_size: int
    attempt: int
    pid: int
    host: str
    outcome: Outcome = "running"
    exit_code: int | None = None
    error: str | None = None
    place: str | None = None
    account: Mapping[str, int] = field(default_factory=dict)
    message: str | None = None
    began_seconds: float = 0.0
    ended_seconds: float | None = None

    def to_json(self) -> dict[str, Any]:
        """JSON form, with all fields."""
        return asdict(self)

    def write(self, folder: Path) -> None:
        """Keeps it in a folder of records, in place of the one that this process wrote before."""
        write_atomically(_file(folder, self.attempt, self.rank), json.dumps(self.to_json()))


def _file(folder: Path, attempt: int, rank: int) -> Path:
    return folder / "ranks" / f"attempt-{attempt:03d}-rank-{rank:05d}.json"


def new_record() -> RankRecord:
    """That of this process, by the environment that the launcher gave it."""
    import socket

    told = os.environ
    attempt = int(told.get(ROUND_VARIABLE, "0")) + int(told.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return RankRecord(
        rank=int(told["RANK"]),
        local_rank=int(told["LOCAL_RANK"]),
        world_size=int(told["WORLD_SIZE"]),
        attempt=attempt,
        pid=os.getpid(),
        host=socket.gethostname(),
        began_seconds=time.time(),
    )


def read_rank_records(folder: Path) -> list[RankRecord]:
    """All records of a launch, by attempt and rank."""
    known = {one.name for one in fields(RankRecord)}
    found = []
    for path in sorted((folder / "ranks").glob("attempt-*.json")):
        told = json.loads(path.read_bytes())
        found.append(RankRecord(**{key: value for key, value in told.items() if key in known}))
    return found
