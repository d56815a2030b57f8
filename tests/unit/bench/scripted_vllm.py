"""A made-up pair of vLLM instances: each answers both legs, and counts what it had from outside."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from kvferry.bench.client import CompletionClient
from kvferry.bench.legs_client import LegsClient, LegsTargets
from kvferry.client.engine_kinds import EngineKind
from kvferry.clock import SystemClock

Json = dict[str, Any]


@dataclass
class ScriptedInstance:
    """Answers a prefill leg with an offer, any other request with a stream of tokens."""

    name: str
    engine: EngineKind
    moves: bool = True
    """Whether a decode leg has anything from outside."""
    holds: bool = True
    """Whether a history that is asked for is there."""
    url: str = ""
    bodies: list[Json] = field(default_factory=list)
    request_ids: list[str | None] = field(default_factory=list)
    num_resets: int = 0
    offered: Json | None = None
    """Instead of a good offer."""
    _hits: int = 0

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        self.request_ids.append(request.headers.get("X-Request-Id"))
        params = body.get("kv_transfer_params") or {}
        if params.get("role") == "prefill" or params.get("do_remote_decode"):
            assert body["stream"] is False
            assert "stream_options" not in body
            offered = self._offer(body, params) if self.offered is None else self.offered
            return web.json_response({"kv_transfer_params": offered})
        if params and self.moves:
            self._hits += len(body["prompt"])
        events = [{"choices": [{"token_ids": [token]}]} for token in range(body["max_tokens"])]
        lines = [*map(json.dumps, events), "[DONE]"]
        return web.Response(text="".join(f"data: {line}\n\n" for line in lines))

    async def metrics(self, request: web.Request) -> web.Response:
        name = "vllm:external_prefix_cache_hits_total"
        return web.Response(text=f'# HELP {name} tokens\n{name}{{engine="0"}} {self._hits}.0\n')

    async def reset(self, request: web.Request) -> web.Response:
        self.num_resets += 1
        return web.Response()

    def _offer(self, body: Json, params: Json) -> Json:
        if self.engine is not EngineKind.VLLM:
            coordinates = {
                "remote_engine_id": self.name,
                "remote_host": "127.0.0.1",
                "remote_port": 1,
                "tp_size": 1,
                "pp_size": 1,
            }
            return {"do_remote_prefill": True, "remote_block_ids": [[1]], **coordinates}
        has_history = "history" in params and self.holds
        report: Json = {"num_read_back_tokens": len(body["prompt"]) if has_history else 0}
        if "history" in params:
            report["read_back_outcome"] = "received" if self.holds else "gone"
        peer = {"instance_id": self.name, "epoch": 1, "control_address": "tcp://127.0.0.1:1"}
        return {"role": "decode", "peer": peer, "prefill_report": report}


@dataclass
class ScriptedPair:
    """Two instances and a client of theirs."""

    prefill: ScriptedInstance
    decode: ScriptedInstance
    client: LegsClient


@asynccontextmanager
async def serving_pair(engine: EngineKind, **decode: Any) -> AsyncIterator[ScriptedPair]:  # noqa: ANN401
    """Serve a prefill and a decode instance; ``decode`` are the latter's fields."""
    instances = (ScriptedInstance("p", engine), ScriptedInstance("d", engine, **decode))
    runners = []
    try:
        for instance in instances:
            app = web.Application(client_max_size=2**24)
            app.router.add_post("/v1/completions", instance.complete)
            app.router.add_post("/reset_prefix_cache", instance.reset)
            app.router.add_get("/metrics", instance.metrics)
            runner = web.AppRunner(app)
            await runner.setup()
            runners.append(runner)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0][:2]
            instance.url = f"http://{host}:{port}"
        targets = LegsTargets(
            engine=engine, prefill_url=instances[0].url, decode_url=instances[1].url
        )
        async with aiohttp.ClientSession() as session:
            client = LegsClient(CompletionClient(session, SystemClock()), targets)
            yield ScriptedPair(*instances, client)
    finally:
        for runner in runners:
            await runner.cleanup()
