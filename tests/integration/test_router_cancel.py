"""Clients that leave, at every point of a request: both legs end at once, nothing stays held."""

from __future__ import annotations

import asyncio
import json

import pytest

from kvferry.router.request import push
from kvferry.router.upstream import LegAnswer
from tests.integration.router_setup import PATH, Deployment, deployment
from tests.support.scripted_engine import DEFAULT_EVENTS, Script, ScriptedEngine

_STREAM = {"prompt": "a", "stream": True}
_AT_ONCE_S = 1.0


class Caller:
    """A client on a bare socket, so that it leaves exactly when told."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer

    @classmethod
    async def call(cls, world: Deployment, body: dict[str, object], path: str = PATH) -> Caller:
        host, _, port = world.router.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        encoded = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: router\r\nContent-Length: {len(encoded)}\r\n\r\n"
        writer.write(head.encode() + encoded)
        await writer.drain()
        return cls(reader, writer)

    async def leave(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


@pytest.mark.parametrize("request_body", [_STREAM, {"prompt": "a"}])
async def test_client_leaves_during_prefill(request_body: dict[str, object]) -> None:
    async with deployment() as world:
        world.p.prefill.before_headers = asyncio.Event()
        caller = await Caller.call(world, request_body)
        await world.p.wait_until(lambda: len(world.p.received) == 1)
        await caller.leave()
        async with asyncio.timeout(_AT_ONCE_S):
            await world.p.wait_until(lambda: world.p.num_left == 1 and len(world.p.ended) == 1)
        assert world.d.received == []
        assert await world.outcomes() == {"client_gone_before_prefill_done": 1}


@pytest.mark.parametrize("request_body", [_STREAM, {"prompt": "a"}])
async def test_client_leaves_while_decode_is_silent(request_body: dict[str, object]) -> None:
    async with deployment() as world:
        world.d.decode.before_headers = asyncio.Event()
        caller = await Caller.call(world, request_body)
        await world.d.wait_until(lambda: len(world.d.received) == 1)
        await caller.leave()
        async with asyncio.timeout(_AT_ONCE_S):
            await world.d.wait_until(lambda: world.d.num_left == 1 and len(world.d.ended) == 1)
            await world.p.wait_until(lambda: len(world.p.ended) == 1)
        world.assert_nothing_held()
        assert await world.outcomes() == {"client_gone_after_prefill": 1}


@pytest.mark.parametrize("num_events", [0, 1])
async def test_client_leaves_while_the_stream_is_silent(num_events: int) -> None:
    async with deployment() as world:
        world.d.decode.before_event = {num_events: asyncio.Event()}
        caller = await Caller.call(world, _STREAM)
        await world.d.wait_until(lambda: len(world.d.received) == 1)
        if num_events:
            await caller.reader.readuntil(b"one")
        await caller.leave()
        async with asyncio.timeout(_AT_ONCE_S):
            await world.d.wait_until(lambda: world.d.num_left == 1 and len(world.d.ended) == 1)
            await world.p.wait_until(lambda: len(world.p.ended) == 1)
        when = "client_gone_streaming" if num_events else "client_gone_after_prefill"
        assert await world.outcomes() == {when: 1}


async def _wait_received(engine: ScriptedEngine, count: int) -> None:
    await engine.wait_until(lambda: len(engine.received) == count)


async def test_client_leaves_as_prefill_answers() -> None:
    async with deployment() as world:
        for _ in range(20):
            gate = world.p.prefill.before_headers = asyncio.Event()
            num_before = len(world.p.received)
            caller = await Caller.call(world, _STREAM)
            await _wait_received(world.p, num_before + 1)
            gate.set()
            await caller.leave()
        await world.wait_settled()
        assert sum((await world.outcomes()).values()) == 20
        world.assert_nothing_held()


async def test_leaving_with_the_whole_answer_gives_the_place_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_ending = asyncio.Event()

    async def end_slowly(*_: object) -> LegAnswer:
        try:
            await asyncio.Event().wait()
        finally:
            is_ending.set()
            await asyncio.Event().wait()
        raise AssertionError("never")

    monkeypatch.setattr(push, "run_prefill_leg", end_slowly)
    async with deployment(capabilities=("pull", "push")) as world:
        caller = await Caller.call(world, _STREAM)
        await caller.reader.readuntil(b"data: [DONE]")
        async with asyncio.timeout(30):
            await is_ending.wait()
        await caller.leave()
        await world.wait_settled()
        assert world.router.fleet.snapshot().decode[0].num_inflight == 0


async def test_client_that_closes_once_it_has_it_all_has_not_left() -> None:
    """While the instance's connection is not over yet."""
    async with deployment() as world:
        world.d.decode = Script(
            events=(*DEFAULT_EVENTS, b"\n"), before_event={len(DEFAULT_EVENTS): asyncio.Event()}
        )
        caller = await Caller.call(world, _STREAM)
        await caller.reader.readuntil(b"data: [DONE]\n\n")
        await caller.leave()
        await world.wait_settled()
        assert await world.outcomes() == {"ok": 1}


async def test_client_that_stops_reading_is_let_go_at_the_deadline() -> None:
    events = tuple(b"data: " + b"x" * 100_000 + b"\n\n" for _ in range(300))
    async with deployment(request_timeout_s=0.5) as world:
        world.d.decode.events = events
        caller = await Caller.call(world, _STREAM)
        await world.d.wait_until(lambda: world.d.num_left == 1)
        await world.wait_settled()
        assert await world.outcomes() == {"timeout": 1}
        await caller.leave()


async def test_leaving_gives_every_place_back() -> None:
    async with deployment(max_inflight=8) as world:
        world.d.decode.before_event = {0: asyncio.Event()}
        for _ in range(25):
            num_before = len(world.d.received)
            callers = [await Caller.call(world, _STREAM) for _ in range(8)]
            await _wait_received(world.d, num_before + 8)
            for caller in callers:
                await caller.leave()
            await world.wait_settled()
        assert await world.outcomes() == {"client_gone_after_prefill": 200}
        snapshot = world.router.fleet.snapshot()
        assert [view.num_inflight for view in (*snapshot.prefill, *snapshot.decode)] == [0, 0]
        world.assert_nothing_held()
        world.d.decode.before_event = {}

        async def status() -> int:
            async with world.post(_STREAM) as response:
                await response.read()
                return response.status

        assert await asyncio.gather(*(status() for _ in range(8))) == [200] * 8


async def test_instances_that_cannot_be_told_are_given_up() -> None:
    async with deployment(cancel_timeout_s=0.3) as world:
        world.d.decode.before_headers = asyncio.Event()
        caller = await Caller.call(world, _STREAM)
        await world.d.wait_until(lambda: len(world.d.received) == 1)
        await world.d.stop()
        await caller.leave()
        async with asyncio.timeout(5):
            await world.wait_settled()
        assert len(world.p.ended) == 1
        assert (
            await world.metric("kvferry_router_transfer_cancels_total", result="unreachable") == 1
        )


async def test_instances_with_another_key_are_not_counted_as_told() -> None:
    async with deployment() as world:
        world.d.takes_signatures = False
        world.d.decode.before_headers = asyncio.Event()
        caller = await Caller.call(world, _STREAM)
        await world.d.wait_until(lambda: len(world.d.received) == 1)
        await caller.leave()
        async with asyncio.timeout(5):
            await world.wait_settled()
        cancels = "kvferry_router_transfer_cancels_total"
        assert await world.metric(cancels, result="refused") == 1
        assert await world.metric(cancels, result="told") == 1
