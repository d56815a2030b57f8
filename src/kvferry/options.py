"""Options: what users may set, written once, at the field of the configuration that it reaches.

A field made by ``option()`` has its help, range and default there and nowhere else. Command-line
flags (``cli/options.py``), keys of files (``read_options``), checks (``check_options``), arguments
of started processes (``flags_of``) and the docs' tables are read from it. Knows no command line.
"""

from __future__ import annotations

import difflib
import enum
import math
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from typing import Any, ClassVar, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from kvferry.errors import ConfigError

Value = TypeVar("Value")
Config = TypeVar("Config")
REQUIRED: Any = MISSING
"""In place of a default: the option has to be given."""
_KEY = "option"


class Configuration(Protocol):
    """A dataclass with options."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What is told of one field, and which values it takes. A number is always finite."""

    help: str
    flag: str | None = None
    """Such as ``--port`` or ``--read-back/--no-read-back``; None: the field's name, made a flag;
    empty: it has none."""
    minimum: float | None = None
    above: float | None = None
    """As ``minimum``, but itself not allowed."""
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    default_text: str = ""
    """Says what is taken where the default alone does not say it."""
    none_word: str = ""
    """How None is written, where that is another choice than to give nothing."""
    is_list: bool = False
    """The items of a tuple are written as one text, with commas between them."""
    parse: Callable[[Any], Any] | None = None
    """Makes the field's value of what the command line gives; may raise ``ConfigError``."""

    @property
    def range_text(self) -> str:
        """Which values are allowed, as words after "must be"."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.minimum is not None and self.maximum is not None:
            return f"{self.minimum:g} to {self.maximum:g}"
        bounds = [
            f"{words} {bound:g}"
            for words, bound in (
                ("at least", self.minimum),
                ("above", self.above),
                ("at most", self.maximum),
            )
            if bound is not None
        ]
        return " and ".join(bounds) or "a finite number"

    def flag_of(self, name: str) -> str:
        """Return the flag with its dashes for the field ``name``, or an empty text."""
        return f"--{name.replace('_', '-')}" if self.flag is None else self.flag

    def allows(self, value: object) -> bool:
        """Whether the field may have ``value``."""
        if self.choices:
            return value in self.choices
        if isinstance(value, bool) or not isinstance(value, int | float):
            return True
        return (
            math.isfinite(value)
            and (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and (self.maximum is None or value <= self.maximum)
        )


@dataclass(frozen=True, slots=True)
class OptionField:
    """An option with the field that has it."""

    name: str
    option: Option
    default: Any
    """``REQUIRED`` where there is none; None where it is made anew for each configuration."""
    kind: Any
    """The field's type, without None."""

    @property
    def flag(self) -> str:
        """The flag with its dashes, or an empty text."""
        return self.option.flag_of(self.name)


def option(
    default: Value,
    help_text: str,
    *,
    default_factory: Callable[[], Value] | None = None,
    **rules: Any,  # noqa: ANN401
) -> Value:
    """Return a dataclass's field with an ``Option`` of ``help_text`` and ``rules``.

    With ``default_factory`` the default is ``REQUIRED``.
    """
    metadata = {_KEY: Option(help=help_text, **rules)}
    if default_factory is not None:
        return field(default_factory=default_factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def same_as(config: type[Configuration], name: str, **changes: Any) -> Any:  # noqa: ANN401
    """Return a field with the option and the default of field ``name`` of ``config``.

    ``changes`` are to the option; ``default`` among them is another default.
    """
    original = config.__dataclass_fields__[name]
    default = changes.pop("default", original.default)
    return field(default=default, metadata={_KEY: replace(original.metadata[_KEY], **changes)})


def option_fields(config: type[Configuration]) -> Iterator[OptionField]:
    """Yield the fields of ``config`` that have options, in order."""
    hints = get_type_hints(config)
    for entry in fields(config):
        if _KEY in entry.metadata:
            default = entry.default
            if default is MISSING and entry.default_factory is not MISSING:
                default = None
            kind = _without_none(hints[entry.name])
            yield OptionField(entry.name, entry.metadata[_KEY], default, kind)


def check_options(config: Configuration, *, has_flags: bool = True) -> None:
    """Raise ``ConfigError`` for the first option of ``config`` with a value it may not have.

    It is named as the field is, and as the flag unless ``has_flags`` is false. None is let pass.
    """
    for name, rule, value in _values(config):
        if rule.allows(value):
            continue
        flag = rule.flag_of(name).partition("/")[0] if has_flags else ""
        label = f"{name} ({flag})" if flag else name
        raise ConfigError(f"{label} must be {rule.range_text}, not {value!r}")


def flags_of(config: Configuration) -> list[str]:
    """Return the command-line arguments for what ``config`` says, None left out."""
    flags = ((rule.flag_of(name), str(value)) for name, rule, value in _values(config))
    return [word for flag, text in flags if flag for word in (flag, text)]


def _values(config: Configuration) -> Iterator[tuple[str, Option, Any]]:
    """Yield name, option and value of each field that has an option and is not None."""
    for entry in fields(config):
        value = getattr(config, entry.name)
        if _KEY in entry.metadata and value is not None:
            yield entry.name, entry.metadata[_KEY], value


def read_options(config: type[Config], document: Mapping[str, Any], where: str) -> Config:
    """Return ``config`` made of the keys of ``document``, nested tables included.

    Raises ``ConfigError`` beginning with ``where``: for an unknown key, with the nearest one, and
    for a value of another type or out of range.
    """
    hints = get_type_hints(config)
    for key, value in document.items():
        if key not in hints:
            (nearest,) = difflib.get_close_matches(key, hints, n=1, cutoff=0.0)
            raise ConfigError(
                f"{where}: unknown key {key!r}; the nearest is {nearest!r} of {', '.join(hints)}"
            )
        if value == "":
            raise ConfigError(f"{where}: {key} must not be empty")
        _read_tables(_without_none(hints[key]), value, where, key)
    try:
        return msgspec.convert(document, config, dec_hook=lambda kind, value: kind(value))
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"{where}: {error}") from error


def _read_tables(kind: Any, value: Any, where: str, key: str) -> None:  # noqa: ANN401
    """Refuse what is wrong within one table or a list of them; pass anything else."""
    is_list = get_origin(kind) is tuple
    inner = get_args(kind)[0] if is_list else kind
    if not is_dataclass(inner) or not isinstance(inner, type):
        return
    label = f"{where}: [[{key}]]" if is_list else f"{where}: [{key}]"
    tables = value if is_list else [value]
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{label}: must be a table")
    for table in tables:
        read_options(inner, table, label)


def _without_none(hint: Any) -> Any:  # noqa: ANN401
    if get_origin(hint) not in (Union, types.UnionType):
        return hint
    (kind,) = (kind for kind in get_args(hint) if kind is not type(None))
    return kind


def is_enum(kind: object) -> bool:
    """Whether ``kind`` is a type of named values."""
    return isinstance(kind, type) and issubclass(kind, enum.Enum)
