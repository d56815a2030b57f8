"""The ``kvferry`` command: finds the subcommand, and turns how it ends into an exit code.

0: done. 1: kvferry refused or failed, one line on stderr. 2: wrong usage. 130: Ctrl-C.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from kvferry import __version__
from kvferry.cli.lazy_group import LazyCommand, LazyGroup
from kvferry.errors import FerryError

_EXIT_FAILED = 1
_EXIT_USAGE = 2
_EXIT_INTERRUPTED = 130

_HELP = """Serve language models with prefill and decode on separate instances.

The KV cache of a prompt moves from the instance that computed it to the one that continues it,
peer to peer; the router carries metadata only.

\b
Try it:        kvferry demo
Keep it up:    kvferry up
Measure it:    kvferry bench handoff
Check one:     kvferry doctor URL
"""


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
            "version": at("version", "version", "Show the versions of kvferry and what it uses."),
        },
    )
    return click.version_option(__version__, prog_name="kvferry")(group)


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
