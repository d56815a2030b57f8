"""vLLM's own NIXL connectors behind the router: by pull, by push, and read back by name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest

from kvferry.client.engine_kinds import EngineKind, NixlAddress
from kvferry.router.config import OnPrefillFailure
from kvferry.router.engines import EngineConfig
from tests.integration.fake_nixl import EVENTS, NUM_KEPT_BLOCKS, FakeNixl, NixlWorld, nixl_world

_TEXT = "The conversation so far, long enough to be recognised. "


def _pull(_urls: Sequence[str]) -> EngineConfig:
    return EngineConfig(kind=EngineKind.VLLM_NIXL)


def _push(urls: Sequence[str]) -> EngineConfig:
    addresses = {url: NixlAddress(f"p{n}", "127.0.0.1", 5600 + n) for n, url in enumerate(urls)}
    return EngineConfig(nixl_addresses=addresses)


def _push_without_addresses(_urls: Sequence[str]) -> EngineConfig:
    return EngineConfig(kind=EngineKind.VLLM_NIXL_PUSH)


def _other_requests(world: NixlWorld) -> list[str]:
    return [each for engine in (*world.prefill, *world.decode) for each in engine.other_requests]


@pytest.mark.parametrize("engines_at", [_pull, _push_without_addresses])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_decode_gets_what_prefill_answered(engines_at: object, is_stream: bool) -> None:
    async with nixl_world(engines_at) as world:  # type: ignore[arg-type]
        status, answer = await world.ask(max_tokens=9, min_tokens=3, stream=is_stream)
        (prefill,), (decode,) = world.prefill[0].legs, world.decode[0].legs
        assert (prefill.role, prefill.body["max_tokens"]) == ("prefill", 1)
        assert "min_tokens" not in prefill.body
        assert decode.params["remote_engine_id"] == "p0"
        assert (decode.body["max_tokens"], decode.body["min_tokens"]) == (9, 3)
        assert status == 200
        assert answer == EVENTS if is_stream else b"kv_transfer_params" not in answer
        assert _other_requests(world) == []


async def test_both_legs_of_a_push_go_at_once_and_are_matched_by_an_id_of_their_own() -> None:
    async with nixl_world(_push) as world:
        for _ in range(2):
            status, answer = await world.ask(stream=True, headers={"X-Request-Id": "the-clients"})
            assert (status, answer) == (200, EVENTS)
        pairs = list(zip(world.prefill[0].legs, world.decode[0].legs, strict=True))
        ids = [(p.headers["X-Request-Id"], d.headers["X-Request-Id"]) for p, d in pairs]
        assert all(ours == theirs for ours, theirs in ids)
        assert len(set(ids)) == 2
        params = pairs[0][1].params
        assert (params["remote_engine_id"], params["remote_port"]) == ("p0", 5600)
        assert params["remote_request_id"] == ids[0][0]
        assert "kv_transfer_params" not in answer.decode()


@pytest.mark.parametrize(
    ("policy", "status", "outcome"),
    [
        (OnPrefillFailure.DECODE, 200, "fallback_decode_only"),
        (OnPrefillFailure.ERROR, 500, "prefill_failed"),
    ],
)
async def test_a_push_whose_prefill_fails_is_not_waited_for(
    policy: OnPrefillFailure, status: int, outcome: str
) -> None:
    async with nixl_world(_push, on_prefill_failure=policy) as world:
        world.prefill[0].statuses = [500]
        world.decode[0].gate = asyncio.Event()  # nobody will ever push to it
        assert (await world.ask())[0] == status
        await world.decode[0].wait_until(lambda: world.decode[0].num_left == 1)
        assert await world.outcomes() == {outcome: 1}


async def test_a_push_begins_again_with_another_prefill_instance() -> None:
    async with nixl_world(_push, 2, on_prefill_failure=OnPrefillFailure.RETRY) as world:
        world.prefill[0].statuses = [500]
        decode = world.decode[0]
        gate = decode.gate = asyncio.Event()
        call = asyncio.create_task(world.ask(stream=True))
        await decode.wait_until(lambda: len(decode.legs) == 2)
        gate.set()
        assert await call == (200, EVENTS)
        assert [leg.params["remote_engine_id"] for leg in decode.legs] == ["p0", "p1"]
        assert decode.legs[0].headers["X-Request-Id"] != decode.legs[1].headers["X-Request-Id"]


@pytest.mark.parametrize("engines_at", [_pull, _push])
async def test_an_offer_is_taken_by_one_instance_only(engines_at: object) -> None:
    async with nixl_world(engines_at, 1, 2) as world:  # type: ignore[arg-type]
        for engine in world.decode:
            engine.statuses = [500]  # it may have read the blocks, which are free then
        await world.ask()
        roles = [role for engine in world.decode for role in engine.roles()]
        assert sorted(roles)[0] == "decode"
        assert roles.count("decode") == 1
        assert "plain" in roles


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("engines_at", [_pull, _push])
async def test_an_instance_whose_transfer_fails_is_asked_to_do_without(
    engines_at: object, is_stream: bool
) -> None:
    async with nixl_world(engines_at) as world:  # type: ignore[arg-type]
        world.decode[0].failures_in_stream = [is_stream]
        world.decode[0].statuses = [200 if is_stream else 500]
        status, answer = await world.ask(stream=is_stream)
        assert (status, b"error" in answer) == (200, False)
        assert world.decode[0].roles() == ["decode", "plain"]
        assert await world.outcomes() == {"fallback_decode_only": 1}


async def _turn(world: NixlWorld, num_turns: int, *, is_stream: bool = False) -> dict[str, object]:
    """Ask a conversation's turn; return the parameters of its prefill leg."""
    num_legs = [len(engine.legs) for engine in world.prefill]
    assert (await world.ask(_TEXT * num_turns, stream=is_stream))[0] == 200
    (leg,) = [
        leg
        for engine, before in zip(world.prefill, num_legs, strict=True)
        for leg in engine.legs[before:]
    ]
    return leg.params


async def test_whole_blocks_of_the_last_prompt_are_read_back_once() -> None:
    async with nixl_world(_pull) as world:
        assert (await _turn(world, 1))["remote_block_ids"] is None
        second = await _turn(world, 2)
        assert second["do_remote_decode"] is True
        assert second["remote_engine_id"] == "d0"
        assert second["remote_block_ids"] == [list(range(NUM_KEPT_BLOCKS))]
        assert second["remote_num_tokens"] == NUM_KEPT_BLOCKS * 16
        # The other branch of the conversation comes too late for what the first turn left.
        status, _ = await world.ask(_TEXT + "Another way on, that begins alike.")
        assert status == 200
        assert world.prefill[0].legs[-1].params["remote_engine_id"] is None


async def test_streamed_answers_name_no_blocks() -> None:
    async with nixl_world(_pull) as world:
        await _turn(world, 1, is_stream=True)
        assert (await _turn(world, 2))["remote_engine_id"] is None


async def test_blocks_of_another_tenant_are_not_read() -> None:
    async with nixl_world(_pull) as world:
        one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        await world.ask(_TEXT, headers=one)
        await world.ask(_TEXT * 2, headers=two)
        await world.ask(_TEXT * 3, headers=one)
        engine_ids = [leg.params["remote_engine_id"] for leg in world.prefill[0].legs]
        assert engine_ids == [None, None, "d0"]
        assert len({json.dumps(leg.body["cache_salt"]) for leg in world.decode[0].legs}) == 2


async def test_blocks_of_an_instance_that_was_not_well_are_forgotten() -> None:
    async with nixl_world(_pull) as world:
        await _turn(world, 1)
        await _blink(world, world.decode[0])
        assert (await _turn(world, 2))["remote_engine_id"] is None


async def _blink(world: NixlWorld, engine: FakeNixl) -> None:
    for is_well in (False, True):
        engine.is_well = is_well
        await world.router.probe_all()


async def test_a_prefill_that_fails_to_read_back_costs_a_retry_without() -> None:
    async with nixl_world(_pull, 2) as world:
        await _turn(world, 1)
        for engine in world.prefill:
            engine.statuses = [500]
        num_legs = sum(len(engine.legs) for engine in world.prefill)
        assert (await world.ask(_TEXT * 2))[0] == 200
        legs = [leg for engine in world.prefill for leg in engine.legs]
        assert len(legs) == num_legs + 2
        assert [leg.params["remote_engine_id"] for leg in legs].count("d0") == 1
        assert world.decode[0].roles() == ["decode", "plain"]
