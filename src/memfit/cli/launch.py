"""`memfit launch`: a script as several ranks, watched, restarted when one is lost, and how they ended."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memfit.cli.console import print_json, show
from memfit.cli.exit_codes import EXIT_DOES_NOT_FIT, EXIT_INTERRUPTED, EXIT_RUN_TIME_ERROR

if TYPE_CHECKING:
    from memfit.distributed.launching import LaunchResult


def launch(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT ...",
            help="What to run: train.py and its arguments, or python -m module. Put -- in front of it.",
        ),
    ],
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", metavar="N", min=1, help="Ranks on this machine (default: one a GPU)."),
    ] = None,
    min_nproc: Annotated[
        int | None,
        typer.Option(
            "--min-nproc",
            metavar="N",
            min=1,
            help="When the restarts are used up, go on with one rank fewer, down to N.",
        ),
    ] = None,
    restarts: Annotated[
        int,
        typer.Option(
            "--restarts", metavar="N", min=0, help="Start all ranks again so often when one of them fails."
        ),
    ] = 3,
    records: Annotated[
        Path | None,
        typer.Option(
            "--records",
            metavar="FOLDER",
            help="Where ranks keep what their memory was and how they ended. "
            "Default: where memfit monitor looks.",
        ),
    ] = None,
    nnodes: Annotated[int, typer.Option("--nnodes", metavar="N", min=1, help="Machines in the job.")] = 1,
    rendezvous: Annotated[
        str | None,
        typer.Option("--rdzv-endpoint", metavar="HOST:PORT", help="Where the machines of the job meet."),
    ] = None,
    job: Annotated[
        str | None, typer.Option("--rdzv-id", metavar="NAME", help="The job's name there, the same on all.")
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object; all that the ranks print goes to stderr."),
    ] = False,
) -> int:
    """Run a script as several ranks, as torchrun does, and keep it running.

    Each rank's memory is recorded (memfit monitor shows it live). When a rank is lost, all are started
    again; with memfit.FaultTolerance in the script they go on from its last checkpoint. An out-of-memory
    error is told by rank, with its account.

    Exit code 0 when the script was done on all ranks, 4 when it ended out of memory, 1 when it failed
    otherwise, 130 when it was interrupted.
    """
    from memfit.core.errors import CannotRunHere, UsageError
    from memfit.dryrun.command import parse_command

    try:
        from memfit.distributed.launching import LaunchSettings, gpu_count
        from memfit.distributed.launching import launch as run
    except ModuleNotFoundError as error:
        raise CannotRunHere(f"{error.name} is not installed; pip install 'memfit[torch]'") from error
    if nnodes > 1 and not (rendezvous and job):
        raise UsageError(
            f"--nnodes {nnodes} needs --rdzv-endpoint HOST:PORT and --rdzv-id NAME, as on all machines"
        )
    if nnodes > 1 and min_nproc is not None:
        raise UsageError(
            "--min-nproc is for one machine: all machines of a job have the same number of ranks"
        )
    ranks = nproc or gpu_count()
    if min_nproc is not None and min_nproc > ranks:
        raise UsageError(f"--min-nproc {min_nproc} is more than --nproc {ranks}")
    script = parse_command(command)
    result = run(
        script,
        LaunchSettings(
            ranks=ranks,
            least_ranks=min_nproc or ranks,
            restarts=restarts,
            records=records or _default_records(script.target),
            nodes=nnodes,
            rendezvous=rendezvous,
            job=job,
            output="stderr" if as_json else "stdout",
        ),
    )
    if as_json:
        print_json(result.to_json())
    else:
        _print(result)
    codes = {"done": 0, "out_of_memory": EXIT_DOES_NOT_FIT, "interrupted": EXIT_INTERRUPTED}
    return codes.get(result.ended, EXIT_RUN_TIME_ERROR)


def _default_records(target: str) -> Path:
    from memfit.monitor.identity import plain_name, runs_folder

    name = plain_name(Path(target).stem)
    return runs_folder() / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def _print(result: LaunchResult) -> None:
    from rich.console import Group
    from rich.text import Text

    from memfit.core.units import format_bytes, format_seconds

    verdicts = {
        "done": "done on all ranks",
        "failed": "failed",
        "out_of_memory": "out of memory",
        "interrupted": "interrupted",
    }
    restarts = result.attempts - 1
    again = (
        f", started {restarts} times again" if restarts > 1 else ", started once again" if restarts else ""
    )
    took = format_seconds(result.wall_seconds)
    lines = [f"{verdicts[result.ended].capitalize()}: {result.world_size} ranks, {took}{again}"]
    for record in result.failures:
        where = f" at {record.place}" if record.place else ""
        lines.append(
            f"  attempt {record.attempt}, rank {record.rank}: {record.error or record.outcome}{where}"
        )
        account = [
            f"{name.removesuffix('_bytes').replace('_', ' ')} {format_bytes(size)}"
            for name, size in record.account.items()
        ]
        if account:
            lines.append(f"    {', '.join(account)}")
    lines += [f"  {event['text']}" for event in result.events if event["kind"] != "saved"]
    lines.append(f"Records: {result.folder}")
    show(Group(*(Text(line) for line in lines)))
