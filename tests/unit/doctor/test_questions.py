"""How answers over HTTP become facts."""

from __future__ import annotations

import json

import msgspec
import pytest

from kvferry.doctor.facts import RoutedInstance
from kvferry.doctor.questions import (
    load_of_metrics,
    parse_info,
    pulls_by_outcome,
)
from kvferry.protocol.keys import UserKeyFile
from tests.unit.doctor.deployment_facts import info_of
from tests.unit.doctor.fake_instance import FakeInstance, Json, served

METRICS = """# HELP vllm:num_requests_running Number of requests
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
kvferry_quarantined_blocks{engine="0",model_name="m"} 3.0
kvferry_handoffs_held{engine="0",model_name="m"} 4.0
kvferry_receives_total{engine="0",mode="pull",model_name="m",outcome="received"} 5.0
kvferry_receives_total{engine="0",mode="push",model_name="m",outcome="received"} 70.0
kvferry_receives_total{engine="0",mode="pull",model_name="m",outcome="slow"} 1.0
kvferry_receives_created{engine="0",mode="pull",model_name="m",outcome="slow"} 1.7e+09
strange_total NaN
"""


def _shown(**changes: object) -> bytes:
    info = info_of("decode")
    shown = msgspec.to_builtins(info, builtin_types=(bytes,))
    shown["fingerprint"] = info.fingerprint.hex()
    return json.dumps({**shown, "num_requests_running": 0, **changes}).encode()


def test_an_instance_is_read_as_it_shows_itself() -> None:
    assert parse_info(_shown()) == (info_of("decode"), "")


@pytest.mark.parametrize(
    "answer",
    [b"", b"[]", b"{}", b"{", _shown(fingerprint="no hex"), _shown(layout=1), _shown(epoch=-1)],
)
def test_what_cannot_be_read_is_said(answer: bytes) -> None:
    info, error = parse_info(answer)
    assert info is None
    assert error


def test_the_load_is_in_the_metrics_of_vllm_and_of_the_plugin() -> None:
    load = load_of_metrics(METRICS)
    assert (load.num_requests_running, load.num_requests_waiting) == (2, 1)
    assert (load.num_handoffs_held, load.num_blocks_quarantined) == (4, 3)
    assert (load.num_blocks_leased, load.num_peers_resting) == (None, None)


def test_pulls_are_counted_by_outcome() -> None:
    assert pulls_by_outcome(METRICS) == {"received": 5, "slow": 1}
    assert pulls_by_outcome("") == {}


_ADVERTISED, _GIVEN = "tcp://10.0.0.1:7001", "tcp://d:7001"


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ({}, {"is_identified": False}),
        ({"identity": {"control_address": _ADVERTISED}}, {"control_address": _ADVERTISED}),
        (
            {"identity": None, "control_address": _GIVEN},
            {"control_address": _GIVEN, "is_control_given": True, "is_identified": False},
        ),
        (
            {"identity": {"control_address": _ADVERTISED}, "control_address": _GIVEN},
            {"control_address": _GIVEN, "is_control_given": True},
        ),
        ({"identity": {}, "control_address": None}, {}),
    ],
    ids=["unknown", "told", "given", "given and told", "neither"],
)
async def test_a_router_shows_which_control_address_it_was_given(
    shown: Json, expected: Json
) -> None:
    router = FakeInstance(
        fleet={"prefill": [], "decode": [{"url": "http://d:1/", "health": "healthy", **shown}]}
    )
    async with served(router) as questions:
        found = await questions.router(router.url)
    assert found is not None
    told = RoutedInstance(url="http://d:1", role="decode", health="healthy", **expected)
    assert found.fleet == (told,)


async def test_where_a_users_key_is_is_read() -> None:
    file = UserKeyFile("/home/a/user-key", 7, "id")
    instance = FakeInstance(info=info_of("decode"), user_key=file)
    async with served(instance) as questions:
        facts = await questions.instance(instance.url)
    assert facts.user_key == file
