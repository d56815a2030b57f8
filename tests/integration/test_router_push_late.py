"""Pushes whose decode instance is chosen while prefill computes, and credits for either choice."""

from __future__ import annotations

import asyncio
import json

import pytest

from kvferry.router.config import DecodeChoice, OnPrefillFailure
from tests.integration.router_setup import Deployment, deployment
from tests.integration.test_router_cancel import Caller
from tests.support.scripted_engine import DEFAULT_EVENTS, Script

_STREAM = {"prompt": "a", "stream": True}
_BOTH = ("pull", "push")
_LATE = DecodeChoice.LATE
_PROGRESS = ((0, 100), (40, 100), (60, 100), (100, 100))
_CREDITS = "kvferry_router_outstanding_handoffs"


async def _answer(world: Deployment, body: object = _STREAM) -> tuple[int, bytes]:
    async with world.post(body) as response:
        return response.status, await response.read()


async def _wait_credits(world: Deployment, count: int) -> None:
    async with asyncio.timeout(5):
        while await world.metric(_CREDITS) != count:
            await asyncio.sleep(0)


async def test_decode_is_chosen_by_load_when_prefill_has_come_so_far() -> None:
    gates = {2: asyncio.Event(), 4: asyncio.Event()}
    async with deployment(1, 2, capabilities=_BOTH, decode_choice=_LATE) as world:
        world.p.prefill = Script(progress=_PROGRESS, before_event=gates)
        call = asyncio.create_task(_answer(world))
        await world.p.wait_until(lambda: len(world.p.received) == 1)
        await _wait_credits(world, 0)  # the first progress has come
        assert world.p.received[0].body["kv_progress"] is True
        assert [engine.received for engine in world.decode] == [[], []]
        world.d.num_free_blocks = 10
        await world.router.probe_all()
        gates[2].set()
        second = world.decode[1]
        await second.wait_until(lambda: len(second.received) == 1)
        assert not gates[4].is_set()  # prefill has not answered yet
        params = second.received[0].params
        assert params is not None
        assert params["mode"] == "push"
        assert params["peer"]["instance_id"] == "prefill-0"
        assert "first_token" not in params
        gates[4].set()
        assert await call == (200, b"".join(DEFAULT_EVENTS))
        assert world.d.received == []
        assert await world.outcomes() == {"ok": 1}
        assert await world.metric("kvferry_router_handoffs_total", choice="late") == 1


async def test_a_prompt_computed_at_once_is_chosen_for_with_its_first_token() -> None:
    gates = {2: asyncio.Event()}
    async with deployment(capabilities=_BOTH, decode_choice=_LATE) as world:
        world.p.prefill = Script(progress=((0, 9), (9, 9)), before_event=gates)
        call = asyncio.create_task(_answer(world))
        await world.p.wait_until(lambda: len(world.p.received) == 1)
        await _wait_credits(world, 0)
        gates[2].set()
        assert (await call)[0] == 200
        params = world.d.received[0].params
        assert params is not None
        assert "first_token" in params


async def test_legs_in_flight_count_before_free_blocks() -> None:
    async with deployment(1, 2, capabilities=_BOTH, decode_choice=_LATE) as world:
        world.d.num_free_blocks, world.decode[1].num_free_blocks = 100, 1
        await world.router.probe_all()
        gate = world.d.decode.before_headers = asyncio.Event()
        calls = [asyncio.create_task(_answer(world))]
        await world.d.wait_until(lambda: len(world.d.received) == 1)
        assert (await _answer(world))[0] == 200
        assert len(world.decode[1].received) == 1
        gate.set()
        assert (await calls[0])[0] == 200


async def test_engine_without_progress_is_waited_for() -> None:
    gate = asyncio.Event()
    async with deployment(capabilities=_BOTH, decode_choice=_LATE) as world:
        world.p.prefill.before_headers = gate
        call = asyncio.create_task(_answer(world))
        await world.p.wait_until(lambda: len(world.p.received) == 1)
        await _wait_credits(world, 1)
        assert world.d.received == []
        gate.set()
        assert (await call)[0] == 200
        params = world.d.received[0].params
        assert params is not None
        assert params["mode"] == "push"
        assert params["first_token"] == {"token_id": 7, "seed": 1}  # it is known by then
        assert await world.outcomes() == {"ok": 1}


@pytest.mark.parametrize(
    ("fault", "policy", "status", "outcome"),
    [
        (Script(status=400, body=b"{}"), OnPrefillFailure.DECODE, 400, "bad_request"),
        (Script(status=500), OnPrefillFailure.DECODE, 200, "fallback_decode_only"),
        (Script(status=500), OnPrefillFailure.ERROR, 500, "prefill_failed"),
        (Script(status=500), OnPrefillFailure.RETRY, 200, "ok"),
        (
            Script(progress=_PROGRESS, reset_after_events=1),
            OnPrefillFailure.DECODE,
            200,
            "fallback_decode_only",
        ),
        (
            Script(progress=_PROGRESS[:1], body=b'{"error": {"message": "died"}}'),
            OnPrefillFailure.ERROR,
            500,
            "prefill_failed",
        ),
        (
            Script(progress=_PROGRESS[:1], reset_after_events=1),
            OnPrefillFailure.ERROR,
            502,
            "prefill_failed",
        ),
        (Script(offers=False), OnPrefillFailure.ERROR, 200, "fallback_decode_only"),
    ],
)
async def test_prefill_that_fails_before_the_choice(
    fault: Script, policy: OnPrefillFailure, status: int, outcome: str
) -> None:
    async with deployment(
        2, capabilities=_BOTH, decode_choice=_LATE, on_prefill_failure=policy
    ) as world:
        world.p.prefill = fault
        assert (await _answer(world))[0] == status
        is_plain = outcome == "fallback_decode_only"
        roles = {200: ["plain"] if is_plain else ["decode"]}.get(status, [])
        assert world.d.roles() == roles
        await world.wait_settled()
        assert len(world.p.ended) == 1
        assert await world.outcomes() == {outcome: 1}
        fleet = world.router.fleet.snapshot()
        assert {view.num_inflight for view in (*fleet.prefill, *fleet.decode)} == {0}


async def test_without_anybody_to_push_to_decode_does_it_all() -> None:
    gates = {2: asyncio.Event()}
    async with deployment(capabilities=_BOTH, decode_choice=_LATE) as world:
        world.p.prefill = Script(progress=_PROGRESS, before_event=gates)
        call = asyncio.create_task(_answer(world))
        await world.p.wait_until(lambda: len(world.p.received) == 1)
        await _wait_credits(world, 0)
        world.d.capabilities = ("pull",)
        await world.router.probe_all()
        gates[2].set()
        assert (await call)[0] == 200
        assert world.d.roles() == ["plain"]
        await world.wait_settled()
        assert len(world.p.ended) == 1
        reasons = "kvferry_router_plain_decodes_total"
        assert await world.metric(reasons, reason="no_receiver") == 1


async def test_client_leaves_before_the_choice() -> None:
    async with deployment(capabilities=_BOTH, decode_choice=_LATE) as world:
        world.p.prefill = Script(progress=_PROGRESS, before_event={1: asyncio.Event()})
        caller = await Caller.call(world, _STREAM)
        await world.p.wait_until(lambda: len(world.p.received) == 1)
        await caller.leave()
        await world.p.wait_until(lambda: world.p.num_left == 1 and len(world.p.ended) == 1)
        assert world.d.received == []
        assert await world.metric(_CREDITS) == 0
        assert await world.outcomes() == {"client_gone_before_prefill_done": 1}


# -- credits ----------------------------------------------------------------------------------
async def test_a_request_beyond_the_bound_waits_until_a_prefill_has_answered() -> None:
    gate = asyncio.Event()
    async with deployment(capabilities=_BOTH, max_outstanding_handoffs=1) as world:
        world.p.once.append(Script(before_headers=gate))
        world.d.once.append(Script(before_headers=gate))
        calls = [asyncio.create_task(_answer(world))]
        await world.p.wait_until(lambda: len(world.p.received) == 1)
        calls.append(asyncio.create_task(_answer(world)))
        waits = "kvferry_router_credit_waits_total"
        async with asyncio.timeout(5):
            while not await world.metric(waits):
                await asyncio.sleep(0)
        assert (len(world.p.received), len(world.d.received)) == (1, 1)
        gate.set()
        assert [status for status, _ in await asyncio.gather(*calls)] == [200, 200]
        assert await world.metric(_CREDITS) == 0
        assert await world.outcomes() == {"ok": 2}


async def test_a_request_that_waits_too_long_is_turned_away() -> None:
    gate = asyncio.Event()
    async with deployment(
        capabilities=_BOTH, max_outstanding_handoffs=1, queue_timeout_s=0.1
    ) as world:
        world.p.prefill.before_headers = world.d.decode.before_headers = gate
        call = asyncio.create_task(_answer(world))
        await world.p.wait_until(lambda: len(world.p.received) == 1)
        async with world.post(_STREAM) as response:
            code = (await response.json())["error"]["code"]
            assert (response.status, code) == (503, "no_credit")
            assert response.headers["Retry-After"] == "1"
        assert len(world.p.received) == 1
        gate.set()
        assert (await call)[0] == 200
        assert await world.outcomes() == {"ok": 1, "no_credit": 1}


async def test_another_decode_instance_is_chosen_where_one_is_full() -> None:
    gate = asyncio.Event()
    async with deployment(1, 2, capabilities=_BOTH, max_outstanding_handoffs=2) as world:
        world.p.prefill.before_headers = gate
        for engine in world.decode:
            engine.decode.before_headers = gate
        calls = [asyncio.create_task(_answer(world)) for _ in range(4)]
        for engine in world.decode:
            await engine.wait_until(lambda engine=engine: len(engine.received) == 2)  # type: ignore[misc]
        gate.set()
        assert [status for status, _ in await asyncio.gather(*calls)] == [200] * 4
        assert await world.metric("kvferry_router_credit_waits_total") == 0


async def test_client_that_leaves_the_queue_takes_no_place() -> None:
    gate = asyncio.Event()
    async with deployment(capabilities=_BOTH, max_outstanding_handoffs=1) as world:
        world.p.prefill.before_headers = world.d.decode.before_headers = gate
        call = asyncio.create_task(_answer(world))
        await world.p.wait_until(lambda: len(world.p.received) == 1)
        caller = await Caller.call(world, _STREAM)
        async with asyncio.timeout(5):
            while not await world.metric("kvferry_router_credit_waits_total"):
                await asyncio.sleep(0)
        await caller.leave()
        async with asyncio.timeout(5):
            while (await world.outcomes()).get("client_gone_before_prefill_done") != 1:
                await asyncio.sleep(0)
        gate.set()
        assert (await call)[0] == 200
        assert (await _answer(world))[0] == 200
        assert await world.metric(_CREDITS) == 0


async def test_an_admitted_prefill_makes_way_for_the_next() -> None:
    gate = asyncio.Event()
    async with deployment(
        capabilities=_BOTH,
        decode_choice=_LATE,
        max_outstanding_handoffs=1,
        queue_timeout_s=0.2,
    ) as world:
        world.p.once.append(Script(progress=_PROGRESS, before_event={1: gate}))
        first = asyncio.create_task(_answer(world))
        await world.p.wait_until(lambda: len(world.p.received) == 1)
        assert (await _answer(world))[0] == 200
        gate.set()
        assert (await first)[0] == 200


async def test_pulls_need_no_credit() -> None:
    gate = asyncio.Event()
    async with deployment(capabilities=None, max_outstanding_handoffs=1) as world:
        world.p.prefill.before_headers = gate
        calls = [asyncio.create_task(_answer(world)) for _ in range(3)]
        await world.p.wait_until(lambda: len(world.p.received) == 3)
        gate.set()
        assert [status for status, _ in await asyncio.gather(*calls)] == [200] * 3


async def test_progress_as_it_is_told_is_json() -> None:
    """The script's stream is what engines send: a check of the fake itself."""
    async with deployment(capabilities=_BOTH) as world:
        world.p.prefill.progress = _PROGRESS
        body = {
            "prompt": "a", "kv_progress": True,
            "kv_transfer_params": {"transfer_id": "x", "role": "prefill", "mode": "push"},
        }  # fmt: skip
        async with world.client.post(world.p.url + "/v1/completions", json=body) as response:
            *told, last, end = (await response.text()).strip().split("\n\n")
        assert [json.loads(each[6:])["kv_progress"]["num_computed_tokens"] for each in told] == [
            0, 40, 60, 100,
        ]  # fmt: skip
        assert json.loads(last[6:])["kv_transfer_params"]["mode"] == "push"
        assert end == "data: [DONE]"
