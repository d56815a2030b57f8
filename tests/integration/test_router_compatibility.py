"""Instances that exchange nothing are not paired, and prompts that differ are counted as such."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvferry.protocol.headers import RECEIVE_HEADER, stream_note
from kvferry.router.config import OnPrefillFailure, RouteMode
from tests.integration.router_setup import Deployment, deployment
from tests.support.scripted_engine import DEFAULT_ANSWER, DEFAULT_EVENTS, Script, ScriptedEngine

_STREAM = {"prompt": "a", "stream": True}
_WHOLE = {"prompt": "a"}
_PLAIN = "kvferry_router_plain_decodes_total"


def _template(letter: str) -> dict[str, Any]:
    return {"compatibility": {"chat_template_digest": letter * 32, "field_of_the_future": 1}}


@asynccontextmanager
async def templates(
    prefill: str,
    decode: str,
    **options: Any,  # noqa: ANN401 - those of RouterConfig
) -> AsyncIterator[Deployment]:
    """One instance for each letter, which stands for its chat template; ``-``: it does not say."""
    capabilities = ("pull", "push", "history")
    async with deployment(len(prefill), len(decode), capabilities=capabilities, **options) as world:
        for engines, letters in ((world.prefill, prefill), (world.decode, decode)):
            for engine, letter in zip(engines, letters, strict=True):
                engine.identity_fields = {} if letter == "-" else _template(letter)
        await world.router.probe_all()
        # The first to be asked may not have known the last one yet.
        await world.router.probe_all()
        yield world


async def _ask(world: Deployment, body: object) -> bytes:
    async with world.post(body) as response:
        assert response.status == 200
        return await response.read()


def _peers(engine: ScriptedEngine) -> set[str]:
    return {str(each.params["peer"]["instance_id"]) for each in engine.received if each.params}


@pytest.mark.parametrize("mode", list(RouteMode))
async def test_only_instances_that_exchange_are_paired(mode: RouteMode) -> None:
    async with templates("ab", "bab", mode=mode) as world:
        for _ in range(12):
            await _ask(world, _STREAM)
        assert [_peers(engine) for engine in world.decode] == [
            {"prefill-1"}, {"prefill-0"}, {"prefill-1"},
        ]  # fmt: skip
        assert await world.outcomes() == {"ok": 12}
        assert await world.metric("kvferry_router_incompatible_pairs") == 3


@pytest.mark.parametrize("mode", list(RouteMode))
async def test_where_no_pair_is_left_decode_answers_alone_and_prefill_computes_nothing(
    mode: RouteMode,
) -> None:
    async with templates("aa", "b", mode=mode) as world:
        assert await _ask(world, _STREAM) == b"".join(DEFAULT_EVENTS)
        assert [engine.roles() for engine in (*world.prefill, world.d)] == [[], [], ["plain"]]
        assert await world.outcomes() == {"fallback_decode_only": 1}
        assert await world.metric(_PLAIN, reason="incompatible") == 1


async def test_fleet_says_who_differs_in_what() -> None:
    async with templates("a", "b") as world:
        async with world.client.get(f"{world.router.url}/kvferry/fleet") as response:
            fleet = await response.json()
        detail = fleet["decode"][0]["detail"]
        for part in (world.p.url, "chat_template_digest", "b" * 12, "a" * 12, "--chat-template"):
            assert part in detail


async def test_one_that_does_not_say_is_paired_with_all() -> None:
    async with templates("a-", "-b", mode=RouteMode.PULL) as world:
        for _ in range(8):
            await _ask(world, _WHOLE)
        assert _peers(world.decode[1]) == {"prefill-1"}
        assert _peers(world.decode[0])
        assert await world.metric("kvferry_router_incompatible_pairs") == 1


async def test_another_transport_is_no_partner() -> None:
    async with templates("-", "-") as world:
        world.p.identity_fields, world.d.identity_fields = {"transport": "shm"}, {"transport": "x"}
        await world.router.probe_all()
        await _ask(world, _WHOLE)
        assert world.p.roles() == []


async def test_pairs_are_made_again_once_they_are_alike() -> None:
    async with templates("a", "b") as world:
        world.d.identity_fields = _template("a")
        await world.router.probe_all()
        await _ask(world, _WHOLE)
        assert (world.p.roles(), world.d.roles()) == (["prefill"], ["decode"])
        assert await world.metric("kvferry_router_incompatible_pairs") == 0


@pytest.mark.parametrize("mode", [RouteMode.PULL, RouteMode.PUSH])
async def test_when_the_only_partner_fails_another_decodes_alone(mode: RouteMode) -> None:
    async with templates("a", "ab", mode=mode, on_prefill_failure=OnPrefillFailure.DECODE) as world:
        world.d.decode = Script(reset_before_headers=True)
        world.decode[1].decode = Script()
        assert await _ask(world, _STREAM) == b"".join(DEFAULT_EVENTS)
        assert world.decode[1].roles() == ["plain"]
        assert await world.metric(_PLAIN, reason="incompatible") == 1
        await world.wait_settled()
        assert len(world.p.ended) == 1
        world.assert_nothing_held()


@pytest.mark.parametrize("mode", [RouteMode.PULL, RouteMode.PUSH])
@pytest.mark.parametrize("body", [_STREAM, _WHOLE])
@pytest.mark.parametrize("outcome", ["mismatch", "received", "gone"])
async def test_how_a_receive_has_ended_is_counted_and_a_mismatch_is_not_ok(
    mode: RouteMode, body: dict[str, object], outcome: str
) -> None:
    async with templates("-", "-", mode=mode) as world:
        events = (*DEFAULT_EVENTS[:-1], stream_note(outcome) + DEFAULT_EVENTS[-1])
        world.d.decode = Script(headers={RECEIVE_HEADER: outcome}, events=events)
        async with world.post(body) as response:
            assert RECEIVE_HEADER not in response.headers
            content = await response.read()
        assert content == (b"".join(DEFAULT_EVENTS) if "stream" in body else DEFAULT_ANSWER)
        is_mismatch = outcome == "mismatch"
        assert await world.outcomes() == {"mismatch" if is_mismatch else "ok": 1}
        assert await world.metric("kvferry_router_receives_total", outcome=outcome) == 1
        await world.wait_settled()
        assert len(world.p.ended) == (1 if is_mismatch else 0), "nobody takes what is offered"


async def test_what_instances_tell_of_their_receives_is_shown() -> None:
    async with templates("-", "-") as world:
        world.d.identity_fields = {"receives": {"mismatch": 3, "of_the_future": 1}}
        await world.router.probe_all()
        for outcome, count in (("mismatch", 3), ("other", 1)):
            name = "kvferry_router_instance_receives"
            assert await world.metric(name, instance=world.d.url, outcome=outcome) == count
