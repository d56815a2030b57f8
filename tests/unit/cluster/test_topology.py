"""The topology file: defaults, overrides, and what is refused with which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.cluster.topology import (
    InstanceGroup,
    RouterTopology,
    Topology,
    load_topology,
    parse_topology,
)
from kvferry.errors import ConfigError

_FULL = """
model = "/models/tiny"
dtype = "float32"
transport = "shm"

[[prefill]]
count = 2
cores = 3
num_blocks = 64
arguments = ["--log-level", "debug"]

[[decode]]
[[decode]]
count = 2
kv_cache_gib = 0.5

[router]
port = 8123
mode = "push"

[[further_routers]]
decode_choice = "late"
"""


def test_default_is_one_of_each_on_loopback() -> None:
    topology = parse_topology("", source="test")
    assert topology == Topology()
    assert topology.host == "127.0.0.1"
    assert (len(topology.prefill), len(topology.decode), topology.router.port) == (1, 1, 0)


def test_full_file() -> None:
    assert parse_topology(_FULL, source="test") == Topology(
        model="/models/tiny",
        dtype="float32",
        transport="shm",
        prefill=(
            InstanceGroup(count=2, cores=3, num_blocks=64, arguments=("--log-level", "debug")),
        ),
        decode=(InstanceGroup(), InstanceGroup(count=2, kv_cache_gib=0.5)),
        router=RouterTopology(port=8123, mode="push"),
        further_routers=(RouterTopology(decode_choice="late"),),
    )


def test_first_router_is_the_one_that_clients_are_told_of() -> None:
    assert [router.port for router in parse_topology(_FULL, source="test").routers] == [8123, 0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("modle = 'x'", ["unknown key 'modle'", "the nearest is 'model'"]),
        ("[[prefil]]\ncount = 1", ["unknown key 'prefil'", "'prefill'"]),
        ("[[decode]]\ncuont = 1", ["[[decode]]", "'cuont'", "'count'"]),
        ("[router]\nprot = 1", ["[router]", "'prot'", "'port'"]),
        ("zzzz = 1", ["of model, dtype, transport"]),
        ("[prefill]\ncount = 1", ["[[prefill]]", "must be a table"]),
        ("router = 3", ["[router]", "must be a table"]),
        ("[[prefill]]\ncount = 'two'", ["prefill", "count"]),
        ("[[prefill]]\ncount = 0", ["no prefill instance"]),
        (
            "[[decode]]\ncount = -1\n[[decode]]\ncount = 3",
            ["[[decode]]: count must be at least 0, not -1"],
        ),
        ("[[decode]]\ncores = 0", ["[[decode]]: cores must be at least 1, not 0"]),
        ("[[decode]]\nnum_blocks = 1\nkv_cache_gib = 1.0", ["num_blocks and kv_cache_gib"]),
        ("[[further_routers]]\nmoed = 1", ["[[further_routers]]", "'moed'", "'mode'"]),
        ("[router]\nmode = 'shove'", ["[router]: mode must be one of", "pull, push, not 'shove'"]),
        (
            "[[further_routers]]\ndecode_choice = 'x'",
            ["[[further_routers]]: decode_choice must be", "early, late, not 'x'"],
        ),
        ("[router]\nport = 70000", ["[router]: port must be 0 to 65535, not 70000"]),
        ("model = ", ["not TOML"]),
    ],
)
def test_mistakes_are_named(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_topology(text, source="shape.toml")
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        load_topology(tmp_path / "absent.toml")


def test_counts_override_the_groups() -> None:
    changed = parse_topology(_FULL, source="test").with_counts(prefill=1, decode=5)
    assert [group.count for group in changed.prefill] == [1]
    assert changed.prefill[0].num_blocks == 64
    assert [group.count for group in changed.decode] == [5]


def test_counts_that_are_not_given_change_nothing() -> None:
    topology = parse_topology(_FULL, source="test")
    assert topology.with_counts() == topology


def test_engine_arguments_reach_every_group() -> None:
    changed = parse_topology(_FULL, source="test").with_engine_arguments("--ucx-tls", "tcp")
    assert changed.prefill[0].arguments == ("--log-level", "debug", "--ucx-tls", "tcp")
    assert [group.arguments for group in changed.decode] == [("--ucx-tls", "tcp")] * 2
