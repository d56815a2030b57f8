"""The HTTP side of vLLM with its own NIXL connectors, without a model.

Knows what a real one answers to the two legs; records what it was asked, and fails on demand.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from kvferry.client.metrics_text import metric_by_label
from kvferry.clock import SystemClock
from kvferry.router.config import RouterConfig
from kvferry.router.engines import EngineConfig
from kvferry.router.service import Router

_LIMIT_S = 10.0
NUM_PROMPT_TOKENS = 130
NUM_KEPT_BLOCKS = 7
"""Whole blocks of 16 in the prompt, less its seam."""
ERROR_EVENTS = b'data: {"error": {"message": "no KV", "code": 500}}\n\ndata: [DONE]\n\n'
EVENTS = b'data: {"choices": [{"text": "hi", "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'


@dataclass(frozen=True, slots=True)
class Leg:
    """One request as it came."""

    headers: Mapping[str, str]
    body: dict[str, Any]

    @property
    def params(self) -> dict[str, Any]:
        return dict(self.body.get("kv_transfer_params") or {})

    @property
    def role(self) -> str:
        if not self.params:
            return "plain"
        return "prefill" if self.params["do_remote_decode"] else "decode"


@dataclass(slots=True)
class FakeNixl:
    """One instance."""

    name: str
    legs: list[Leg] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    """Of the next answers; 200 when none is left."""
    failures_in_stream: list[bool] = field(default_factory=list)
    """Whether the next streams begin with an error."""
    gate: asyncio.Event | None = None
    """Decode legs with transfer parameters are answered once it is set."""
    num_left: int = 0
    other_requests: list[str] = field(default_factory=list)
    is_well: bool = True
    url: str = ""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def roles(self) -> list[str]:
        return [leg.role for leg in self.legs]

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(_LIMIT_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def complete(self, request: web.Request) -> web.StreamResponse:
        leg = Leg(request.headers, await request.json())
        self.legs.append(leg)
        self.changed.set()
        status = self.statuses.pop(0) if self.statuses else 200
        if status != 200:
            return web.json_response({"error": {"message": "no"}}, status=status)
        try:
            if self.gate is not None and leg.role == "decode":
                await self.gate.wait()
        except asyncio.CancelledError:
            self.num_left += 1
            self.changed.set()
            raise
        if leg.body.get("stream"):
            fails = self.failures_in_stream.pop(0) if self.failures_in_stream else False
            body = ERROR_EVENTS if fails else EVENTS
            return web.Response(body=body, content_type="text/event-stream")
        return web.json_response(self._answer(leg))

    def _answer(self, leg: Leg) -> dict[str, Any]:
        answer: dict[str, Any] = {
            "choices": [{"text": "hi"}],
            "usage": {"prompt_tokens": NUM_PROMPT_TOKENS, "completion_tokens": 70},
        }
        if leg.role != "plain":
            is_prefill = leg.role == "prefill"
            answer["kv_transfer_params"] = {
                "do_remote_prefill": is_prefill,
                "do_remote_decode": not is_prefill,
                "remote_block_ids": [list(range(13))],
                "remote_engine_id": self.name,
                "remote_request_id": f"cmpl-{len(self.legs)}",
                "remote_host": "127.0.0.1",
                "remote_port": 5600,
                "tp_size": 1,
                "remote_num_tokens": 199,
            }
        return answer

    async def other(self, request: web.Request) -> web.Response:
        if request.path == "/health":
            return web.Response(status=200 if self.is_well else 503)
        self.other_requests.append(f"{request.method} {request.path}")
        return web.Response(status=404)


@dataclass(slots=True)
class NixlWorld:
    """A router over such instances."""

    router: Router
    prefill: list[FakeNixl]
    decode: list[FakeNixl]
    client: aiohttp.ClientSession

    async def ask(
        self, prompt: str = "a", headers: Mapping[str, str] | None = None, **fields: object
    ) -> tuple[int, bytes]:
        body = {"prompt": prompt, **fields}
        url = f"{self.router.url}/v1/completions"
        async with (
            asyncio.timeout(_LIMIT_S),
            self.client.post(url, json=body, headers=headers) as response,
        ):
            return response.status, await response.read()

    async def outcomes(self) -> dict[str, int]:
        async with self.client.get(self.router.url + "/metrics") as response:
            text = await response.text()
        found = metric_by_label(text, "kvferry_router_requests_total", "outcome")
        return {outcome: int(count) for outcome, count in found.items() if count}


@asynccontextmanager
async def nixl_world(
    engines_at: Callable[[Sequence[str]], EngineConfig],
    num_prefill: int = 1,
    num_decode: int = 1,
    **options: Any,  # noqa: ANN401 - those of RouterConfig
) -> AsyncIterator[NixlWorld]:
    """``engines_at`` is told the URLs of the prefill instances."""
    prefill = [FakeNixl(f"p{number}") for number in range(num_prefill)]
    decode = [FakeNixl(f"d{number}") for number in range(num_decode)]
    async with AsyncExitStack() as stack:
        for engine in (*prefill, *decode):
            await _serve(engine, stack)
        urls = [engine.url for engine in prefill]
        options = {"shutdown_timeout_s": 0.0, "health_interval_s": 60.0, **options}
        config = RouterConfig(
            prefill_urls=tuple(urls),
            decode_urls=tuple(engine.url for engine in decode),
            port=0,
            engines=engines_at(urls),
            **options,
        )
        router = Router(config, clock=SystemClock())
        await router.start()
        stack.push_async_callback(router.stop)
        client = await stack.enter_async_context(aiohttp.ClientSession())
        yield NixlWorld(router, prefill, decode, client)


async def _serve(engine: FakeNixl, stack: AsyncExitStack) -> None:
    app = web.Application()
    app.router.add_post("/v1/completions", engine.complete)
    app.router.add_route("*", "/{tail:.*}", engine.other)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
