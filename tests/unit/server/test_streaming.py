import asyncio
from typing import Any

from aiohttp import web

from kvferry.engine.request import FinishReason
from kvferry.server.app import HttpServer
from kvferry.server.config import HttpConfig
from kvferry.server.responses import EventStream
from tests.unit.server.fakes import ScriptedEngine, parse_events, says, serve

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
ABC: dict[str, Any] = {"prompt": "abc"}
USER: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def texts(events: list[Any]) -> list[str]:
    return [choice["text"] for event in events for choice in event["choices"]]


async def test_each_token_is_a_chunk() -> None:
    async with serve(ScriptedEngine(says("ok!"))) as served:
        events = await served.events(COMPLETIONS, ABC)
    assert texts(events) == ["o", "k", "!"]
    assert {event["object"] for event in events} == {"text_completion"}
    assert len({event["id"] for event in events}) == 1
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, None, "length"]
    assert all("usage" not in event for event in events)


async def test_a_chat_begins_with_the_role_and_the_first_token() -> None:
    async with serve(ScriptedEngine(says("ok"))) as served:
        first, second = await served.events(CHAT, USER)
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "o"}
    assert second["choices"][0]["delta"] == {"content": "k"}
    assert second["choices"][0]["finish_reason"] == "length"


async def test_usage_comes_last_where_asked_for() -> None:
    async with serve(ScriptedEngine(says("ok"))) as served:
        ask = ABC | {"stream_options": {"include_usage": True}}
        events = await served.events(COMPLETIONS, ask)
        options = {"include_usage": True, "continuous_usage_stats": True}
        running = await served.events(CHAT, USER | {"stream_options": options})
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 2
    assert events[-1]["usage"]["prompt_tokens"] == 3
    assert [event["usage"]["completion_tokens"] for event in running][-1] == 2
    assert all("usage" in event for event in running)


async def test_characters_that_span_tokens_are_sent_whole() -> None:
    async with serve(ScriptedEngine(says("a😀é"))) as served:
        events = await served.events(COMPLETIONS, ABC | {"return_token_ids": True})
    assert texts(events) == ["a", "", "", "", "😀", "", "é"]
    ids = [token for event in events for token in event["choices"][0]["token_ids"]]
    assert bytes(ids).decode() == "a😀é"
    assert events[0]["choices"][0]["prompt_token_ids"] == list(b"abc")
    assert events[1]["choices"][0]["prompt_token_ids"] is None


async def test_an_unfinished_character_is_shown_at_the_end() -> None:
    async with serve(ScriptedEngine(says("a😀".encode()[:-1]))) as served:
        events = await served.events(COMPLETIONS, ABC)
    assert "".join(texts(events)) == "a\ufffd"


async def test_what_may_begin_a_stop_string_is_held_back() -> None:
    async with serve(ScriptedEngine(says("1 EN 2 END 3"))) as served:
        events = await served.events(COMPLETIONS, ABC | {"stop": ["END"]})
        aborted = list(served.engine.aborted)
    assert "".join(texts(events)) == "1 EN 2 "
    assert all("END"[: len(text)] != text or not text for text in texts(events))
    last = events[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "END")
    assert len(aborted) == 1


async def test_held_back_text_is_sent_when_the_answer_ends() -> None:
    async with serve(ScriptedEngine(says("1 EN"))) as served:
        events = await served.events(COMPLETIONS, ABC | {"stop": ["END"]})
    assert texts(events)[-1] == "EN"
    assert events[-1]["choices"][0]["finish_reason"] == "length"


async def test_an_emoji_can_be_a_stop_string() -> None:
    async with serve(ScriptedEngine(says("a😀b"))) as served:
        events = await served.events(CHAT, USER | {"stop": "😀"})
    assert "".join(event["choices"][0]["delta"]["content"] for event in events) == "a"


async def test_logprobs_stream_with_offsets() -> None:
    async with serve(ScriptedEngine(says("ok"))) as served:
        events = await served.events(COMPLETIONS, ABC | {"logprobs": 1})
    offsets = [event["choices"][0]["logprobs"]["text_offset"] for event in events]
    assert offsets == [[0], [1]]


async def test_n_streams_tell_their_index() -> None:
    async with serve(ScriptedEngine(says("ok"))) as served:
        events = await served.events(CHAT, USER | {"n": 2, "kv_report": True})
    by_index: dict[int, str] = {0: "", 1: ""}
    for event in events:
        choice = event["choices"][0]
        by_index[choice["index"]] += choice["delta"]["content"]
    assert by_index == {0: "ok", 1: "ok"}
    roles = [event for event in events if "role" in event["choices"][0]["delta"]]
    assert len(roles) == 2
    reports = [event["kv_report"] for event in events if "kv_report" in event]
    assert [report["num_prompt_tokens"] for report in reports] == [19, 19]


async def test_the_report_is_in_the_chunk_that_ends_the_choice() -> None:
    async with serve(ScriptedEngine(says("ok"))) as served:
        events = await served.events(COMPLETIONS, ABC | {"kv_report": True})
    assert "kv_report" not in events[0]
    assert events[1]["kv_report"]["num_cached_tokens"] == 3
    assert events[1]["choices"][0]["finish_reason"] == "length"


async def test_tokens_are_sent_as_they_come() -> None:
    async with serve(ScriptedEngine()) as served:
        asking = asyncio.create_task(served.client.post(COMPLETIONS, json=ABC | {"stream": True}))
        request = await served.engine.wait_requests()
        served.engine.emit(request, "a")
        async with await asking as response:
            assert b'"text":"a"' in await response.content.readuntil(b"\n\n")
            served.engine.emit(request, "b")
            assert b'"text":"b"' in await response.content.readuntil(b"\n\n")
            served.engine.finish(request, FinishReason.LENGTH)
            rest = parse_events(await response.content.read())
    assert rest[-1]["choices"][0]["finish_reason"] == "length"


async def test_tokens_that_come_together_keep_their_offsets_and_counts() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    ask = ABC | {"logprobs": 1, "stream": True, "stream_options": options}
    async with serve(ScriptedEngine()) as served:
        asking = asyncio.create_task(served.client.post(COMPLETIONS, json=ask))
        request = await served.engine.wait_requests()
        # From the loop's own thread: both are there before the handler runs.
        served.engine.emit(request, "ok")
        served.engine.finish(request, FinishReason.LENGTH)
        async with await asking as response:
            events = parse_events(await response.read())
    assert [event["choices"][0]["logprobs"]["text_offset"] for event in events[:2]] == [[0], [1]]
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 2, 2]


async def test_an_engine_error_before_the_first_token_is_a_status() -> None:
    async with serve(ScriptedEngine()) as served:
        asking = asyncio.create_task(served.post(COMPLETIONS, ABC | {"stream": True}))
        request = await served.engine.wait_requests()
        served.engine.finish(request, FinishReason.ERROR, "out of memory")
        status, body = await asking
    assert status == 500
    assert body["error"]["message"] == "out of memory"
    assert body["error"]["type"] == "server_error"


async def test_an_engine_error_in_a_stream_is_its_last_event() -> None:
    async with serve(ScriptedEngine()) as served:
        asking = asyncio.create_task(served.client.post(COMPLETIONS, json=ABC | {"stream": True}))
        request = await served.engine.wait_requests()
        served.engine.emit(request, "a")
        async with await asking as response:
            assert b'"text":"a"' in await response.content.readuntil(b"\n\n")
            served.engine.finish(request, FinishReason.ERROR, "out of memory")
            (event,) = parse_events(await response.read())
    assert event["error"]["message"] == "out of memory"


async def test_a_request_that_the_engine_gives_up_is_unavailable() -> None:
    async with serve(ScriptedEngine()) as served:
        asking = asyncio.create_task(served.post(COMPLETIONS, ABC))
        request = await served.engine.wait_requests()
        served.engine.finish(request, FinishReason.ABORT)
        status, body = await asking
    assert status == 503
    assert body["error"]["code"] == "shutting_down"


async def test_a_silent_engine_does_not_keep_a_stopped_answer_open() -> None:
    engine = ScriptedEngine(answers_aborts=False)
    async with serve(engine) as served:
        ask = ABC | {"stop": "b", "kv_report": True}
        asking = asyncio.create_task(served.post(COMPLETIONS, ask))
        engine.emit(await engine.wait_requests(), "ab")
        status, body = await asking
    assert status == 200
    assert body["choices"][0]["text"] == "a"
    assert body["kv_report"] is None


async def test_a_client_that_reads_nothing_is_let_go() -> None:
    ended = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        stream = EventStream(request, stall_limit_s=0.05)
        try:
            while True:
                await stream.send([b"x" * 1_000_000])
        except ConnectionResetError:
            ended.set()
            raise

    app = web.Application()
    app.router.add_get("/", handler)
    server = HttpServer(app, HttpConfig(shutdown_timeout_s=1.0))
    url = await server.start()
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(10):
            await ended.wait()
        writer.transport.abort()
    finally:
        await server.close()
