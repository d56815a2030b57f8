"""Who is asked, and which pairs are tried."""

from __future__ import annotations

import random
import socket
from dataclasses import replace

import msgspec
import pytest

from kvferry.client.control_answer import ControlEnd
from kvferry.doctor.deployment_checks import findings_of
from kvferry.doctor.examination import examine, fitting_directions
from kvferry.doctor.facts import (
    Assignment,
    DeploymentFacts,
    HandoffPlan,
    InstanceFacts,
    RoutedInstance,
    RouterFacts,
)
from kvferry.doctor.finding import Result
from kvferry.errors import ConfigError
from kvferry.protocol.messages import InstanceInfo
from tests.unit.client.served_control_port import TIMEOUT_S, Serve, with_info
from tests.unit.doctor.deployment_facts import LAYOUT, info_of, instance_of, with_http
from tests.unit.doctor.fake_instance import FakeInstance, offering_as, served

P0, P1, D0 = (instance_of(info_of(name)) for name in ("prefill-0", "prefill-1", "decode-0"))


def _directions(*instances: InstanceFacts, routers: tuple[RouterFacts, ...] = ()) -> set[str]:
    facts = DeploymentFacts(instances=instances, routers=routers)
    return {f"{source.name} {target.name}" for source, target in fitting_directions(facts)}


def test_both_directions_of_every_pair() -> None:
    assert _directions(P0, D0) == {"prefill-0 decode-0", "decode-0 prefill-0"}
    assert len(_directions(P0, P1, D0)) == 6


def test_a_router_never_hands_over_between_two_of_one_role() -> None:
    roles = ((P0, "prefill"), (P1, "prefill"), (D0, "decode"))
    fleet = tuple(RoutedInstance(url=i.url, role=role, health="healthy") for i, role in roles)
    router = RouterFacts(url="http://r", clock_ahead_s=None, fleet=fleet)
    found = _directions(P0, P1, D0, routers=(router,))
    assert found == {
        "prefill-0 decode-0", "decode-0 prefill-0", "prefill-1 decode-0", "decode-0 prefill-1",
    }  # fmt: skip
    further = instance_of(info_of("further"))
    assert len(_directions(P0, P1, D0, further, routers=(router,))) == 10


def test_what_does_not_fit_is_not_tried() -> None:
    other = instance_of(info_of("other", msgspec.structs.replace(LAYOUT, kv_dtype="bfloat16")))
    shm = instance_of(info_of("shm", transport="shm"))
    nameless = with_http(D0, replace(D0.http, model=""))
    unknown = replace(D0, control=None, http=replace(D0.http, info=None))
    same = replace(P0, url="http://localhost:1")
    for misfit in (other, shm, nameless, unknown, same):
        assert not _directions(P0, misfit)


def test_another_model_name_fits() -> None:
    named = instance_of(info_of("named", msgspec.structs.replace(LAYOUT, model_name="copy")))
    assert len(_directions(P0, named)) == 2


async def test_a_router_names_its_instances_and_their_control_ports() -> None:
    prefill, decode = FakeInstance(), FakeInstance()
    router = FakeInstance()
    async with served(prefill, decode):
        routed = {"url": f"{prefill.url}/", "health": "healthy", "identity": None}
        with socket.socket() as unheard:
            unheard.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{unheard.getsockname()[1]}"
            told = {"url": decode.url, "health": "down", "identity": {"control_address": address}}
            router.fleet = {"prefill": [routed], "decode": [told]}
            async with served(router):
                assignment = Assignment(
                    urls=(router.url, decode.url), control_addresses={}, timeout_s=2.0
                )
                facts = await examine(assignment, random.Random(1), lambda _: None)
    assert [item.url for item in facts.instances] == [decode.url, prefill.url]
    asked, unasked = facts.instances
    assert asked.control is not None
    assert (asked.control.address, asked.control.end) == (address, ControlEnd.NOBODY)
    assert unasked.control is None
    assert unasked.http.engine == "vLLM 0.32.0"
    assert [item.health for item in facts.routers[0].fleet] == ["healthy", "down"]
    assert facts.host is not None


def _info_served(serve: Serve, name: str) -> InstanceInfo:
    """What an instance with a control port says of itself, once its address is known."""
    told = [info_of(name)]
    address = serve(None, lambda server: with_info(told[0])(server))
    told[0] = info_of(name, control_address=address)
    return told[0]


async def test_swapped_control_ports_are_found_by_who_answers_a_prefill(serve: Serve) -> None:
    infos = [_info_served(serve, name) for name in ("prefill", "decode")]
    addresses = [info.control_address for info in infos]
    instances = [FakeInstance(prefill=offering_as(info), counts="received") for info in infos]
    async with served(*instances):
        urls = tuple(item.url for item in instances)
        assignment = Assignment(
            urls=urls,
            control_addresses=dict(zip(urls, reversed(addresses), strict=True)),
            timeout_s=TIMEOUT_S,
            handoffs=HandoffPlan(num_tokens=256),
        )
        facts = await examine(assignment, random.Random(1), lambda _: None)
    swapped = [
        item
        for item in findings_of(facts)
        if item.check == "control port" and item.result is Result.FAILED
    ]
    assert [item.subject for item in swapped] == list(urls)
    assert all("answers as" in item.found for item in swapped)


async def test_a_control_address_that_only_a_router_was_given_is_asked(serve: Serve) -> None:
    info = info_of("decode")
    address = serve(b"k" * 32, with_info(info))
    prefill, decode, router = FakeInstance(), FakeInstance(), FakeInstance()
    async with served(prefill, decode):
        shown = {"health": "healthy", "identity": None, "detail": "no answer within 2 s"}
        router.fleet = {
            "prefill": [{"url": prefill.url, "health": "healthy"}],
            "decode": [{"url": decode.url, "control_address": address, **shown}],
        }
        async with served(router):
            assignment = Assignment(urls=(router.url,), control_addresses={}, timeout_s=TIMEOUT_S)
            facts = await examine(assignment, random.Random(1), lambda _: None)
    asked = facts.instance(decode.url)
    assert asked.control is not None
    assert (asked.control.address, asked.control.end) == (address, ControlEnd.KEY_WANTED)
    failed = {item.check for item in findings_of(facts) if item.result is Result.FAILED}
    assert failed == {"router", "control port"}


async def test_a_control_port_of_no_instance_is_refused() -> None:
    instance = FakeInstance()
    async with served(instance):
        assignment = Assignment(
            urls=(instance.url,), control_addresses={"http://other:1": "tcp://other:2"}
        )
        with pytest.raises(ConfigError, match="http://other:1"):
            await examine(assignment, random.Random(1), lambda _: None)
