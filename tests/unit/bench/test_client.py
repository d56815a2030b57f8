"""The client keeps every token's time, finds the report, and refuses broken answers."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from kvferry.bench.client import CompletionClient
from kvferry.clock import SystemClock
from kvferry.errors import MeasurementError
from tests.unit.bench.conftest import ServeAnswer, with_mode

_DONE = b"data: [DONE]\n\n"


def _token(token_id: int, text: str = "a") -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "token_ids": [token_id]}]}


async def test_tokens_text_and_report(serve_answer: ServeAnswer, client: CompletionClient) -> None:
    bodies: list[dict[str, Any]] = []
    end = {
        "choices": [{"text": "", "token_ids": [], "finish_reason": "length"}],
        "kv_report": {"arrived_s": 1.5, "num_received_bytes": 7, "new_field": True},
    }

    def answer(body: dict[str, Any]) -> list[dict[str, Any] | bytes]:
        bodies.append(body)
        return [_token(5, "x"), b": comment\n\n", _token(6, "y"), _token(7, "z"), end, _DONE]

    url = await serve_answer(answer)
    got = await client.stream(f"{url}/v1/completions", {"prompt": [1]})
    assert got.token_ids == (5, 6, 7)
    assert got.text == "xyz"
    assert got.finish_reason == "length"
    assert got.report is not None
    assert (got.report.arrived_s, got.report.num_received_bytes) == (1.5, 7)
    times_s = [got.sent_s, got.first_byte_s, *got.token_times_s, got.ended_s]
    assert times_s == sorted(times_s)
    assert len(got.gaps_s()) == 1
    assert bodies[0] == {
        "prompt": [1],
        "stream": True,
        "return_token_ids": True,
        "kv_report": True,
    }


async def test_events_that_are_split_anywhere(
    serve_answer: ServeAnswer, client: CompletionClient
) -> None:
    whole = b'data:{"choices":[{"text":"x","token_ids":[1,2]}]}\r\n\r\n' + _DONE
    url = await serve_answer(lambda body: [whole[i : i + 1] for i in range(len(whole))])
    got = await client.stream(f"{url}/v1/completions", {})
    assert got.token_ids == (1, 2)
    assert got.second_gap_s == 0


async def test_mode_is_asked_by_header_and_tokens_are_told_as_they_come(
    serve_answer: ServeAnswer, client: CompletionClient
) -> None:
    asked: list[str | None] = []

    @with_mode
    def answer(body: dict[str, Any], mode: str | None) -> list[dict[str, Any] | bytes]:
        asked.append(mode)
        return [_token(5), _token(6), _DONE]

    url = await serve_answer(answer)
    told_s: list[float] = []
    got = await client.stream(f"{url}/v1/completions", {}, mode="push", on_token=told_s.append)
    await client.stream(f"{url}/v1/completions", {})
    assert asked == ["push", None]
    assert tuple(told_s) == got.token_times_s


async def test_prefill_s_part_and_the_usage_are_kept(
    serve_answer: ServeAnswer, client: CompletionClient
) -> None:
    report = {"prefill": {"num_read_back_tokens": 640, "read_back_outcome": "received", "new": 1}}
    details = {"prompt_tokens_details": {"cached_tokens": 640}}
    ended = _token(5) | {"kv_report": report}
    url = await serve_answer(lambda body: [ended, {"choices": [], "usage": details}, _DONE])
    got = await client.stream(f"{url}/v1/completions", {})
    assert got.report is not None
    assert got.report.prefill is not None
    assert got.report.prefill.num_read_back_tokens == 640
    assert got.num_usage_cached_tokens == 640
    url = await serve_answer(lambda body: [_token(5), _DONE])
    assert (await client.stream(f"{url}/v1/completions", {})).num_usage_cached_tokens is None


async def test_chat_deltas_are_text(serve_answer: ServeAnswer, client: CompletionClient) -> None:
    event = {"choices": [{"delta": {"content": "hi"}, "token_ids": [1]}]}
    url = await serve_answer(lambda body: [event, _DONE])
    assert (await client.stream(f"{url}/v1/completions", {})).text == "hi"


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([_token(1)], "without its end mark"),
        ([_DONE], "ended after 0 tokens"),
        ([b"data: {\n\n"], "malformed event"),
        ([_token(1), {"error": {"message": "engine is gone"}}], "engine is gone"),
    ],
)
async def test_broken_answers_are_refused(
    serve_answer: ServeAnswer,
    client: CompletionClient,
    events: list[dict[str, Any] | bytes],
    words: str,
) -> None:
    url = await serve_answer(lambda body: events)
    with pytest.raises(MeasurementError, match=words):
        await client.stream(f"{url}/v1/completions", {})


async def test_status_and_body_of_a_refusal_are_shown(
    serve_answer: ServeAnswer, client: CompletionClient
) -> None:
    url = await serve_answer(lambda body: [])
    with pytest.raises(MeasurementError, match="answered 404"):
        await client.stream(f"{url}/v1/other", {})


async def test_nobody_there_is_an_error_of_ours() -> None:
    async with aiohttp.ClientSession() as session:
        with pytest.raises(MeasurementError, match=r"127\.0\.0\.1"):
            await CompletionClient(session, SystemClock()).stream("http://127.0.0.1:1/v1", {})
