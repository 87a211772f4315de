"""A place in a job of several processes: what torchrun tells each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memfit.core.errors import UsageError
from memfit.dryrun.environment import MOST_GPUS

MOST_RANKS = 65_536
WORLD_VARIABLE = "MEMFIT_ABSENT_RANKS"
"""Set where the other ranks of the job are absent, in the script's process and in its children."""


@dataclass(frozen=True, kw_only=True)
class World:
    """The size of a job, and how its ranks are spread over machines.

    Args:
        size: processes in the whole job.
        per_node: processes on each machine, one per GPU; at most ``size``.
    """

    size: int
    per_node: int

    @classmethod
    def of(cls, size: int, per_node: int | None = None) -> World:
        """A job of ``size`` ranks; on machines of 8 GPUs (or as many as there are ranks), if nothing is said.

        Raises:
            UsageError: a number that cannot be, or ranks that do not fill the machines.
        """
        if not 1 <= size <= MOST_RANKS:
            raise UsageError(f"world size {size}: ask for 1 to {MOST_RANKS} ranks")
        chosen = min(8, size) if per_node is None else per_node
        if not 1 <= chosen <= MOST_GPUS:
            raise UsageError(f"{chosen} processes per node: ask for 1 to {MOST_GPUS}, one for each GPU")
        if chosen > size or size % chosen:
            raise UsageError(
                f"world size {size}: not a multiple of {chosen} processes per node (--nproc-per-node)"
            )
        return cls(size=size, per_node=chosen)

    def check_rank(self, rank: int) -> int:
        """``rank``, if the job has it. Raises UsageError otherwise."""
        if not 0 <= rank < self.size:
            raise UsageError(f"rank {rank}: a job of {self.size} has the ranks 0 to {self.size - 1}")
        return rank

    def environment(self, rank: int) -> Mapping[str, str]:
        """What torchrun sets for a rank; nobody listens at the port, and nobody asks."""
        node, local = divmod(self.check_rank(rank), self.per_node)
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(self.per_node),
            "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": str(self.size // self.per_node),
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(self.size),
            "ROLE_NAME": "default",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": "none",
            "OMP_NUM_THREADS": "1",
            "TORCH_NCCL_ENABLE_MONITORING": "0",
            WORLD_VARIABLE: "1",
        }
