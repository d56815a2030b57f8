"""Cores and command lines: what the topology says, and only flags that the commands have."""

from __future__ import annotations

import itertools
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cli.main import build_command
from kvferry.cluster.plan import assign_cores, engine_arguments, router_arguments
from kvferry.cluster.topology import InstanceGroup, RouterTopology, Topology

_READY = Path("/run/x.ready.json")
_LATE = RouterTopology(mode="push", decode_choice="late")
_FULL = InstanceGroup(cores=2, num_blocks=8, arguments=("--log-level", "debug"))


def test_defaults_are_left_to_the_engine() -> None:
    arguments = engine_arguments(Topology(), InstanceGroup(), "prefill-0", _READY)
    assert arguments[:3] == ["engine", "serve", "smollm2-135m"]
    assert not {"--transport", "--dtype", "--num-blocks", "--kv-cache-gib"} & set(arguments)


def test_what_is_set_is_passed_on() -> None:
    topology = Topology(transport="shm", dtype="float32")
    arguments = engine_arguments(topology, _FULL, "decode-1", _READY)
    pairs = dict(itertools.pairwise(arguments))
    assert pairs["--transport"] == "shm"
    assert pairs["--dtype"] == "float32"
    assert pairs["--num-blocks"] == "8"
    assert pairs["--threads"] == "2"
    assert pairs["--instance-id"] == "decode-1"
    assert pairs["--ready-file"] == str(_READY)
    assert arguments[-2:] == ["--log-level", "debug"]


def test_instances_stay_on_loopback_whatever_the_routers_host() -> None:
    arguments = engine_arguments(Topology(host="0.0.0.0"), InstanceGroup(), "prefill-0", _READY)
    assert dict(itertools.pairwise(arguments))["--host"] == "127.0.0.1"


def test_router_knows_every_instance() -> None:
    arguments = router_arguments(
        "127.0.0.1",
        RouterTopology(port=81),
        prefill=["http://a:1"],
        decode=["http://b:2", "http://c:3"],
        ready_path=_READY,
    )
    assert arguments[0] == "router"
    assert arguments[arguments.index("--port") + 1] == "81"
    urls = [(arguments[i - 1], word) for i, word in enumerate(arguments) if "http" in word]
    assert urls == [
        ("--prefill", "http://a:1"),
        ("--decode", "http://b:2"),
        ("--decode", "http://c:3"),
    ]


def test_router_s_choices_are_its_own_unless_set() -> None:
    def flags(router: RouterTopology) -> set[str]:
        arguments = router_arguments("::1", router, prefill=["a"], decode=["b"], ready_path=_READY)
        return {"--mode", "--decode-choice"} & set(arguments)

    assert flags(RouterTopology()) == set()
    assert flags(RouterTopology(mode="push")) == {"--mode"}
    assert flags(_LATE) == {"--mode", "--decode-choice"}


@pytest.mark.parametrize("group", [_FULL, InstanceGroup(kv_cache_gib=0.5)])
def test_commands_accept_the_arguments(group: InstanceGroup) -> None:
    topology = Topology(transport="shm", dtype="float32")
    command: click.Command = build_command()
    for words in (
        engine_arguments(topology, group, "decode-1", _READY),
        router_arguments(
            "::1", _LATE, prefill=["http://a"], decode=["http://b"], ready_path=_READY
        ),
    ):
        found, rest = command, words
        while isinstance(found, click.Group):
            child = found.get_command(click.Context(found), rest[0])
            assert child is not None
            found, rest = child, rest[1:]
        found.make_context("kvferry", list(rest))


@pytest.mark.parametrize(
    ("wanted", "available", "dealt"),
    [
        ([1, 1], [0, 1], ((0,), (1,))),
        ([1, 1], [4, 7], ((4,), (7,))),
        ([1, 1], [3], ((), ())),
        ([1], [], ((),)),
        ([1, 1, 1, 1], [0, 1], ((0,), (1,), (0,), (1,))),
        ([2, 2], [0, 1, 2, 3], ((0, 1), (2, 3))),
        ([3, 1], [0, 1], ((0, 1), (0,))),
        ([2, 2], [0, 1, 2], ((0, 1), (0, 2))),
    ],
)
def test_assignment(
    wanted: list[int], available: list[int], dealt: tuple[tuple[int, ...], ...]
) -> None:
    assert assign_cores(wanted, available) == list(dealt)


@given(
    wanted=st.lists(st.integers(1, 6), max_size=6),
    available=st.lists(st.integers(0, 63), min_size=2, max_size=8, unique=True),
)
def test_everyone_gets_what_there_is(wanted: list[int], available: list[int]) -> None:
    for count, cores in zip(wanted, assign_cores(wanted, available), strict=True):
        assert len(set(cores)) == len(cores) == min(count, len(available))
        assert set(cores) <= set(available)
