"""Pushes that go wrong: prefill or decode refuses, breaks or stalls, or the client leaves."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import pytest

from kvferry.router.config import OnPrefillFailure
from tests.integration.router_setup import Deployment, deployment, events_of
from tests.integration.test_router_cancel import Caller
from tests.support.scripted_engine import DEFAULT_ANSWER, DEFAULT_EVENTS, Received, Script

_STREAM = {"prompt": "a", "stream": True}
_WHOLE = {"prompt": "a"}
_BOTH = ("pull", "push")
_FAILING = [
    Script(reset_before_headers=True),
    Script(status=500, body=b'{"error":  "disk"}'),
    Script(status=503),
]
_AT_ONCE_S = 1.0


async def _answer(world: Deployment, body: object) -> tuple[int, bytes]:
    async with world.post(body) as response:
        return response.status, await response.read()


def _id(received: Received) -> str:
    assert received.params is not None
    return str(received.params["transfer_id"])


async def _wait_metric(world: Deployment, name: str, **labels: str) -> None:
    async with asyncio.timeout(5):
        while not await world.metric(name, **labels):
            await asyncio.sleep(0)


# -- prefill ----------------------------------------------------------------------------------
@pytest.mark.parametrize("request_body", [_STREAM, _WHOLE])
async def test_refusal_by_prefill_ends_decode_and_passes_byte_for_byte(
    request_body: dict[str, object],
) -> None:
    refusal = b'{"error" :  {"message": "too long: 5000 > 4096"}}'
    async with deployment(capabilities=_BOTH) as world:
        gate = asyncio.Event()
        world.p.prefill = Script(status=400, body=refusal, before_headers=gate)
        world.d.decode.before_headers = asyncio.Event()
        call = asyncio.create_task(_answer(world, request_body))
        await world.d.wait_until(lambda: len(world.d.received) == 1)
        gate.set()
        assert await call == (400, refusal)
        await world.d.wait_until(lambda: world.d.num_left == 1)
        await world.wait_settled()
        assert world.d.ended == [_id(world.d.received[0])]
        assert await world.outcomes() == {"bad_request": 1}


@pytest.mark.parametrize("fault", _FAILING)
async def test_decode_goes_on_when_prefill_has_failed(fault: Script) -> None:
    gate = asyncio.Event()
    async with deployment(2, capabilities=_BOTH) as world:
        world.p.prefill = fault
        world.d.decode.before_headers = gate
        call = asyncio.create_task(_answer(world, _WHOLE))
        await world.p.wait_until(lambda: len(world.p.ended) == 1)  # who waits there is told
        gate.set()
        assert await call == (200, DEFAULT_ANSWER)
        await world.wait_settled()
        assert len(world.d.received) == 1
        assert (world.d.ended, world.prefill[1].received) == ([], [])
        assert await world.outcomes() == {"fallback_decode_only": 1}
        reasons = "kvferry_router_plain_decodes_total"
        assert await world.metric(reasons, reason="prefill_failed") == 1


@pytest.mark.parametrize("fault", _FAILING)
async def test_failed_prefill_is_an_error_where_so_configured(fault: Script) -> None:
    policy = OnPrefillFailure.ERROR
    async with deployment(2, capabilities=_BOTH, on_prefill_failure=policy) as world:
        world.p.prefill = fault
        world.d.decode.before_headers = asyncio.Event()
        status, body = await _answer(world, _STREAM)
        if fault.body is not None:
            assert (status, body) == (500, fault.body)
        else:
            assert status in (502, 503)
            assert "error" in json.loads(body)
        await world.d.wait_until(lambda: world.d.num_left == 1)
        await world.wait_settled()
        assert world.p.ended == world.d.ended == [_id(world.d.received[0])]
        assert world.prefill[1].received == []
        assert await world.outcomes() == {"prefill_failed": 1}


@pytest.mark.parametrize("fault", _FAILING)
async def test_both_legs_begin_again_with_another_prefill_instance(fault: Script) -> None:
    policy = OnPrefillFailure.RETRY
    async with deployment(2, capabilities=_BOTH, on_prefill_failure=policy) as world:
        world.p.prefill = fault
        world.d.once.append(Script(before_headers=asyncio.Event()))
        assert await _answer(world, _STREAM) == (200, b"".join(DEFAULT_EVENTS))
        first, second = world.d.received
        assert _id(first) != _id(second)
        assert [_id(world.p.received[0]), _id(world.prefill[1].received[0])] == [
            _id(first), _id(second),
        ]  # fmt: skip
        assert second.body["kv_transfer_params"]["peer"]["instance_id"] == "prefill-1"
        await world.d.wait_until(lambda: world.d.num_left == 1)
        await world.wait_settled()
        assert world.p.ended == world.d.ended == [_id(first)]
        assert world.prefill[1].ended == []
        assert await world.outcomes() == {"ok": 1}
        assert await world.metric("kvferry_router_leg_retries_total", leg="prefill") == 1


async def test_decode_does_it_all_when_the_second_attempt_fails_too() -> None:
    policy = OnPrefillFailure.RETRY
    gate = asyncio.Event()
    async with deployment(2, capabilities=_BOTH, on_prefill_failure=policy) as world:
        for engine in world.prefill:
            engine.prefill = Script(status=500)
        world.d.decode.before_headers = gate
        call = asyncio.create_task(_answer(world, _STREAM))
        second = world.prefill[1]
        await second.wait_until(lambda: len(second.ended) == 1)
        gate.set()
        assert (await call)[0] == 200
        assert [len(engine.received) for engine in world.prefill] == [1, 1]
        assert await world.outcomes() == {"fallback_decode_only": 1}


async def test_full_prefill_instance_is_passed_over() -> None:
    async with deployment(2, capabilities=_BOTH) as world:
        world.p.prefill = Script(status=429)
        world.d.once.append(Script(before_headers=asyncio.Event()))
        assert (await _answer(world, _WHOLE))[0] == 200
        assert len(world.prefill[1].received) == 1
        assert await world.outcomes() == {"ok": 1}


async def test_push_back_of_all_reaches_the_client() -> None:
    async with deployment(2, capabilities=_BOTH) as world:
        for engine in world.prefill:
            engine.prefill = Script(status=429, body=b"{}", headers={"Retry-After": "7"})
        world.d.decode.before_headers = asyncio.Event()
        async with world.post(_WHOLE) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "7")
        await world.wait_settled()
        assert len(world.d.ended) == 2
        assert await world.outcomes() == {"overloaded": 1}


async def test_silent_prefill_is_given_up_and_decode_has_its_own_bound() -> None:
    gate = asyncio.Event()
    async with deployment(capabilities=_BOTH, prefill_timeout_s=0.3) as world:
        world.p.prefill.before_headers = asyncio.Event()
        world.d.decode.before_headers = gate
        call = asyncio.create_task(_answer(world, _STREAM))
        await world.p.wait_until(lambda: world.p.num_left == 1)
        gate.set()
        assert (await call)[0] == 200
        assert await world.outcomes() == {"fallback_decode_only": 1}


async def test_silent_decode_ends_within_its_bound_after_prefill() -> None:
    async with deployment(capabilities=_BOTH, prefill_timeout_s=0.2) as world:
        world.d.decode.before_event = {0: asyncio.Event()}
        status, body = await _answer(world, _STREAM)
        assert (status, json.loads(body)["error"]["code"]) == (504, "timeout")
        await world.d.wait_until(lambda: world.d.num_left == 1)
        await world.wait_settled()
        assert world.p.ended == world.d.ended == [_id(world.d.received[0])]


async def test_strange_prefill_answer_leaves_it_to_decode() -> None:
    gate = asyncio.Event()
    async with deployment(capabilities=_BOTH) as world:
        world.p.prefill.offers = False
        world.d.decode.before_headers = gate
        call = asyncio.create_task(_answer(world, _STREAM))
        await world.p.wait_until(lambda: len(world.p.ended) == 1)
        gate.set()
        assert (await call)[0] == 200
        assert await world.outcomes() == {"fallback_decode_only": 1}


# -- decode -----------------------------------------------------------------------------------
@pytest.mark.parametrize("is_prefill_done", [False, True])
@pytest.mark.parametrize("fault", [*_FAILING, Script(status=429)])
async def test_decode_is_begun_elsewhere_for_the_same_transfer(
    fault: Script, is_prefill_done: bool
) -> None:
    async with deployment(1, 2, capabilities=_BOTH) as world:
        gate = asyncio.Event()
        first, second = world.decode
        if is_prefill_done:
            first.decode = dataclasses.replace(fault, before_headers=gate)
        else:
            first.decode = fault
            world.p.prefill.before_headers = gate
        call = asyncio.create_task(_answer(world, _WHOLE))
        if is_prefill_done:
            seconds = "kvferry_router_leg_seconds_count"
            await _wait_metric(world, seconds, leg="prefill")
        else:
            await second.wait_until(lambda: len(second.received) == 1)
        gate.set()
        assert await call == (200, DEFAULT_ANSWER)
        told, again = first.received[0].params, second.received[0].params
        assert told is not None
        assert again is not None
        shared = ("transfer_id", "mode", "role", "peer")
        assert [told[name] for name in shared] == [again[name] for name in shared]
        assert ("first_token" in told, "first_token" in again) == (False, is_prefill_done)
        assert len(world.p.received) == 1
        assert await world.outcomes() == {"ok": 1}
        assert await world.metric("kvferry_router_leg_retries_total", leg="decode") == 1


async def test_broken_decode_is_a_clear_error_and_ends_prefill() -> None:
    async with deployment(1, 2, capabilities=_BOTH) as world:
        world.p.prefill.before_headers = asyncio.Event()
        for engine in world.decode:
            engine.decode = Script(reset_before_headers=True)
        status, body = await _answer(world, _STREAM)
        assert (status, json.loads(body)["error"]["code"]) == (502, "decode_failed")
        await world.p.wait_until(lambda: world.p.num_left == 1)
        await world.wait_settled()
        ids = [_id(world.p.received[0])]
        assert world.p.ended == world.d.ended == world.decode[1].ended == ids
        assert await world.outcomes() == {"decode_failed": 1}


async def test_decode_that_fails_after_prefill_has_is_a_clear_error() -> None:
    gate = asyncio.Event()
    async with deployment(1, 2, capabilities=_BOTH) as world:
        world.p.prefill = Script(status=500)
        world.d.decode = Script(status=500, before_headers=gate)
        call = asyncio.create_task(_answer(world, _STREAM))
        await world.p.wait_until(lambda: len(world.p.ended) == 1)
        gate.set()
        assert (await call)[0] == 500
        assert world.decode[1].received == []
        assert await world.outcomes() == {"decode_failed": 1}


async def test_refusal_by_decode_ends_prefill() -> None:
    async with deployment(capabilities=_BOTH) as world:
        world.p.prefill.before_headers = asyncio.Event()
        world.d.decode = Script(status=422, body=b"{ }")
        assert await _answer(world, _STREAM) == (422, b"{ }")
        await world.p.wait_until(lambda: world.p.num_left == 1 and len(world.p.ended) == 1)
        assert await world.outcomes() == {"bad_request": 1}


async def test_decode_that_dies_in_its_stream_ends_in_an_event_that_parses() -> None:
    async with deployment(1, 2, capabilities=_BOTH) as world:
        world.d.decode = Script(reset_after_events=1)
        events = events_of((await _answer(world, _STREAM))[1])
        assert events[-1]["error"]["code"] == "decode_failed"
        assert world.decode[1].received == []
        await world.wait_settled()
        assert world.p.ended == world.d.ended == [_id(world.p.received[0])]


# -- clients ----------------------------------------------------------------------------------
@pytest.mark.parametrize("request_body", [_STREAM, _WHOLE])
@pytest.mark.parametrize("is_prefill_done", [False, True])
async def test_client_that_leaves_ends_both_legs(
    request_body: dict[str, object], is_prefill_done: bool
) -> None:
    async with deployment(capabilities=_BOTH) as world:
        world.d.decode.before_headers = asyncio.Event()
        if not is_prefill_done:
            world.p.prefill.before_headers = asyncio.Event()
        caller = await Caller.call(world, request_body)
        await world.p.wait_until(lambda: len(world.p.received) == 1)
        await world.d.wait_until(lambda: len(world.d.received) == 1)
        if is_prefill_done:
            await _wait_metric(world, "kvferry_router_leg_seconds_count", leg="prefill")
        await caller.leave()
        async with asyncio.timeout(_AT_ONCE_S):
            await world.d.wait_until(lambda: world.d.num_left == 1 and len(world.d.ended) == 1)
            num_left = 0 if is_prefill_done else 1
            await world.p.wait_until(
                lambda: world.p.num_left == num_left and len(world.p.ended) == 1
            )
        when = "after_prefill" if is_prefill_done else "before_prefill_done"
        assert await world.outcomes() == {f"client_gone_{when}": 1}
        world.assert_nothing_held()


async def test_client_that_leaves_its_stream_ends_both_legs() -> None:
    async with deployment(capabilities=_BOTH) as world:
        world.p.prefill.before_headers = asyncio.Event()
        world.d.decode.before_event = {1: asyncio.Event()}
        caller = await Caller.call(world, _STREAM)
        await caller.reader.readuntil(b"one")
        await caller.leave()
        async with asyncio.timeout(_AT_ONCE_S):
            for engine in (world.p, world.d):
                await engine.wait_until(
                    lambda engine=engine: engine.num_left == 1 and len(engine.ended) == 1  # type: ignore[misc]
                )
        assert await world.outcomes() == {"client_gone_streaming": 1}


async def test_a_whole_request_ends_within_its_bound() -> None:
    async with deployment(capabilities=_BOTH, request_timeout_s=0.3) as world:
        world.p.prefill.before_headers = world.d.decode.before_headers = asyncio.Event()
        assert (await _answer(world, _STREAM))[0] == 504
        for engine in (world.p, world.d):
            await engine.wait_until(lambda engine=engine: engine.num_left == 1)  # type: ignore[misc]
        await world.wait_settled()
        assert world.p.ended == world.d.ended == [_id(world.p.received[0])]
        assert await world.outcomes() == {"timeout": 1}
