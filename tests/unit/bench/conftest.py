"""A server that answers completions from a script, and a client for it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvferry.bench.client import CompletionClient
from kvferry.clock import SystemClock

Events = list[dict[str, Any] | bytes]
Answer = Callable[[dict[str, Any]], Events]
ServeAnswer = Callable[[Answer], Awaitable[str]]


_MODE_KEY = "mode asked by header"


def with_mode(answer: Callable[[dict[str, Any], str | None], Events]) -> Answer:
    """Return an answer that is told the mode that the request asks for by header."""

    def answer_body(body: dict[str, Any]) -> Events:
        return answer(body, body.get(_MODE_KEY))

    return answer_body


def _as_bytes(event: dict[str, Any] | bytes) -> bytes:
    return event if isinstance(event, bytes) else b"data: " + json.dumps(event).encode() + b"\n\n"


@pytest.fixture
async def serve_answer() -> AsyncIterator[ServeAnswer]:
    """Start a server whose completions are the events that a function makes of the body."""
    runners: list[web.AppRunner] = []

    async def serve(answer: Answer) -> str:
        async def complete(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            body = await request.json()
            if "X-KVFerry-Mode" in request.headers:
                body[_MODE_KEY] = request.headers["X-KVFerry-Mode"]
            for event in answer(body):
                await response.write(_as_bytes(event))
            return response

        app = web.Application()
        app.router.add_post("/v1/completions", complete)
        app.router.add_post("/v1/chat/completions", complete)
        runner = web.AppRunner(app)
        await runner.setup()
        runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        return f"http://{host}:{port}"

    yield serve
    for runner in runners:
        await runner.cleanup()


@pytest.fixture
async def client() -> AsyncIterator[CompletionClient]:
    async with aiohttp.ClientSession() as session:
        yield CompletionClient(session, SystemClock())
