"""Flags of commands, made of the options of configurations."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args, get_origin

import click

from kvferry.options import (
    REQUIRED,
    Configuration,
    Option,
    OptionField,
    is_enum,
    option_fields,
)

Item = TypeVar("Item")
Command = Callable[..., None]
Decorator = Callable[[Command], Command]


def options(
    config: type[Configuration],
    argument: str,
    *,
    build: Callable[..., object] | None = None,
    names: Collection[str] = (),
) -> Decorator:
    """Add a flag for each option of ``config`` that has one, or for the fields ``names`` only.

    The command gets ``argument``: what ``build``, or else ``config``, makes of the values by field
    names. What was not given and has no default is not among them.
    """
    entries = [
        entry
        for entry in option_fields(config)
        if entry.flag and (not names or entry.name in names)
    ]

    def decorate(function: Command) -> Command:
        @functools.wraps(function)
        def command(**values: object) -> None:
            given = {entry.name: values.pop(_parameter(argument, entry)) for entry in entries}
            made = {
                entry.name: _converted(entry, given[entry.name])
                for entry in entries
                if given[entry.name] is not None or entry.option.none_word
            }
            function(**values, **{argument: (build or config)(**made)})

        decorated: Command = command
        for entry in reversed(entries):
            decorated = _flag(argument, entry)(decorated)
        return decorated

    return decorate


class NumberOrWord(click.ParamType[int | None]):
    """A number, or the word that stands for None."""

    def __init__(self, word: str) -> None:
        self._word = word
        self.name = f"N|{word}"

    def convert(
        self, value: str | int | None, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | None:
        """Return the number, or None for the word."""
        if value is None or value == self._word:
            return None
        if not str(value).isdecimal():
            self.fail(f"{value!r} is neither a number of tokens nor {self._word}", param, ctx)
        return int(value)


class Listed(click.ParamType[tuple[Item, ...]], Generic[Item]):
    """Names or positive whole numbers, separated by commas."""

    def __init__(self, kind: type[Item]) -> None:
        self._kind = kind
        self.name = "NAME,NAME…" if is_enum(kind) else "N,N…"
        numbers = "positive numbers like 512,2048"
        self._described = ", ".join(map(str, kind)) if issubclass(kind, enum.Enum) else numbers

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Item, ...]:
        """Return the items; a wrong one is refused with what they may be."""
        if isinstance(value, tuple):
            return value
        make: Callable[[str], Item] = self._kind
        try:
            items = tuple(make(part.strip()) for part in str(value).split(","))
        except ValueError:
            items = ()
        if not items or any(isinstance(item, int) and item < 1 for item in items):
            self.fail(f"{value!r} is not a list of {self._described}", param, ctx)
        return items


def _parameter(argument: str, entry: OptionField) -> str:
    # Several configurations of one command may have fields of the same name.
    return f"{argument}__{entry.name}"


def _converted(entry: OptionField, value: Any) -> object:  # noqa: ANN401
    if entry.option.parse is not None:
        return entry.option.parse(value)
    return entry.kind(value) if is_enum(entry.kind) else value


def _flag(argument: str, entry: OptionField) -> Callable[[Command], Command]:
    option = entry.option
    help_text = option.help
    if option.default_text:
        help_text += f"  [default: {option.default_text}]"
    settings: dict[str, Any] = {"help": help_text, "metavar": option.metavar}
    if entry.default is REQUIRED:
        settings["required"] = True
    elif not option.default_text:
        default = entry.default.value if is_enum(entry.kind) else entry.default
        settings |= {"default": default, "show_default": True}
    if "/" in entry.flag or entry.kind is bool:
        settings |= _switch(entry)
    elif option.is_list:
        settings["type"] = Listed(get_args(entry.kind)[0])
    elif get_origin(entry.kind) is not None:
        settings |= {"multiple": True, "type": _type(option, get_args(entry.kind)[0])}
        if not entry.default:
            settings.pop("default", None)
    else:
        settings["type"] = _type(option, entry.kind)
    return click.option(entry.flag, _parameter(argument, entry), **settings)


def _switch(entry: OptionField) -> dict[str, Any]:
    """Return how a flag without a value is declared; a lone one sets what is not the default."""
    if "/" in entry.flag:
        return {"default": _converted(entry, True) == entry.default}
    return {"is_flag": True, "flag_value": not entry.default, "show_default": False}


def _type(option: Option, kind: Any) -> Any:  # noqa: ANN401
    if option.choices:
        # Plain texts: of named values click would take the names.
        return click.Choice([f"{choice}" for choice in option.choices])
    if option.none_word:
        return NumberOrWord(option.none_word)
    low = option.minimum if option.above is None else option.above
    is_open = option.above is not None
    if kind is int:
        return click.INT if low is None else click.IntRange(_whole(low), _whole(option.maximum))
    if kind is float:
        return click.FLOAT if low is None else click.FloatRange(low, option.maximum, is_open)
    if kind is Path:
        return click.Path(dir_okay=False, path_type=Path)
    return click.STRING


def _whole(bound: float | None) -> int | None:
    return None if bound is None else int(bound)


log_level_option = click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="What is logged, to stderr.",
)


def ready_file_option(content: str) -> Decorator:
    """Add ``--ready-file``, which is to have ``content`` once the program serves."""
    return click.option(
        "--ready-file",
        type=click.Path(dir_okay=False, path_type=Path),
        help=f"Written as JSON once it serves: {content}.",
    )
