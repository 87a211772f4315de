from __future__ import annotations

import subprocess
import sys

import pytest

from memfit import __version__, cli
from memfit.cli import Command, app
from memfit.core.errors import CannotRunHere, InputError, UsageError

HEAVY = ("torch", "matplotlib", "pydantic", "scipy", "numpy")


def run_memfit(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from memfit.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def ends_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of a command that raises `error`."""

    def command() -> None:
        raise error

    monkeypatch.setattr(app, "load_command", lambda name, row: _as_command(command))
    return cli.main(["gpus"])


def _as_command(function):
    import typer

    single = typer.Typer(add_completion=False)
    single.command()(function)
    return typer.main.get_command(single)


def test_help_lists_every_command_and_loads_nothing_heavy():
    code = (
        "import sys; from memfit.cli import main; code = main(['--help']);"
        f"print('HEAVY', [m for m in {HEAVY!r} if m in sys.modules]); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0
    assert "HEAVY []" in done.stdout
    for name in cli.COMMANDS:
        assert f" {name} " in done.stdout


def test_no_arguments_shows_the_help(capsys):
    assert cli.main([]) == 0
    assert "Usage: memfit" in capsys.readouterr().out


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"memfit {__version__}\n"


def test_unknown_command_names_the_near_one(capsys):
    assert cli.main(["fitt"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("memfit: error: No such command 'fitt'. Did you mean 'fit'?")
    assert message.count("\n") == 1


def test_unknown_option_is_a_usage_error(capsys):
    assert cli.main(["gpus", "--jsonn"]) == 2
    assert "--jsonn" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [(UsageError("no GPU 'x'"), 2), (InputError("a.bin: not a trace"), 5), (CannotRunHere("no cc"), 6)],
)
def test_errors_of_ours_are_one_line_and_their_code(error, code, monkeypatch, capsys):
    assert ends_with(error, monkeypatch) == code
    captured = capsys.readouterr()
    assert captured.err == f"memfit: error: {error}\n"
    assert captured.out == ""


def test_ctrl_c_is_130(monkeypatch, capsys):
    assert ends_with(KeyboardInterrupt(), monkeypatch) == 130
    assert capsys.readouterr().err == "memfit: error: interrupted\n"


def test_an_unexpected_error_says_how_to_see_the_traceback(monkeypatch, capsys):
    monkeypatch.delenv("MEMFIT_DEBUG", raising=False)
    assert ends_with(ValueError("odd"), monkeypatch) == 1
    message = capsys.readouterr().err
    assert message.startswith("memfit: error: ValueError: odd (")
    assert "MEMFIT_DEBUG=1" in message
    monkeypatch.setenv("MEMFIT_DEBUG", "1")
    assert ends_with(ValueError("odd"), monkeypatch) == 1
    assert "Traceback" in capsys.readouterr().err


def test_every_row_of_the_table_has_help():
    for row in cli.COMMANDS.values():
        assert isinstance(row, Command)
        assert row.help.endswith(".")
        assert row.target.startswith("memfit.cli.")


def test_a_reader_that_leaves_is_no_error():
    script = (
        f"{sys.executable} -c 'import sys; from memfit.cli import main; sys.exit(main())' --help | head -n 1"
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
