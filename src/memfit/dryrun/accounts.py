"""The accounts of the parts of a run: of each GPU of a process, of each rank of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any


@dataclass(frozen=True, kw_only=True)
class DeviceAccount:
    """One GPU of a process. Sizes are whole bytes.

    Args:
        index: its number, as in ``cuda:1``.
        peak_requested_bytes, peak_allocated_bytes, peak_reserved_bytes: as in the result, of this GPU.
        context_bytes: what the CUDA context takes; 0 where the process did not use the GPU.
        device_total_bytes: context + reserved + what libraries took directly, at the peak.
        nvml_total_bytes: what nvidia-smi calls the GPU's total.
        event_count: allocator events.
        peak_by_category: who is alive when the requested bytes are at their peak.
    """

    index: int
    peak_requested_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    context_bytes: int
    device_total_bytes: int
    nvml_total_bytes: int
    event_count: int
    peak_by_category: Mapping[str, int] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """The device total is within what the GPU has."""
        return self.device_total_bytes <= self.nvml_total_bytes


@dataclass(frozen=True, kw_only=True)
class RankAccount:
    """One rank of a job of several. Sizes are whole bytes.

    Args:
        rank: its number in the whole job.
        device: the GPU of its machine that it uses most.
        like: ranks that were not run, because their place in the job's groups is like this one's.
        fits, ended, exit_code: how its run came out.
        problem: in a line, what went wrong, if anything did.
        peak_requested_bytes, peak_allocated_bytes, peak_reserved_bytes, device_total_bytes: as in the result.
        peak_by_category: who is alive when the requested bytes are at their peak.
    """

    rank: int
    device: int = 0
    like: tuple[int, ...] = ()
    fits: bool
    ended: str
    exit_code: int
    problem: str | None = None
    peak_requested_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_total_bytes: int
    peak_by_category: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class GroupShape:
    """One of the process groups that a rank is in, as it was made.

    Args:
        name: of the mesh dimension that it is, or what the script called it.
        ranks: its members, in their order.
        sends: whether the rank sent to, or received from, single members (as the stages of a pipeline do).
    """

    name: str
    ranks: tuple[int, ...]
    sends: bool = False


def imbalance(accounts: Sequence[RankAccount]) -> float | None:
    """How much more the fullest rank reserves than the ranks do on average: 0.25 is a quarter more.

    A rank counts once for itself and for each rank that is like it. None where nothing was reserved.
    """
    reserved = [a.peak_reserved_bytes for a in accounts for _ in (a.rank, *a.like)]
    if not any(reserved):
        return None
    return max(reserved) / fmean(reserved) - 1


def device_from_json(value: Mapping[str, Any]) -> DeviceAccount:
    """The account that `json_of` wrote."""
    return DeviceAccount(**{name: part for name, part in value.items() if name != "fits"})


def rank_from_json(value: Mapping[str, Any]) -> RankAccount:
    """The account that the result's JSON has."""
    return RankAccount(**{**value, "like": tuple(value["like"])})


def group_from_json(value: Mapping[str, Any]) -> GroupShape:
    """The group that the result's JSON has."""
    return GroupShape(**{**value, "ranks": tuple(value["ranks"])})
