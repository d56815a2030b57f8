"""An option's type: a list of token counts, like ``512,2048``."""

from __future__ import annotations

import click


class TokenCounts(click.ParamType[tuple[int, ...]]):
    """Positive numbers, separated by commas."""

    name = "N,N…"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Return the numbers; refuses anything else as wrong usage."""
        if isinstance(value, tuple):
            return value
        try:
            counts = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            counts = (0,)
        if min(counts) < 1:
            self.fail(f"{value!r} is not a list of positive numbers like 512,2048", param, ctx)
        return counts
