"""A made-up deployment that reuses as a real one does, and samples as it would give them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from kvferry.bench.client import CompletionClient
from kvferry.bench.turns import TurnArm, TurnSample, TurnTargets
from kvferry.clock import SystemClock

Json = dict[str, Any]


@dataclass
class ScriptedDeployment:
    """Router and prefill instance in one; its answers are made of the prompt's length.

    ``change`` may alter a report before it is sent.
    """

    change: Callable[[Json], Json] = lambda report: report
    may_reset: bool = True
    url: str = ""
    events: list[str] = field(default_factory=list)
    """``reset``, or the session of a turn, as they come."""
    bodies: list[Json] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    _prefill_has: dict[str, int] = field(default_factory=dict)
    _decode_has: dict[str, int] = field(default_factory=dict)

    @property
    def targets(self) -> TurnTargets:
        return TurnTargets(router_url=self.url, prefill_urls=(self.url,))

    async def reset(self, request: web.Request) -> web.Response:
        self.events.append("reset")
        self._prefill_has.clear()
        return web.Response(status=200 if self.may_reset else 403, text="say --enable-it")

    async def complete(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        headers = dict(request.headers)
        self.bodies.append(body)
        self.headers.append(headers)
        self.events.append(headers["X-Session-ID"])
        num_tokens = len(body["prompt"]) if "prompt" in body else len(str(body["messages"]))
        answer = [num_tokens + number for number in range(body["max_tokens"])]
        report = self.change(self._report(body["cache_salt"], headers, num_tokens, len(answer)))
        events: list[Json] = [
            {"choices": [{"index": 0, "text": "a", "token_ids": [token]}]} for token in answer
        ]
        events[-1]["kv_report"] = report
        events.append({"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 7}}})
        lines = [*map(json.dumps, events), "[DONE]"]
        return web.Response(text="".join(f"data: {line}\n\n" for line in lines))

    def _report(self, salt: str, headers: dict[str, str], num_tokens: int, num_new: int) -> Json:
        cached = self._prefill_has.get(salt, 0)
        reads_back = headers.get("X-KVFerry-Read-Back") != "off"
        read_back = max(0, self._decode_has.get(salt, 0) - cached) if reads_back else 0
        self._prefill_has[salt] = num_tokens
        self._decode_has[salt] = num_tokens + num_new
        return {
            "num_prompt_tokens": num_tokens,
            "mode": headers.get("X-KVFerry-Mode"),
            "prefill": {
                "num_cached_tokens": cached,
                "num_read_back_tokens": read_back,
                "num_read_back_bytes": 10 * read_back,
                "num_computed_tokens": num_tokens - cached - read_back,
                "read_back_outcome": "received" if read_back else "",
                "read_back_s": 0.25 if read_back else 0.0,
                "compute_s": 0.5,
            },
        }


@asynccontextmanager
async def serving(deployment: ScriptedDeployment) -> AsyncIterator[CompletionClient]:
    """Serve ``deployment``, which knows its URL then, and yield a client."""
    app = web.Application()
    app.router.add_post("/v1/completions", deployment.complete)
    app.router.add_post("/v1/chat/completions", deployment.complete)
    app.router.add_post("/reset_prefix_cache", deployment.reset)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        deployment.url = f"http://{host}:{port}"
        async with aiohttp.ClientSession() as session:
            yield CompletionClient(session, SystemClock())
    finally:
        await runner.cleanup()


def sample_of(arm: TurnArm, turn: int, ttft_s: float, **fields: Any) -> TurnSample:  # noqa: ANN401
    """One turn of a conversation that begins with 100 tokens and grows by 1000."""
    num_history = 1000 * (turn - 1)
    values: dict[str, Any] = {
        "repeat": 0,
        "conversation": 0,
        "num_history_tokens": num_history,
        "num_new_tokens": 100,
        "read_back_s": 0.01 if arm.reads_back else 0.0,
        "compute_s": ttft_s / 2,
        "num_cached_tokens": 0 if arm.loses_cache else num_history,
        "num_read_back_tokens": num_history if arm.reads_back else 0,
        "num_read_back_bytes": 10 * num_history if arm.reads_back else 0,
        "num_computed_tokens": 100 if arm is not TurnArm.RECOMPUTE else num_history + 100,
        "outcome": "received" if arm.reads_back and num_history else "",
        "num_usage_cached_tokens": None,
        "plain_copy_s": 0.02 if arm.reads_back and num_history else None,
        "answer": (1, 2, 3),
        **fields,
    }
    return TurnSample(arm=arm, turn=turn, ttft_s=ttft_s, **values)
