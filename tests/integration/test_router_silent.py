"""Instances that keep their connections open and say nothing: what waits for them ends, and soon.

Here an instance is silent when neither its probes nor a leg are answered; one that is slow answers
its probes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvferry.router.config import OnPrefillFailure
from tests.integration.router_setup import Deployment, deployment, events_of
from tests.support.scripted_engine import (
    DEFAULT_ANSWER,
    DEFAULT_EVENTS,
    Script,
    ScriptedEngine,
)

_STREAM = {"prompt": "a", "stream": True}
_WHOLE = {"prompt": "a"}
_BOTH = ("pull", "push")
_BOUND_S = 10.0
_BUSY_S = 1.0
"""Several times what it takes to find an instance silent."""
_FAILED = "kvferry_router_legs_failed_total"
both_bodies = pytest.mark.parametrize("body", [_STREAM, _WHOLE])


@asynccontextmanager
async def quick_deployment(
    num_prefill: int = 1,
    num_decode: int = 1,
    **options: Any,  # noqa: ANN401 - those of RouterConfig
) -> AsyncIterator[Deployment]:
    """One whose probes are quick, and all of whose other bounds are long."""
    options = {"health_interval_s": 0.05, "health_timeout_s": 0.1, **options}
    async with deployment(num_prefill, num_decode, **options) as world:
        yield world


def fall_silent(engine: ScriptedEngine, *, after_events: int | None = None) -> None:
    """Have it answer no probe and no leg from now on, or no more than that of a stream."""
    never = asyncio.Event()
    engine.health_gate = never
    script = Script(before_headers=never)
    if after_events is not None:
        script = Script(before_event={after_events: never})
    engine.prefill = engine.decode = script


async def answer(
    world: Deployment, body: object, path: str = "/v1/completions"
) -> tuple[int, bytes]:
    async with asyncio.timeout(_BOUND_S), world.post(body, path) as response:
        return response.status, await response.read()


def right(body: object) -> bytes:
    return b"".join(DEFAULT_EVENTS) if body is _STREAM else DEFAULT_ANSWER


def transfer_ids(engine: ScriptedEngine) -> list[str]:
    return [r.params["transfer_id"] for r in engine.received if r.params is not None]


async def silent_legs(world: Deployment, engine: ScriptedEngine) -> float:
    return await world.metric(_FAILED, instance=engine.url, cause="silent")


@both_bodies
async def test_prefill_is_begun_on_another_instance(body: object) -> None:
    async with quick_deployment(2) as world:
        fall_silent(world.p)
        assert await answer(world, body) == (200, right(body))
        await world.wait_settled()
        assert await silent_legs(world, world.p) == 1
        assert world.p.ended == transfer_ids(world.p)
        assert world.p.num_left == 1
        assert len(world.prefill[1].received) == 1
        assert await world.outcomes() == {"ok": 1}


async def test_decode_does_it_all_when_prefill_is_silent() -> None:
    async with quick_deployment() as world:
        fall_silent(world.p)
        assert await answer(world, _WHOLE) == (200, DEFAULT_ANSWER)
        assert world.d.roles() == ["plain"]
        assert await world.outcomes() == {"fallback_decode_only": 1}


async def test_silent_prefill_is_a_clear_error_where_so_configured() -> None:
    async with quick_deployment(on_prefill_failure=OnPrefillFailure.ERROR) as world:
        fall_silent(world.p)
        status, said = await answer(world, _WHOLE)
        assert (status, json.loads(said)["error"]["code"]) == (502, "prefill_failed")
        assert "silent" in json.loads(said)["error"]["message"]
        assert await world.outcomes() == {"prefill_failed": 1}


@pytest.mark.parametrize(("body", "after_events"), [(_STREAM, None), (_STREAM, 0), (_WHOLE, None)])
async def test_decode_is_begun_on_another_instance(body: object, after_events: int | None) -> None:
    async with quick_deployment(1, 2) as world:
        fall_silent(world.d, after_events=after_events)
        assert await answer(world, body) == (200, right(body))
        first, second = world.d.received[0], world.decode[1].received[0]
        assert first.params == second.params
        assert await silent_legs(world, world.d) == 1
        assert await world.outcomes() == {"ok": 1}


@both_bodies
async def test_silent_decode_is_a_clear_error_and_ends_the_handoff(body: object) -> None:
    async with quick_deployment() as world:
        fall_silent(world.d)
        status, said = await answer(world, body)
        assert (status, json.loads(said)["error"]["code"]) == (502, "decode_failed")
        assert "silent" in json.loads(said)["error"]["message"]
        await world.wait_settled()
        assert world.p.ended == world.d.ended == transfer_ids(world.p)
        assert await world.outcomes() == {"decode_failed": 1}


async def test_decode_that_falls_silent_in_its_stream_ends_in_an_event_that_says_so() -> None:
    async with quick_deployment(1, 2) as world:
        for engine in world.decode:
            fall_silent(engine, after_events=1)
        events = events_of((await answer(world, _STREAM))[1])
        assert [event.get("error", {}).get("code") for event in events] == [None, "decode_failed"]
        assert "silent" in events[-1]["error"]["message"]
        await world.d.wait_until(lambda: world.d.num_left == 1)
        assert await world.outcomes() == {"decode_failed": 1}


@both_bodies
async def test_push_goes_on_without_a_silent_prefill(body: object) -> None:
    async with quick_deployment(capabilities=_BOTH) as world:
        fall_silent(world.p)
        world.d.decode.before_headers = gate = asyncio.Event()
        call = asyncio.create_task(answer(world, body))
        await world.p.wait_until(lambda: world.p.num_left == 1)
        gate.set()
        assert await call == (200, right(body))
        assert await silent_legs(world, world.p) == 1
        assert await world.outcomes() == {"fallback_decode_only": 1}


@both_bodies
async def test_push_goes_to_another_instance_than_a_silent_decode(body: object) -> None:
    async with quick_deployment(1, 2, capabilities=_BOTH) as world:
        fall_silent(world.d)
        assert await answer(world, body) == (200, right(body))
        assert transfer_ids(world.d) == transfer_ids(world.decode[1])
        assert await silent_legs(world, world.d) == 1
        assert await world.outcomes() == {"ok": 1}


@both_bodies
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_slow_instance_that_answers_its_probes_is_waited_for(role: str, body: object) -> None:
    async with quick_deployment(2, 2) as world:
        slow = world.p if role == "prefill" else world.d
        slow.prefill = slow.decode = Script(before_headers=(gate := asyncio.Event()))
        call = asyncio.create_task(answer(world, body))
        await asyncio.sleep(_BUSY_S)
        assert not call.done()
        gate.set()
        assert await call == (200, right(body))
        assert await world.metric(_FAILED) == 0
        assert await world.metric("kvferry_router_leg_retries_total") == 0


async def test_instance_that_answers_no_probe_and_streams_is_waited_for() -> None:
    """Its other legs too: something comes from it."""
    num_events = int(_BUSY_S / 0.02)
    async with quick_deployment() as world:
        held = asyncio.Event()
        world.d.once.append(Script(before_headers=held))
        whole = asyncio.create_task(answer(world, _WHOLE))
        await world.d.wait_until(lambda: len(world.d.received) == 1)
        world.d.health_gate = asyncio.Event()
        world.d.decode = Script(events=DEFAULT_EVENTS[:1] * num_events, pause_s=0.02)
        events = events_of((await answer(world, _STREAM))[1])
        assert len(events) == num_events
        world.d.health_gate.set()
        held.set()
        assert await whole == (200, DEFAULT_ANSWER)
        assert await world.metric(_FAILED) == 0


async def test_instance_that_answers_503_is_waited_for() -> None:
    async with quick_deployment() as world:
        world.d.decode.before_headers = gate = asyncio.Event()
        call = asyncio.create_task(answer(world, _WHOLE))
        await world.d.wait_until(lambda: len(world.d.received) == 1)
        world.d.health_status = 503
        await asyncio.sleep(_BUSY_S)
        gate.set()
        assert await call == (200, DEFAULT_ANSWER)


@both_bodies
async def test_instance_that_listens_no_more_and_says_nothing_is_silent(body: object) -> None:
    """As vLLM is that was told to end while it streams: it waits for its clients to leave."""
    async with quick_deployment() as world:
        is_stream = body is _STREAM
        never = asyncio.Event()
        world.d.decode = Script(
            before_event={1: never}, before_headers=None if is_stream else never
        )
        call = asyncio.create_task(answer(world, body))
        await world.d.wait_until(lambda: len(world.d.received) == 1)
        await world.d.stop_listening()
        status, said = await call
        assert (status, b"decode_failed" in said) == (200 if is_stream else 502, True)
        assert await silent_legs(world, world.d) == 1


async def test_stream_of_an_instance_that_listens_no_more_is_brought_to_its_end() -> None:
    num_events = int(_BUSY_S / 0.02)
    async with quick_deployment() as world:
        world.d.decode = Script(events=DEFAULT_EVENTS[:1] * num_events, pause_s=0.02)
        call = asyncio.create_task(answer(world, _STREAM))
        await world.d.wait_until(lambda: len(world.d.received) == 1)
        await world.d.stop_listening()
        assert len(events_of((await call)[1])) == num_events
        assert await world.metric(_FAILED) == 0


async def test_a_question_to_a_silent_decode_ends_too() -> None:
    async with quick_deployment() as world:
        world.d.health_gate = asyncio.Event()
        world.d.tokenize_gate = asyncio.Event()
        status, said = await answer(world, {"prompt": "a"}, "/tokenize")
        assert (status, "silent" in json.loads(said)["error"]["message"]) == (502, True)


async def test_instance_that_is_back_gets_requests_again() -> None:
    async with quick_deployment() as world:
        fall_silent(world.d)
        assert (await answer(world, _STREAM))[0] == 502
        assert world.d.health_gate is not None
        world.d.health_gate.set()
        world.d.decode = Script()
        world.d.prefill = Script()
        async with asyncio.timeout(_BOUND_S):
            while (await answer(world, _STREAM))[0] != 200:
                await asyncio.sleep(0.02)
