"""Flags that are made of a configuration's fields."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kvferry.cli.options import options
from kvferry.errors import ConfigError
from kvferry.options import REQUIRED, option


class _Way(enum.StrEnum):
    ON = "on"
    OFF = "off"


def _pairs(texts: tuple[str, ...]) -> dict[str, str]:
    if not all("=" in text for text in texts):
        raise ConfigError("--pair needs a =")
    return dict(text.split("=") for text in texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Config:
    names: tuple[str, ...] = option(REQUIRED, "Names.", flag="--name")
    count: int = option(3, "How many.", minimum=1, maximum=9)
    share: float = option(0.5, "How much.", above=0, maximum=1)
    threshold: int | None = option(64, "From when on.", none_word="auto")
    way: _Way = option(
        _Way.ON, "Whether.", flag="--way/--no-way", parse=lambda on: _Way.ON if on else _Way.OFF
    )
    mode: _Way = option(_Way.ON, "Which.", choices=tuple(_Way))
    cache: bool = option(True, "Have none.", flag="--no-cache")
    loud: bool = option(False, "Be loud.")
    folder: Path | None = option(None, "Where.", default_text="here")
    pairs: Mapping[str, str] = option(
        REQUIRED, "Pairs.", flag="--pair", parse=_pairs, default_factory=dict
    )
    hidden: int = option(1, "Not for the command line.", flag="")


def _run(*arguments: str) -> tuple[_Config | None, str]:
    made: list[_Config] = []

    @click.command()
    @options(_Config, "config")
    def command(config: _Config) -> None:
        made.append(config)

    result = CliRunner().invoke(command, arguments)
    if isinstance(result.exception, ConfigError):
        raise result.exception
    return (made[0] if made else None), result.output


def test_what_is_not_given_has_its_default() -> None:
    assert _run("--name", "a") == (_Config(names=("a",), pairs={}), "")


def test_everything_may_be_given() -> None:
    arguments = ["--name", "a", "--name", "b", "--count", "9", "--share", "1", "--threshold", "5"]
    arguments += ["--no-way", "--mode", "off", "--no-cache", "--loud", "--folder", "/x"]
    assert _run(*arguments, "--pair", "a=1", "--pair", "b=2")[0] == _Config(
        names=("a", "b"),
        count=9,
        share=1.0,
        threshold=5,
        way=_Way.OFF,
        mode=_Way.OFF,
        cache=False,
        loud=True,
        folder=Path("/x"),
        pairs={"a": "1", "b": "2"},
    )


def test_a_word_may_stand_for_none() -> None:
    config, _ = _run("--name", "a", "--threshold", "auto")
    assert config is not None
    assert config.threshold is None


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "Missing option '--name'"),
        (("--name", "a", "--count", "0"), "'--count': 0 is not in the range 1<=x<=9"),
        (("--name", "a", "--share", "0"), "'--share': 0.0 is not in the range 0<x<=1"),
        (("--name", "a", "--mode", "in"), "'in' is not one of 'on', 'off'"),
        (("--name", "a", "--threshold", "few"), "'few' is neither a number of tokens nor auto"),
        (("--name", "a", "--conut", "1"), "'--count'"),
        (("--name", "a", "--hidden", "1"), "No such option"),
    ],
)
def test_what_is_wrong_is_refused_as_usage(arguments: tuple[str, ...], told: str) -> None:
    config, output = _run(*arguments)
    assert config is None
    assert told in output


def test_what_a_value_is_made_of_may_be_refused() -> None:
    with pytest.raises(ConfigError, match="needs a ="):
        _run("--name", "a", "--pair", "x")


def test_help_tells_help_default_and_range() -> None:
    shown = " ".join(_run("--help")[1].split())
    assert "--count INTEGER RANGE How many. [default: 3; 1<=x<=9]" in shown
    assert "--way / --no-way Whether. [default: way]" in shown
    assert "--threshold N|AUTO From when on. [default: 64]" in shown
    assert "--mode [on|off] Which. [default: on]" in shown
    assert "--folder FILE Where. [default: here]" in shown
    assert "--no-cache Have none. --loud" in shown


def test_a_command_may_take_a_few_options_and_values_as_they_are() -> None:
    seen: list[dict[str, object]] = []

    @click.command()
    @options(_Config, "first", build=dict, names=("count", "folder"))
    @options(_Config, "second", build=dict, names=("share",))
    def command(first: dict[str, object], second: dict[str, object]) -> None:
        seen.extend((first, second))

    assert CliRunner().invoke(command, ["--share", "0.25"]).exit_code == 0
    assert seen == [{"count": 3}, {"share": 0.25}]
