"""How a command is found and run, and how every failure becomes one line and an exit code."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from memfit import __version__
from memfit.cli import COMMANDS, Command
from memfit.cli.exit_codes import EXIT_INTERRUPTED, EXIT_RUN_TIME_ERROR, EXIT_USAGE
from memfit.core.errors import MemfitError

HELP = "Know, plan and prove the GPU memory of a PyTorch job before a GPU is rented."
EXIT_CODES = (
    "Exit codes: 0 done, and it fits · 1 the script failed, or a run-time error · 2 usage · "
    "3 findings, or over a limit · 4 does not fit, or no plan · 5 unreadable input · 6 cannot run here · "
    "130 Ctrl-C."
)


class LazyGroup(TyperGroup):
    """The table of commands as a typer group: listed without an import, imported when run."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        row = COMMANDS.get(cmd_name)
        return None if row is None else TyperCommand(name=cmd_name, help=row.help)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        self.commands = {name: self.get_command(ctx, name) for name in COMMANDS}
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and load_command(str(name), COMMANDS[str(name)]), rest


def load_command(name: str, row: Command) -> Any:
    """The command's module is imported here, and nowhere earlier."""
    module, function = row.target.split(":")
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    settings: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
    settings["allow_interspersed_args"] = not row.passes_arguments
    single.command(name=name, context_settings=settings)(getattr(importlib.import_module(module), function))
    command = typer.main.get_command(single)
    command.name = name
    return command


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"memfit {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", help="Print the version.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    """Options of `memfit` itself; the commands have their own."""


app = typer.Typer(
    cls=LazyGroup,
    help=HELP,
    epilog=EXIT_CODES,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.callback()(_root)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command; every way that it can end becomes an exit code (and at most one line on stderr)."""
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        code = typer.main.get_command(app).main(words, prog_name="memfit", standalone_mode=False)
        sys.stdout.flush()
        # typer turns a KeyboardInterrupt into this code by itself.
        return _fail("interrupted", EXIT_INTERRUPTED) if code == EXIT_INTERRUPTED else int(code or 0)
    except MemfitError as error:
        return _fail(str(error), error.exit_code)
    except TyperException as error:
        return _fail(_usage_text(error), EXIT_USAGE)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        return _leave_quietly()
    except Exception as error:  # noqa: BLE001  # the last resort: said in one line, shown whole when asked
        if os.environ.get("MEMFIT_DEBUG"):
            traceback.print_exc()
        hint = "this is a bug in memfit; MEMFIT_DEBUG=1 shows the traceback"
        return _fail(f"{type(error).__name__}: {error} ({hint})", EXIT_RUN_TIME_ERROR)


def _usage_text(error: TyperException) -> str:
    context = getattr(error, "ctx", None)
    where = context.command_path if context is not None else "memfit"
    return f"{error.format_message().rstrip('.')} (see {where} --help)"


def _fail(message: str, code: int) -> int:
    with contextlib.suppress(BrokenPipeError):
        print(f"memfit: error: {message}", file=sys.stderr)
    return code


def _leave_quietly() -> int:
    """The reader of our output has gone (`memfit … | head`): nothing is left to say, also not at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_RUN_TIME_ERROR
