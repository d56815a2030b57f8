"""Instances that refuse, break, stall or lie: each request ends in an answer or a clear error."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from kvferry.router.config import OnPrefillFailure
from tests.integration.router_setup import PATH, Deployment, deployment, events_of
from tests.support.scripted_engine import DEFAULT_ANSWER, DEFAULT_EVENTS, Script

_STREAM = {"prompt": "a", "stream": True}
_WHOLE = {"prompt": "a"}
_PLAIN = "kvferry_router_plain_decodes_total"
_FAILING = [
    Script(reset_before_headers=True),
    Script(status=500),
    Script(status=503),
    Script(status=302, headers={"Location": "http://127.0.0.1:1/"}),
]
_ROLE = (
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},'
    b'"finish_reason":null}]}\n\n'
)
_USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3}}\n\n'
_ABORTED_AT_ONCE = Script(events=(b"data: [DONE]\n\n",))
_ABORTED = Script(
    body=b'{"choices":[{"index":0,"text":"one","finish_reason":"abort"}]}',
    events=(
        b'data: {"choices":[{"index":0,"text":"","finish_reason":"abort"}]}\n\n',
        b"data: [DONE]\n\n",
    ),
)


def _transfer_ids(world: Deployment) -> list[str]:
    return [
        received.params["transfer_id"]
        for engine in world.prefill
        for received in engine.received
        if received.params is not None
    ]


@pytest.mark.parametrize("fault", _FAILING)
async def test_prefill_is_tried_on_another_instance_with_a_new_id(fault: Script) -> None:
    async with deployment(2) as world:
        world.p.prefill = fault
        async with world.post(_WHOLE) as response:
            assert response.status == 200
        first_id, second_id = _transfer_ids(world)
        assert first_id != second_id
        assert world.d.received[0].params is not None
        assert world.d.received[0].params["transfer_id"] == second_id
        await world.wait_settled()
        assert world.p.ended == [first_id]
        assert world.prefill[1].ended == []
        assert await world.outcomes() == {"ok": 1}
        assert await world.metric("kvferry_router_leg_retries_total", leg="prefill") == 1


@pytest.mark.parametrize("fault", _FAILING)
async def test_decode_does_it_all_when_prefill_cannot(fault: Script) -> None:
    async with deployment() as world:
        world.p.prefill = fault
        async with world.post(_WHOLE) as response:
            assert (response.status, await response.read()) == (200, DEFAULT_ANSWER)
        assert world.d.roles() == ["plain"]
        assert await world.outcomes() == {"fallback_decode_only": 1}
        assert (
            await world.metric("kvferry_router_plain_decodes_total", reason="prefill_failed") == 1
        )
        await world.wait_settled()
        assert world.p.ended == _transfer_ids(world)


async def test_prefill_error_passes_byte_for_byte_where_so_configured() -> None:
    said = b'{"error":  "layout differs: num_layers 30, 32"}'
    async with deployment(on_prefill_failure=OnPrefillFailure.ERROR) as world:
        world.p.prefill = Script(status=500, body=said)
        async with world.post(_WHOLE) as response:
            assert (response.status, await response.read()) == (500, said)
        assert world.d.received == []
        assert await world.outcomes() == {"prefill_failed": 1}


async def test_broken_prefill_is_a_clear_error_where_so_configured() -> None:
    async with deployment(on_prefill_failure=OnPrefillFailure.ERROR) as world:
        world.p.prefill = Script(reset_before_headers=True)
        async with world.post(_STREAM) as response:
            answer = await response.json()
        assert (response.status, answer["error"]["code"]) == (502, "prefill_failed")
        assert await world.outcomes() == {"prefill_failed": 1}


async def test_silent_prefill_ends_within_its_bound() -> None:
    never = asyncio.Event()
    policy = OnPrefillFailure.ERROR
    async with deployment(prefill_timeout_s=0.2, on_prefill_failure=policy) as world:
        world.p.prefill.before_headers = never
        async with world.post(_WHOLE) as response:
            answer = await response.json()
        assert (response.status, answer["error"]["code"]) == (504, "timeout")
        await world.p.wait_until(lambda: world.p.num_left == 1)
        await world.wait_settled()
        assert world.p.ended == _transfer_ids(world)
        assert await world.outcomes() == {"timeout": 1}


async def test_prefill_that_offers_nothing_is_counted() -> None:
    async with deployment() as world:
        world.p.prefill.offers = False
        async with world.post(_STREAM) as response:
            assert len(events_of(await response.read())) == 2
        assert world.d.roles() == ["plain"]
        assert await world.outcomes() == {"fallback_decode_only": 1}
        assert (
            await world.metric("kvferry_router_plain_decodes_total", reason="nothing_offered") == 1
        )


@pytest.mark.parametrize("body", [b"null", b"[]", b"{", b'{"kv_transfer_params": "a"}', b""])
async def test_strange_prefill_answer_offers_nothing(body: bytes) -> None:
    async with deployment() as world:
        world.p.prefill.body = body
        async with world.post(_WHOLE) as response:
            assert response.status == 200
        assert world.d.roles() == ["plain"]


@pytest.mark.parametrize("request_body", [_STREAM, _WHOLE])
@pytest.mark.parametrize("fault", _FAILING)
async def test_decode_is_tried_on_another_instance_with_the_same_offer(
    fault: Script, request_body: dict[str, object]
) -> None:
    async with deployment(1, 2) as world:
        world.d.decode = fault
        async with world.post(request_body) as response:
            assert response.status == 200
            await response.read()
        first, second = world.d.received[0], world.decode[1].received[0]
        assert first.params == second.params
        assert len(world.p.received) == 1
        assert await world.outcomes() == {"ok": 1}
        world.assert_nothing_held()


async def test_decode_that_dies_between_headers_and_first_byte_is_tried_elsewhere() -> None:
    async with deployment(1, 2) as world:
        world.d.decode = Script(reset_after_events=0)
        async with world.post(_STREAM) as response:
            assert response.status == 200
            assert len(events_of(await response.read())) == 2
        assert await world.outcomes() == {"ok": 1}


@pytest.mark.parametrize("request_body", [_STREAM, _WHOLE])
async def test_broken_decode_is_a_clear_error_and_ends_the_handoff(
    request_body: dict[str, object],
) -> None:
    async with deployment() as world:
        world.d.decode = Script(reset_before_headers=True)
        async with world.post(request_body) as response:
            answer = await response.json()
        assert (response.status, answer["error"]["code"]) == (502, "decode_failed")
        await world.wait_settled()
        assert world.p.ended == world.d.ended == _transfer_ids(world)
        world.assert_nothing_held()
        assert await world.outcomes() == {"decode_failed": 1}


async def test_decode_error_passes_byte_for_byte() -> None:
    async with deployment() as world:
        world.d.decode = Script(status=500, body=b"{ }")
        async with world.post(_STREAM) as response:
            assert (response.status, await response.read()) == (500, b"{ }")
        assert await world.outcomes() == {"decode_failed": 1}


@pytest.mark.parametrize("num_events", [1, 2])
async def test_decode_that_dies_in_its_stream_ends_in_an_event_that_parses(
    num_events: int,
) -> None:
    async with deployment(1, 2) as world:
        for engine in world.decode:
            engine.decode = Script(reset_after_events=num_events)
        async with world.post(_STREAM) as response:
            events = events_of(await response.read())
        assert len(events) == num_events + 1
        assert events[-1]["error"]["code"] == "decode_failed"
        assert len(world.decode[1].received) == 0  # never again after the first byte
        await world.wait_settled()
        assert world.p.ended == world.d.ended == _transfer_ids(world)
        assert await world.outcomes() == {"decode_failed": 1}


@pytest.mark.parametrize(
    ("request_body", "aborted"),
    [
        (_STREAM, _ABORTED),
        (_WHOLE, _ABORTED),
        (_STREAM, _ABORTED_AT_ONCE),
        (_STREAM, Script(events=(_USAGE, *_ABORTED_AT_ONCE.events))),
        (_STREAM, Script(events=(_ROLE, *_ABORTED.events))),
        (_STREAM, Script(events=(_ROLE, *_ABORTED_AT_ONCE.events))),
        (_STREAM, Script(events=(_ROLE, b'data: {"error": {"message": "no"}}\n\n'), pause_s=0.05)),
    ],
)
async def test_answer_that_the_engine_aborted_is_none(
    request_body: dict[str, object], aborted: Script
) -> None:
    """As vLLM says it of what runs when it is told to end, under status 200.

    Of a stream without a token it says nothing but the end; of a chat, the role before.
    """
    async with deployment(1, 2) as world:
        world.d.decode = aborted
        async with world.post(request_body) as response:
            assert b"two" in await response.read()
        assert len(world.decode[1].received) == 1
        figure = "kvferry_router_legs_failed_total"
        cause = "engine_error" if b"error" in aborted.events[-1] else "aborted"
        assert await world.metric(figure, instance=world.d.url, cause=cause) == 1
        assert await world.outcomes() == {"ok": 1}


async def test_stream_that_the_engine_aborts_ends_in_an_event_that_says_so() -> None:
    async with deployment() as world:
        world.d.decode = Script(
            events=(*DEFAULT_EVENTS[:2], *_ABORTED.events),
            before_event={2: (gate := asyncio.Event())},
        )
        async with world.post(_STREAM) as response:
            said = await response.content.readuntil(DEFAULT_EVENTS[1])
            gate.set()
            said += await response.read()
        events = events_of(said)
        assert [event.get("error", {}).get("code") for event in events] == [
            None, None, "decode_failed",
        ]  # fmt: skip
        assert b"abort" not in said
        assert b"DONE" not in said
        assert await world.outcomes() == {"decode_failed": 1}


async def test_prefill_that_was_aborted_is_begun_on_another_instance() -> None:
    async with deployment(2) as world:
        world.p.prefill = _ABORTED
        async with world.post(_WHOLE) as response:
            assert response.status == 200
        assert [len(engine.received) for engine in world.prefill] == [1, 1]
        assert world.d.roles() == ["decode"]


async def test_decode_that_dies_within_an_event_still_ends_in_one_that_parses() -> None:
    async with deployment() as world:
        world.d.decode = Script(events=(b'data: {"choi',), reset_after_events=1)
        async with world.post(_STREAM) as response:
            body = await response.read()
        last = body.decode().rstrip("\n").rpartition("\n\n")[2]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "decode_failed"


async def test_silent_decode_ends_within_its_bound() -> None:
    async with deployment(prefill_timeout_s=0.2) as world:
        world.d.decode.before_event = {0: asyncio.Event()}
        async with world.post(_STREAM) as response:
            answer = await response.json()
        assert (response.status, answer["error"]["code"]) == (504, "timeout")
        await world.d.wait_until(lambda: world.d.num_left == 1)


@pytest.mark.parametrize("request_body", [_STREAM, _WHOLE])
async def test_whole_request_ends_within_its_bound(request_body: dict[str, object]) -> None:
    async with deployment(request_timeout_s=0.3) as world:
        world.d.decode.before_event = {1: asyncio.Event()}
        if request_body is _WHOLE:
            world.d.decode.before_headers = asyncio.Event()
        async with world.post(request_body) as response:
            body = await response.read()
        error = events_of(body)[-1] if request_body is _STREAM else json.loads(body)
        assert error["error"]["code"] == "timeout"
        await world.d.wait_until(lambda: world.d.num_left == 1)
        await world.wait_settled()
        assert world.d.ended == _transfer_ids(world)
        assert await world.outcomes() == {"timeout": 1}


async def _status(world: Deployment) -> int:
    async with world.post(_WHOLE) as response:
        await response.read()
        return response.status


async def test_oversized_answer_is_not_taken_in() -> None:
    async with deployment(max_answer_bytes=10_000) as world:
        world.d.decode.body = b'"' + b"x" * 100_000 + b'"'
        async with world.post(_WHOLE) as response:
            answer = await response.json()
        assert response.status == 502
        assert "10000 bytes" in answer["error"]["message"]


async def test_malformed_http_does_not_disturb_the_router() -> None:
    async with deployment() as world:
        host, _, port = world.router.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST " + PATH.encode() + b" HTTP/1.1\r\nContent-Length: x\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 5)
        writer.close()
        assert b" 400 " in answer.partition(b"\r\n")[0]
        async with world.post(_WHOLE) as response:
            assert response.status == 200


async def test_shutdown_tells_the_clients_that_it_cuts_off() -> None:
    async with deployment(shutdown_timeout_s=0.0) as world:
        world.d.decode.before_event = {1: asyncio.Event()}
        async with world.post(_STREAM) as response:
            first = await response.content.readany()
            await world.router.stop()
            rest = await response.read()
        assert events_of(first + rest)[-1]["error"]["code"] == "shutting_down"
        assert world.d.ended == _transfer_ids(world)
        with pytest.raises(aiohttp.ClientConnectorError):
            await _status(world)


async def test_body_that_never_ends_is_given_up_and_blamed_on_nobody_else() -> None:
    async with deployment(request_timeout_s=0.2) as world:
        host, _, port = world.router.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST " + PATH.encode() + b" HTTP/1.1\r\nHost: r\r\nContent-Length: 9\r\n\r\n{"
        )
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        writer.close()
        await writer.wait_closed()
        assert b" 504 " in answer.partition(b"\r\n")[0]
        assert world.p.received == world.d.received == []
        assert await world.outcomes() == {"timeout": 1}
