"""A click group whose commands are imported when they are run, not when help is shown.

Knows names, one-line descriptions and import paths; imports nothing of kvferry by itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass

import click


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
