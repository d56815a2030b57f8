"""Options: written at a field, checked there, read from tables, told as arguments."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.cluster.topology import InstanceGroup, RouterTopology, Topology
from kvferry.connector.config import ExchangeConfig
from kvferry.engine.config import EngineConfig
from kvferry.errors import ConfigError
from kvferry.options import (
    REQUIRED,
    Configuration,
    check_options,
    flags_of,
    option,
    option_fields,
    read_options,
    same_as,
)
from kvferry.protocol.keys import KeyChoice
from kvferry.router.config import ConversationConfig, RouterConfig
from kvferry.server.config import HttpConfig, InstanceConfig
from kvferry.vllm_plugin.settings import PluginSettings

_ALL: tuple[type[Configuration], ...] = (
    EngineConfig, ExchangeConfig, HttpConfig, InstanceConfig, KeyChoice, RouterConfig,
    ConversationConfig, PluginSettings, Topology, InstanceGroup, RouterTopology,
)  # fmt: skip


class _Colour(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wheel:
    spokes: int = option(8, "How many.", minimum=1, maximum=99)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cart:
    name: str = option(REQUIRED, "What it is called.")
    speed_s: float = option(1.5, "How slow it is.", flag="--slowness", above=0)
    colour: str = option("red", "Which.", choices=tuple(_Colour))
    wheels: tuple[_Wheel, ...] = ()
    spare: _Wheel = field(default_factory=_Wheel)
    load: int | None = option(None, "Of what.", flag="", minimum=0)
    folder: Path | None = option(None, "Where.")

    def __post_init__(self) -> None:
        check_options(self)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"speed_s": 0.0}, "speed_s (--slowness) must be above 0, not 0.0"),
        ({"speed_s": math.nan}, "speed_s (--slowness) must be above 0, not nan"),
        ({"speed_s": math.inf}, "speed_s (--slowness) must be above 0, not inf"),
        ({"colour": "green"}, "colour (--colour) must be one of red, blue, not 'green'"),
        ({"load": -1}, "load must be at least 0, not -1"),
    ],
)
def test_a_wrong_value_is_refused_by_both_names(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _Cart(name="x", **values)
    assert str(caught.value) == told


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ({"minimum": 1}, "at least 1"),
        ({"minimum": 0, "maximum": 65_535}, "0 to 65535"),
        ({"above": 0, "maximum": 1}, "above 0 and at most 1"),
        ({"maximum": 3}, "at most 3"),
        ({}, "a finite number"),
    ],
)
def test_ranges_in_words(rules: dict[str, Any], text: str) -> None:
    @dataclass
    class Config:
        value: float = option(1.0, "", **rules)

    (entry,) = option_fields(Config)
    assert entry.option.range_text == text


def test_the_same_option_elsewhere_has_help_range_and_default_but_what_is_changed() -> None:
    @dataclass
    class Other:
        speed_s: float = same_as(_Cart, "speed_s")
        slow_s: float | None = same_as(_Cart, "speed_s", default=None, help="How slow.")

    first, second = option_fields(Other)
    assert (first.default, first.option.help, first.flag) == (1.5, "How slow it is.", "--slowness")
    assert (second.default, second.option.help, second.option.above) == (None, "How slow.", 0)


def test_tables_become_configurations() -> None:
    document = {"name": "a", "wheels": [{"spokes": 3}, {}], "spare": {"spokes": 4}, "folder": "/x"}
    assert read_options(_Cart, document, "file") == _Cart(
        name="a", wheels=(_Wheel(spokes=3), _Wheel()), spare=_Wheel(spokes=4), folder=Path("/x")
    )


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ({"nmae": "a"}, "file: unknown key 'nmae'; the nearest is 'name' of name, speed_s, "),
        ({"name": ""}, "file: name must not be empty"),
        ({"name": "a", "spare": {"spoke": 1}}, "file: [spare]: unknown key 'spoke'"),
        ({"name": "a", "wheels": {"spokes": 1}}, "file: [[wheels]]: must be a table"),
        ({"name": "a", "wheels": [{"spokes": "x"}]}, "file: [[wheels]]: Expected `int`"),
        ({"name": "a", "speed_s": -1}, "file: speed_s (--slowness) must be above 0"),
        ({}, "file: Object missing required field `name`"),
    ],
)
def test_wrong_tables_are_refused_with_their_place(document: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_options(_Cart, document, "file")
    assert str(caught.value).startswith(told)


def test_arguments_say_what_is_set_and_has_a_flag() -> None:
    cart = _Cart(name="a", colour="blue", load=3)
    assert flags_of(cart) == ["--name", "a", "--slowness", "1.5", "--colour", "blue"]


@pytest.mark.parametrize("config", _ALL, ids=lambda config: config.__name__)
def test_every_option_is_explained_and_its_default_is_allowed(config: type[Configuration]) -> None:
    for entry in option_fields(config):
        assert entry.option.help.endswith("."), entry.name
        if entry.default is REQUIRED or entry.default is None:
            continue
        assert entry.option.allows(entry.default), entry.name
        assert msgspec.convert(entry.default, entry.kind) == entry.default, entry.name
