"""An option's type: names of a benchmark's arms, like ``pull,push``."""

from __future__ import annotations

import enum
from typing import Generic, TypeVar

import click

Arm = TypeVar("Arm", bound=enum.StrEnum)


class ArmNames(click.ParamType[tuple[Arm, ...]], Generic[Arm]):
    """Names of arms, separated by commas."""

    name = "ARM,ARM…"

    def __init__(self, arms: type[Arm]) -> None:
        self._arms = arms

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Arm, ...]:
        """Return the arms; refuses an unknown name as wrong usage."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(self._arms(part.strip()) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of {', '.join(self._arms)}", param, ctx)
