"""A worker process of `memfit.distributed.workers`: joins the group, then runs what it is told.

Started as ``python -m memfit.distributed.worker``, with a JSON object on its stdin. It ends when its
leader closes the connection, or is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from multiprocessing.connection import Client
from typing import Any


def main() -> None:
    """Connect, join, and serve until the connection is closed."""
    start = json.loads(sys.stdin.buffer.read())
    os.environ |= {
        "RANK": str(start["rank"]),
        "LOCAL_RANK": str(start["rank"]),
        "WORLD_SIZE": str(start["world"]),
        "LOCAL_WORLD_SIZE": str(start["world"]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(start["port"]),
    }
    address = start["address"]
    with Client(
        tuple(address) if isinstance(address, list) else address, authkey=bytes.fromhex(start["key"])
    ) as leader:
        leader.send(start["rank"])
        _serve(leader)


def _serve(leader: Any) -> None:
    import cloudpickle
    import torch
    import torch.distributed as dist

    from memfit.distributed.groups import join
    from memfit.distributed.rank_memory import RankMemory
    from memfit.distributed.workers import as_error

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["WORLD_SIZE"])))
    join()
    memory = RankMemory()
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            message = leader.recv_bytes()
            try:
                function, arguments = cloudpickle.loads(message)
                answer = (False, function(memory, *arguments))
            except Exception as error:  # whatever the user's function raises goes to its caller
                answer = (True, as_error(error))
            leader.send_bytes(cloudpickle.dumps(answer))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
