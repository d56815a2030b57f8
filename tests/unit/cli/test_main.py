"""How the command line ends: exit codes, one clear line, the nearest name."""

from __future__ import annotations

import click
import pytest

from kvferry import __version__
from kvferry.cli import main as cli_main
from kvferry.cli.main import LazyCommand, LazyGroup
from kvferry.errors import ConfigError


@click.command()
@click.option("--kind", type=click.Choice(["refused", "interrupted", "code"]))
def ending(kind: str) -> None:
    if kind == "refused":
        raise ConfigError("--speed is too high; lower it")
    if kind == "interrupted":
        raise KeyboardInterrupt
    click.get_current_context().exit(7)


@pytest.fixture
def with_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    here = LazyCommand(__name__, "ending", "End somehow.")
    monkeypatch.setattr(
        cli_main, "build_command", lambda: LazyGroup(name="kvferry", lazy={"ending": here})
    )


@pytest.mark.usefixtures("with_ending")
@pytest.mark.parametrize(
    ("kind", "code", "stderr"),
    [
        ("refused", 1, "kvferry: error: --speed is too high; lower it\n"),
        ("interrupted", 130, "\n"),
        ("code", 7, ""),
    ],
)
def test_how_a_command_ends(
    kind: str, code: int, stderr: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli_main.run(["ending", "--kind", kind]) == code
    assert capsys.readouterr().err == stderr


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (["verison"], "version"),
        (["rooter"], "router"),
        (["--hlep"], "--help"),
        (["up", "--prefil", "1"], "--prefill"),
        (["up", "--transport", "nixi"], "'nixl'"),
    ],
)
def test_mistakes_are_refused_naming_the_nearest(
    arguments: list[str], nearest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli_main.run(arguments) == 2
    assert nearest in capsys.readouterr().err


def test_no_arguments_show_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.run([]) == 2
    assert "Commands:" in capsys.readouterr().err


def test_help_lists_every_command_with_its_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.run(["--help"]) == 0
    shown = capsys.readouterr().out
    for name in ("up", "demo", "engine", "router", "bench", "version"):
        assert f"\n  {name} " in shown


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.run(["version"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"kvferry {__version__}"


def test_group_refuses_what_is_not_a_command() -> None:
    group = LazyGroup(name="g", lazy={"x": LazyCommand("kvferry.errors", "FerryError", "")})
    with pytest.raises(TypeError, match="not a click command"):
        group.get_command(click.Context(group), "x")
