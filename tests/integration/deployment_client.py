"""A client of a deployment's processes: answers, pools, metrics; every call has a bound."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kvferry.client.metrics_text import metric_total
from tests.integration.deployment_setup import BOUND_S, Program
from tests.own_key import signed, signed_body

SETTLE_S = 15.0
PATH = "/v1/completions"
Json = dict[str, Any]
_numbers = itertools.count(1)


def prompt_of(num_tokens: int, start: int) -> list[int]:
    """A prompt that no other ``start`` shares a block with."""
    state = 7919 * start + 17
    tokens = []
    for _ in range(num_tokens):
        state = (state * 1103515245 + 12345) % 2**31
        tokens.append(3 + (state >> 12) % 250)
    return tokens


def fresh_prompt(num_tokens: int) -> list[int]:
    return prompt_of(num_tokens, next(_numbers))


def body_of(prompt: Sequence[int] | str, max_tokens: int = 8, **fields: object) -> Json:
    return {
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "return_token_ids": True,
        "kv_report": True,
        **fields,
    }


@dataclass(slots=True)
class Answer:
    """One whole or streamed answer, or one that broke off."""

    status: int
    json: Json = field(default_factory=dict)
    events: list[Json] = field(default_factory=list)
    is_done: bool = False
    """A stream that had its end mark."""
    elapsed_s: float = 0.0

    @property
    def token_ids(self) -> list[int]:
        sources = self.events or [self.json]
        choices = [source["choices"][0] for source in sources if source.get("choices")]
        return [token for choice in choices for token in choice.get("token_ids") or ()]

    @property
    def report(self) -> Json:
        for source in (*reversed(self.events), self.json):
            if source.get("kv_report"):
                found: Json = source["kv_report"]
                return found
        return {}

    @property
    def outcome(self) -> str:
        return str(self.report.get("receive_outcome", ""))

    @property
    def error(self) -> Json | None:
        """OpenAI's error object, of a whole answer or of a stream's last event."""
        for source in (*self.events[-1:], self.json):
            if "error" in source:
                error: Json = source["error"]
                assert {"message", "type", "param", "code"} <= error.keys(), error
                assert error["message"]
                return error
        return None

    @property
    def offered(self) -> Json:
        offered: Json = self.json["kv_transfer_params"]
        return offered


@dataclass(slots=True)
class Client:
    """Sends requests and looks at processes, each call within a bound."""

    session: aiohttp.ClientSession

    async def post(
        self,
        program: Program,
        body: object,
        *,
        bound_s: float = BOUND_S,
        path: str = PATH,
        mode: str | None = None,
        retention_s: float | None = None,
    ) -> Answer:
        """``mode`` is how a router is to have the KV moved, ``retention_s`` for how long kept."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        # A router refuses a client's signature, as it does any header of ours that it knows not.
        is_leg = not program.name.startswith("router")
        headers = {"Content-Type": "application/json", **(signed_body(raw) if is_leg else {})}
        if retention_s is not None:
            headers["X-KVFerry-Retention-S"] = str(retention_s)
        if mode is not None:
            headers["X-KVFerry-Mode"] = mode
        started_s = time.monotonic()
        async with (
            asyncio.timeout(bound_s),
            self.session.post(program.url + path, data=raw, headers=headers) as response,
        ):
            content = await response.read()
            answer = Answer(response.status, elapsed_s=time.monotonic() - started_s)
            if response.content_type == "text/event-stream":
                _take_events(answer, content)
            else:
                answer.json = json.loads(content)
        return answer

    async def plain(self, program: Program, body: Json) -> list[int]:
        """The tokens of one instance that does it all and shares nothing."""
        answer = await self.post(program, salted(body), bound_s=60.0)
        assert answer.status == 200, answer.json
        return answer.token_ids

    async def prefill(self, program: Program, body: Json, transfer_id: str | None = None) -> Answer:
        ask = {"transfer_id": transfer_id or new_transfer(), "role": "prefill"}
        return await self.post(program, body | {"kv_transfer_params": ask}, bound_s=60.0)

    async def decode(
        self, program: Program, body: Json, offered: Json, *, bound_s: float = BOUND_S
    ) -> Answer:
        return await self.post(program, body | {"kv_transfer_params": offered}, bound_s=bound_s)

    async def withdraw(self, prefill: Program, offered: Json) -> None:
        url = f"{prefill.url}/kvferry/transfers/{offered['transfer_id']}"
        headers = signed(b"", offered["transfer_id"])
        async with (
            asyncio.timeout(BOUND_S),
            self.session.delete(url, headers=headers) as response,
        ):
            assert response.status == 204

    async def decode_until_reading(
        self, decode: Program, body: Json, offered: Json
    ) -> asyncio.Task[Answer]:
        """Begin a decode leg; return it as soon as its READ is posted."""
        since = decode.log_size()
        leg = asyncio.create_task(self.decode(decode, body, offered))
        await decode.wait_log(f"reading .* of {offered['transfer_id']}", since)
        return leg

    async def instance(self, program: Program) -> Json:
        async with (
            asyncio.timeout(BOUND_S),
            self.session.get(program.url + "/kvferry/instance") as response,
        ):
            shown: Json = await response.json()
            return shown

    async def metric(self, program: Program, name: str, **labels: str) -> float:
        async with (
            asyncio.timeout(BOUND_S),
            self.session.get(program.url + "/metrics") as response,
        ):
            text = await response.text()
        return metric_total(text, name, **labels) or 0.0

    async def wait_whole(self, *programs: Program, timeout_s: float = SETTLE_S) -> None:
        """Return once every block of every instance is free and nothing runs or is held."""
        for program in programs:
            deadline_s = time.monotonic() + timeout_s
            while not is_whole(shown := await self.instance(program)):
                assert time.monotonic() < deadline_s, f"{program.name} is not whole: {shown}"
                await asyncio.sleep(0.02)

    async def wait_figure(self, program: Program, name: str, value: int) -> None:
        """Return once a figure of the instance, or of its exchange, is at least ``value``."""
        async with asyncio.timeout(BOUND_S):
            while True:
                shown = await self.instance(program)
                if {**shown, **shown["exchange"]}[name] >= value:
                    return
                await asyncio.sleep(0.002)


def salted(body: Json) -> Json:
    """The same request with nothing of it in any cache."""
    return body | {"cache_salt": f"salt-{next(_numbers)}"}


def is_whole(shown: Json) -> bool:
    exchange = shown["exchange"]
    counts = [value for key, value in exchange.items() if key.startswith("num_")]
    busy = shown["num_requests_running"] + shown["num_requests_waiting"]
    return shown["num_free_blocks"] == shown["num_blocks"] and not busy and not any(counts)


def _take_events(answer: Answer, content: bytes) -> None:
    for event in re.split(rb"\n\n+", content):
        if not event or event.startswith(b": "):  # A comment, to be skipped.
            continue
        assert event.startswith(b"data: "), event
        if event == b"data: [DONE]":
            answer.is_done = True
        else:
            answer.events.append(json.loads(event[6:]))


def new_transfer() -> str:
    return f"xfer-test-{next(_numbers)}"


@asynccontextmanager
async def open_client() -> AsyncIterator[Client]:
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        yield Client(session)


async def wait_healthy(client: Client, router: Program, count: int) -> None:
    """Return once the router finds ``count`` instances healthy."""
    async with asyncio.timeout(BOUND_S):
        while await client.metric(router, "kvferry_router_instance_healthy") != count:
            await asyncio.sleep(0.02)
