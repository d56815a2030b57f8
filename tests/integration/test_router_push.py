"""Pushes through the router: what each leg gets and when, and who is chosen."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvferry.protocol.params import KvTransferParams, Mode, Role, parse_params
from kvferry.protocol.signing import SIGNATURE_HEADER, verify
from kvferry.router.config import OnPrefillFailure, RouteMode
from kvferry.router.fleet.registry import Health
from tests.integration.router_setup import Deployment, deployment
from tests.support.scripted_engine import DEFAULT_ANSWER, DEFAULT_EVENTS, Script

_STREAM = {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}}
_WHOLE = {"prompt": "a"}
_BOTH = ("pull", "push")
_HANDOFFS = "kvferry_router_handoffs_total"


async def _answer(world: Deployment, body: object, **headers: str) -> tuple[int, bytes]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with world.post(body, headers=named) as response:
        return response.status, await response.read()


def _modes(world: Deployment) -> list[str]:
    return [each.params["mode"] for each in world.p.received if each.params is not None]


@pytest.mark.parametrize("request_body", [_STREAM, _WHOLE])
async def test_both_legs_are_there_before_either_has_answered(
    request_body: dict[str, object],
) -> None:
    gate = asyncio.Event()
    async with deployment(capabilities=_BOTH) as world:
        world.p.prefill.before_headers = world.d.decode.before_headers = gate
        call = asyncio.create_task(_answer(world, request_body))
        await world.p.wait_until(lambda: world.p.roles() == ["prefill"])
        await world.d.wait_until(lambda: world.d.roles() == ["decode"])
        gate.set()
        expected = b"".join(DEFAULT_EVENTS) if "stream" in request_body else DEFAULT_ANSWER
        assert await call == (200, expected)
        await world.wait_settled()
        assert world.p.ended == world.d.ended == []
        assert await world.outcomes() == {"ok": 1}
        assert await world.metric(_HANDOFFS, mode="push", choice="early") == 1


async def test_the_legs_name_one_transfer_and_each_other() -> None:
    async with deployment(capabilities=_BOTH) as world:
        world.p.epoch = 77
        await world.router.probe_all()
        assert await _answer(world, _STREAM) == (200, b"".join(DEFAULT_EVENTS))
        prefill, decode = dict(world.p.received[0].body), dict(world.d.received[0].body)
        asked = parse_params(prefill.pop("kv_transfer_params"))
        told = decode.pop("kv_transfer_params")
        assert told["on_failure"] == "recompute"
        params = parse_params(told)
        assert asked == KvTransferParams(
            transfer_id=params.transfer_id, role=Role.PREFILL, mode=Mode.PUSH
        )
        assert (params.role, params.mode, params.first_token) == (Role.DECODE, Mode.PUSH, None)
        assert params.peer is not None
        assert (params.peer.instance_id, params.peer.epoch) == ("prefill-0", 77)
        assert params.peer.control_address == "tcp://127.0.0.1:1"
        assert prefill == {"prompt": "a", "stream": False}
        assert decode == _STREAM


async def test_decode_is_told_to_fail_where_the_client_gets_an_error() -> None:
    policy = OnPrefillFailure.ERROR
    async with deployment(capabilities=_BOTH, on_prefill_failure=policy) as world:
        assert (await _answer(world, _WHOLE))[0] == 200
        assert world.d.received[0].body["kv_transfer_params"]["on_failure"] == "error"


async def test_both_legs_are_signed() -> None:
    key = b"k" * 32
    async with deployment(capabilities=_BOTH, cluster_key=key) as world:
        assert (await _answer(world, _WHOLE))[0] == 200
        for received in (*world.p.received, *world.d.received):
            signature = received.headers[SIGNATURE_HEADER]
            signed_id = verify(key, received.raw, signature, time.time())
            assert received.params is not None
            assert signed_id == received.params["transfer_id"]


async def test_what_decode_says_is_not_held_back_for_prefill() -> None:
    prefill_gate, last_gate = asyncio.Event(), asyncio.Event()
    async with deployment(capabilities=_BOTH) as world:
        world.p.prefill.before_headers = prefill_gate
        world.d.decode.before_event = {1: last_gate}
        async with world.post(_STREAM) as response:
            assert await response.content.readany() == DEFAULT_EVENTS[0]
            prefill_gate.set()
            last_gate.set()
            assert await response.read() == b"".join(DEFAULT_EVENTS[1:])
        assert await world.outcomes() == {"ok": 1}


async def test_prefill_that_decode_has_outrun_is_ended() -> None:
    async with deployment(capabilities=_BOTH) as world:
        world.p.prefill.before_headers = asyncio.Event()
        assert (await _answer(world, _STREAM))[0] == 200
        await world.p.wait_until(lambda: world.p.num_left == 1 and len(world.p.ended) == 1)
        await world.wait_settled()
        assert world.d.ended == []
        assert await world.outcomes() == {"ok": 1}


async def test_prefill_that_is_not_needed_is_fine() -> None:
    gate = asyncio.Event()
    async with deployment(capabilities=_BOTH) as world:
        world.p.prefill.body = b'{"choices": [{"index": 0, "finish_reason": "not_needed"}]}'
        world.d.decode.before_headers = gate
        call = asyncio.create_task(_answer(world, _STREAM))
        while not await world.metric("kvferry_router_prefills_not_needed_total"):
            await asyncio.sleep(0)
        gate.set()
        assert (await call)[0] == 200
        await world.wait_settled()
        assert world.p.ended == world.d.ended == []
        assert await world.outcomes() == {"ok": 1}


@pytest.mark.parametrize(
    ("configured", "asked", "used"),
    [
        ("auto", None, "push"),
        ("auto", "pull", "pull"),
        ("pull", None, "pull"),
        ("pull", "push", "push"),
        ("pull", " AUTO", "push"),
        ("push", "pull", "pull"),
    ],
)
async def test_a_request_may_ask_for_its_mode(
    configured: str, asked: str | None, used: str
) -> None:
    async with deployment(capabilities=_BOTH, mode=RouteMode(configured)) as world:
        headers = {} if asked is None else {"X_KVFerry_Mode": asked}
        assert (await _answer(world, _WHOLE, **headers))[0] == 200
        assert _modes(world) == [used]
        assert "X-KVFerry-Mode" not in world.p.received[0].headers
        assert await world.metric(_HANDOFFS, mode=used) == 1


async def test_other_modes_are_refused() -> None:
    async with deployment(capabilities=_BOTH) as world:
        status, body = await _answer(world, _WHOLE, X_KVFerry_Mode="teleport")
        assert status == 400
        assert b"auto, pull, push" in body
        assert world.p.received == world.d.received == []
        assert await world.outcomes() == {"bad_request": 1}


@pytest.mark.parametrize("mode", [RouteMode.AUTO, RouteMode.PUSH])
@pytest.mark.parametrize("capabilities", [None, ("pull",)])
async def test_instances_that_cannot_push_are_pulled_from(
    capabilities: tuple[str, ...] | None, mode: RouteMode
) -> None:
    async with deployment(capabilities=_BOTH, mode=mode) as world:
        world.d.capabilities = capabilities
        await world.router.probe_all()
        assert (await _answer(world, _WHOLE))[0] == 200
        assert _modes(world) == ["pull"]


async def test_push_is_looked_for_where_it_is_wanted() -> None:
    async with deployment(2, 1, capabilities=_BOTH) as world:
        world.p.capabilities = ("pull",)
        await world.router.probe_all()
        for _ in range(4):
            assert (await _answer(world, _WHOLE, X_KVFerry_Mode="push"))[0] == 200
        assert world.p.received == []
        assert len(world.prefill[1].received) == 4
        for _ in range(4):
            assert (await _answer(world, _WHOLE))[0] == 200
        assert _modes(world) == ["pull", "pull"]


async def test_several_sequences_are_not_pushed() -> None:
    async with deployment(capabilities=_BOTH, mode=RouteMode.PUSH) as world:
        assert (await _answer(world, {"prompt": "a", "n": 2}))[0] == 200
        assert (world.p.roles(), world.d.roles()) == ([], ["plain"])


async def test_identity_is_asked_for_again_after_a_failure() -> None:
    async with deployment(capabilities=_BOTH) as world:
        world.p.prefill = Script(reset_before_headers=True)
        gate = world.d.decode.before_headers = asyncio.Event()
        num_asks, world.p.epoch = world.p.num_identity_asks, 2
        call = asyncio.create_task(_answer(world, _WHOLE))
        await world.p.wait_until(lambda: world.p.num_identity_asks > num_asks)
        gate.set()
        assert (await call)[0] == 200
        async with asyncio.timeout(5):
            while (view := world.router.fleet.snapshot().prefill[0]).identity is None:
                await asyncio.sleep(0)
        assert (view.health, view.identity.epoch) == (Health.HEALTHY, 2)


async def test_identity_is_refreshed_at_each_interval() -> None:
    async with deployment(capabilities=_BOTH, health_interval_s=0.02) as world:
        world.d.num_free_blocks = 7
        num_asks = world.d.num_identity_asks
        await world.d.wait_until(lambda: world.d.num_identity_asks >= num_asks + 2)
        identity = world.router.fleet.snapshot().decode[0].identity
        assert identity is not None
        assert (identity.num_blocks, identity.num_free_blocks) == (100, 7)
        async with world.client.get(world.router.url + "/kvferry/fleet") as response:
            shown = (await response.json())["decode"][0]["identity"]
        assert (shown["instance_id"], shown["num_free_blocks"]) == ("decode-0", 7)


async def test_instances_take_turns_at_pushes() -> None:
    async with deployment(2, 2, capabilities=_BOTH) as world:
        for _ in range(6):
            assert (await _answer(world, _WHOLE))[0] == 200
        assert [len(engine.received) for engine in (*world.prefill, *world.decode)] == [3] * 4
        fleet = world.router.fleet.snapshot()
        assert {view.num_inflight for view in (*fleet.prefill, *fleet.decode)} == {0}
