"""The command line: one file per command, one table of them, and the only place that prints.

Nothing heavy is imported here: `memfit --help` reads the table below and loads no command's module.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A row of the table of commands.

    Attributes:
        target: ``"module:function"``; its signature is the command's form, it returns the exit code.
        help: the one line that `memfit --help` shows.
        passes_arguments: what follows the first word that is no option belongs to the script that it runs.
    """

    target: str
    help: str
    passes_arguments: bool = False


COMMANDS: Mapping[str, Command] = {
    "fit": Command("memfit.cli.fit:fit", "Find the fastest way to train a workload within a memory budget."),
    "ladder": Command(
        "memfit.cli.ladder:ladder",
        "Apply techniques one after another and measure memory, step time and quality after each.",
    ),
    "scale": Command(
        "memfit.cli.scale:scale",
        "Compare ways to train a workload on several GPUs, and say how many are needed.",
    ),
    "dryrun": Command(
        "memfit.cli.dryrun:dryrun",
        "Run a training script, unmodified, on a made-up GPU and account for its memory.",
        passes_arguments=True,
    ),
    "replay": Command(
        "memfit.cli.replay:replay",
        "Replay a snapshot, profiler trace or log through PyTorch's allocator, and find the best setting.",
    ),
    "explain": Command(
        "memfit.cli.explain:explain",
        "Say why a program ran out of memory, from its error, log or snapshot, and what to type.",
    ),
    "profile": Command(
        "memfit.cli.profile:profile",
        "Run a training script under the memory profiler and save what its memory is used for.",
        passes_arguments=True,
    ),
    "launch": Command(
        "memfit.cli.launch:launch",
        "Run a script as several ranks, watched, and restart them when one is lost.",
        passes_arguments=True,
    ),
    "monitor": Command(
        "memfit.cli.monitor:monitor", "Watch GPUs, their processes and PyTorch's allocators in the terminal."
    ),
    "diagnose": Command(
        "memfit.cli.diagnose:diagnose",
        "Say what is wrong with a job's memory, and what each change would save.",
    ),
    "diff": Command("memfit.cli.diff:diff", "Say why one run needs more memory than another; a gate for CI."),
    "check": Command(
        "memfit.cli.check:check", "Check that a run keeps a limit of GPU memory; a gate for CI."
    ),
    "rules": Command("memfit.cli.diagnose:rules", "List the rules of memfit diagnose."),
    "dashboard": Command("memfit.cli.dashboard:dashboard", "Show memory live in a browser."),
    "export": Command("memfit.cli.export:export", "Serve what the monitor sees for Prometheus to scrape."),
    "analyze": Command(
        "memfit.cli.analyze:analyze",
        "Say where memory and time go, what limits the step, and what would help.",
    ),
    "run": Command(
        "memfit.cli.run:run",
        "Run a script, unchanged, with the memory settings and techniques of a configuration.",
        passes_arguments=True,
    ),
    "config": Command(
        "memfit.cli.config:config", "Check configuration files, and show each value with where it came from."
    ),
    "calibrate": Command(
        "memfit.cli.calibrate:calibrate",
        "Measure what libraries take on this machine's GPU, and narrow later predictions for it.",
    ),
    "gpus": Command("memfit.cli.gpus:gpus", "List the GPUs that memfit knows by name."),
    "doctor": Command("memfit.cli.doctor:doctor", "Say what this machine can do, and how to get the rest."),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        arguments: the words after ``memfit``; ``None`` takes them from ``sys.argv``.
    """
    try:
        from memfit.cli.app import run
    except KeyboardInterrupt:  # pressed so early that what handles it is not loaded yet
        print("memfit: error: interrupted", file=sys.stderr)
        return 130
    return run(arguments)
