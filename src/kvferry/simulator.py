"""An instance without a model: answers as one would, after set times, and computes nothing.

For trying routers, benchmarks and clients where there is no model and no time. Speaks what a router
uses of kvferry's engine, of vLLM with FerryConnector, and of vLLM with its NixlConnector. Moving KV
is a wait: who receives asks the other side over HTTP, at the port that its peer address names, for
what a real instance would read. Every text has as many tokens as a quarter of its letters.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from kvferry.client.engine_kinds import EngineKind
from kvferry.errors import RequestError
from kvferry.options import check_options, option
from kvferry.protocol.params import MAX_PORT

Json = dict[str, Any]
_BYTES_PER_TOKEN = 1024
_LETTERS_PER_TOKEN = 4
_PROGRESS_TOKENS = 512
"""A prefill that is followed tells how far it is after so many tokens."""
_LEASE_S = 30.0
_TAKE_TIMEOUT_S = 60.0
_MAX_BODY_BYTES = 64 * 1024 * 1024
_DEFAULT_TOKENS = 16
_CHAT_PATH = "/v1/chat/completions"


DIALECTS = (EngineKind.KVFERRY, EngineKind.VLLM, EngineKind.VLLM_NIXL)
"""vLLM's hand over by pull only: their pushes are arranged at ports of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorConfig:
    """Who the instance is, and how long everything takes."""

    dialect: EngineKind = option(
        EngineKind.KVFERRY,
        "Whose engine is simulated: kvferry's; vLLM with FerryConnector; vLLM with its own "
        "NixlConnector. vLLM's hand over by pull only.",
        choices=DIALECTS,
    )
    host: str = option("127.0.0.1", "Address that HTTP is served on.")
    port: int = option(0, "0 takes a free port.", minimum=0, maximum=MAX_PORT)
    instance_id: str = option("simulated", "Its name, and its model's.")
    prefill_ms: float = option(5.0, "To compute any prompt.", minimum=0)
    prefill_ms_per_token: float = option(
        0.2, "More for each of its tokens. Prompts are computed one after another.", minimum=0
    )
    decode_ms: float = option(20.0, "From one token of an answer to the next.", minimum=0)
    decode_ms_per_request: float = option(
        0.0, "More of that for each other request that is in service.", minimum=0
    )
    transfer_ms_per_token: float = option(
        0.01, "To move the KV of a prompt, for each of its tokens.", minimum=0
    )

    def __post_init__(self) -> None:
        """Refuse what is out of range. Raises ``ConfigError``."""
        check_options(self)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a request asks, as far as it matters here."""

    body: Json
    is_chat: bool
    num_prompt_tokens: int
    max_tokens: int

    @property
    def params(self) -> Json:
        found = self.body.get("kv_transfer_params")
        return found if isinstance(found, dict) else {}

    @property
    def is_prefill_leg(self) -> bool:
        return self.params.get("role") == "prefill" or bool(self.params.get("do_remote_decode"))

    @property
    def is_decode_leg(self) -> bool:
        return self.params.get("role") == "decode" or bool(self.params.get("do_remote_prefill"))


class SimulatedEngine:
    """One instance; ``build_app`` serves it."""

    def __init__(self, config: SimulatorConfig) -> None:
        self._config = config
        self._epoch = time.time_ns()
        self._is_computing = asyncio.Lock()
        self._num_running = 0
        self._num_hit_tokens = 0
        self._offers: dict[str, asyncio.Future[Json]] = {}
        """What prefill has computed, or will have, by transfer id; a receiver may wait for it."""
        self.port = config.port

    def build_app(self) -> web.Application:
        """Return the HTTP application of this instance."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_refuse])
        app.add_routes(
            [
                web.post("/v1/completions", self._complete),
                web.post(_CHAT_PATH, self._complete),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.post("/tokenize", self._tokenize),
                web.get("/simulated/transfers/{transfer_id}", self._take),
            ]
        )
        if self._config.dialect is EngineKind.KVFERRY:
            app.router.add_get("/kvferry/instance", self._identify)
            app.router.add_delete("/kvferry/transfers/{transfer_id}", self._end)
        return app

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        asked = _asked(await request.read(), is_chat=request.path == _CHAT_PATH)
        self._num_running += 1
        try:
            if asked.is_prefill_leg:
                return await self._prefill_leg(request, asked)
            report = await self._receive(asked) if asked.is_decode_leg else None
            report = report or await self._compute_prompt(asked)
            if asked.body.get("stream"):
                return await self._stream(request, asked, report)
            async for _ in self._steps(asked, report):
                pass
            return web.json_response(self._whole(asked, asked.max_tokens, report))
        finally:
            self._num_running -= 1

    async def _compute_prompt(self, asked: _Asked) -> Json:
        """Take the time that a prompt takes; return a report of it."""
        async with self._is_computing:
            config, count = self._config, asked.num_prompt_tokens
            begun_s = time.monotonic()
            await asyncio.sleep((config.prefill_ms + config.prefill_ms_per_token * count) / 1e3)
            end_s = time.monotonic()
        return {
            "prefill_end_s": end_s,
            "num_prompt_tokens": count,
            "num_computed_prompt_tokens": count,
            "prefill": {"num_computed_tokens": count, "compute_s": end_s - begun_s},
        }

    async def _prefill_leg(self, request: web.Request, asked: _Asked) -> web.StreamResponse:
        name = str(asked.params.get("transfer_id") or f"{self._config.instance_id}-{id(asked)}")
        offer = self._offers.setdefault(name, asyncio.get_running_loop().create_future())
        try:
            if not asked.body.get("kv_progress"):
                report = await self._compute_prompt(asked)
                answer = self._whole(asked, 1, report, self._offered(name, asked, report))
                response: web.StreamResponse = web.json_response(answer)
            else:
                response, report = await self._stream_prefill(request, asked, name)
        except BaseException:
            self._withdraw(name)
            raise
        if not offer.done():
            offer.set_result(report)
        asyncio.get_running_loop().call_later(_LEASE_S, self._withdraw, name)
        return response

    async def _stream_prefill(
        self, request: web.Request, asked: _Asked, name: str
    ) -> tuple[web.StreamResponse, Json]:
        """Tell how far the prefill is, then its whole answer."""
        response = await _open_stream(request)
        computing = asyncio.ensure_future(self._compute_prompt(asked))
        count, num_computed = asked.num_prompt_tokens, 0
        step_s = _PROGRESS_TOKENS * self._config.prefill_ms_per_token / 1e3
        try:
            while not (await asyncio.wait([computing], timeout=step_s or None))[0]:
                num_computed = min(count, num_computed + _PROGRESS_TOKENS)
                told = {"num_computed_tokens": num_computed, "num_prompt_tokens": count}
                await response.write(_event({"kv_progress": told}))
            report = await computing
        finally:
            computing.cancel()
        answer = self._whole(asked, 1, report, self._offered(name, asked, report))
        await _end_stream(response, answer)
        return response, report

    def _offered(self, name: str, asked: _Asked, report: Json) -> Json:
        """Return what a decode instance is to be told."""
        if self._config.dialect is EngineKind.VLLM_NIXL:
            return {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": self._config.instance_id,
                "remote_request_id": name,
                "remote_block_ids": [[0]],
                "remote_host": self._config.host,
                "remote_port": self.port,
                "tp_size": 1,
            }
        first_token = {"first_token": {"token_id": 0, "seed": 0}}
        return {
            "transfer_id": name,
            "role": "decode",
            "mode": asked.params.get("mode", "pull"),
            "peer": self._peer(),
            "num_prompt_tokens": asked.num_prompt_tokens,
            "lease_s": _LEASE_S,
            "prefill_report": report["prefill"],
            **(first_token if self._config.dialect is EngineKind.KVFERRY else {}),
            "prefill_end_s": report["prefill_end_s"],
        }

    async def _receive(self, asked: _Asked) -> Json | None:
        """Get a prompt's KV from who computed it; None: it is not there, so compute it here."""
        params = asked.params
        if self._config.dialect is EngineKind.VLLM_NIXL:
            address = f"{_in_url(params['remote_host'])}:{params['remote_port']}"
            name = params["remote_request_id"]
        else:
            address = str(params["peer"]["control_address"]).removeprefix("tcp://")
            name = params["transfer_id"]
        mode = params.get("mode", "pull")
        url = f"http://{address}/simulated/transfers/{name}?mode={mode}"
        timeout = aiohttp.ClientTimeout(total=_TAKE_TIMEOUT_S)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as found:
                if found.status != 200:
                    return None
                report: Json = (await found.json())["report"]
        except (aiohttp.ClientError, TimeoutError):
            return None
        count = asked.num_prompt_tokens
        await asyncio.sleep(self._config.transfer_ms_per_token * count / 1e3)
        self._num_hit_tokens += count
        return report | {
            "num_computed_prompt_tokens": 0,
            "num_received_tokens": count,
            "num_received_bytes": count * _BYTES_PER_TOKEN,
            "receive_outcome": "received",
            "transport": "simulated",
            "mode": mode,
        }

    async def _steps(self, asked: _Asked, report: Json) -> AsyncIterator[int]:
        """Yield the number of each token when it is made."""
        has_first = self._config.dialect is EngineKind.KVFERRY or "transport" not in report
        for number in range(asked.max_tokens):
            if number or not has_first:
                config = self._config
                further = config.decode_ms_per_request * (self._num_running - 1)
                await asyncio.sleep((config.decode_ms + further) / 1e3)
            yield number

    async def _stream(
        self, request: web.Request, asked: _Asked, report: Json
    ) -> web.StreamResponse:
        response = await _open_stream(request)
        async for number in self._steps(asked, report):
            is_last = number == asked.max_tokens - 1
            choice: Json = {"index": 0, "finish_reason": "length" if is_last else None}
            text = _text(1)
            choice |= {"delta": {"content": text}} if asked.is_chat else {"text": text}
            if asked.body.get("return_token_ids"):
                choice["token_ids"] = [number]
            await response.write(_event(self._top(asked, [choice])))
        options = asked.body.get("stream_options") or {}
        last = self._top(asked, []) | self._extras(asked, report)
        if options.get("include_usage"):
            last["usage"] = _usage(asked, asked.max_tokens)
        await _end_stream(response, last if len(last) > len(self._top(asked, [])) else None)
        return response

    def _whole(
        self, asked: _Asked, num_tokens: int, report: Json, offered: Json | None = None
    ) -> Json:
        choice: Json = {"index": 0, "finish_reason": "length"}
        text = _text(num_tokens)
        if asked.is_chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        if asked.body.get("return_token_ids"):
            choice["token_ids"] = list(range(num_tokens))
        answer = self._top(asked, [choice]) | self._extras(asked, report)
        answer["usage"] = _usage(asked, num_tokens)
        return answer if offered is None else answer | {"kv_transfer_params": offered}

    def _extras(self, asked: _Asked, report: Json) -> Json:
        wanted = asked.body.get("kv_report") and self._config.dialect is EngineKind.KVFERRY
        return {"kv_report": report} if wanted else {}

    def _top(self, asked: _Asked, choices: list[Json]) -> Json:
        kind = "chat.completion" if asked.is_chat else "text_completion"
        if asked.is_chat and asked.body.get("stream"):
            kind = "chat.completion.chunk"
        model = asked.body.get("model", self._config.instance_id)
        created_s = int(time.time())
        return {
            "id": f"simulated-{id(asked)}",
            "object": kind,
            "created": created_s,
            "model": model,
            "choices": choices,
        }

    def _peer(self) -> Json:
        address = f"tcp://{_in_url(self._config.host)}:{self.port}"
        me = {"instance_id": self._config.instance_id, "epoch": self._epoch}
        return me | {"control_address": address}

    async def _take(self, request: web.Request) -> web.Response:
        """Answer what prefill has computed for a transfer, which is gone then; 404 without any.

        The receiver of a push may come before its prefill has ended, or begun: it waits.
        """
        name = request.match_info["transfer_id"]
        if request.query.get("mode") == "push":
            self._offers.setdefault(name, asyncio.get_running_loop().create_future())
        offer = self._offers.get(name)
        if offer is not None:
            await asyncio.wait([offer], timeout=_TAKE_TIMEOUT_S)
        if offer is None or not offer.done() or offer.cancelled():
            return web.Response(status=404)
        self._withdraw(name)
        return web.json_response({"report": offer.result()})

    def _withdraw(self, name: str) -> None:
        offer = self._offers.pop(name, None)
        if offer is not None:
            offer.cancel()

    async def _end(self, request: web.Request) -> web.Response:
        self._withdraw(request.match_info["transfer_id"])
        return web.Response(status=204)

    async def _identify(self, request: web.Request) -> web.Response:
        del request
        about = {"capabilities": ["push"], "fingerprint": "00", "transport": "simulated"}
        load = {"num_blocks": 1, "num_free_blocks": 1, "num_requests_running": self._num_running}
        return web.json_response(self._peer() | about | load)

    async def _models(self, request: web.Request) -> web.Response:
        del request
        model = {"id": self._config.instance_id, "object": "model", "owned_by": "kvferry"}
        return web.json_response({"object": "list", "data": [model]})

    async def _health(self, request: web.Request) -> web.Response:
        del request
        return web.Response()

    async def _metrics(self, request: web.Request) -> web.Response:
        del request
        return web.Response(
            text=f"vllm:num_requests_running {self._num_running}\n"
            f"vllm:external_prefix_cache_hits_total {self._num_hit_tokens}\n"
        )

    async def _tokenize(self, request: web.Request) -> web.Response:
        asked = _asked(await request.read(), is_chat=False)
        tokens = list(range(asked.num_prompt_tokens))
        return web.json_response({"count": len(tokens), "tokens": tokens})


@contextlib.asynccontextmanager
async def serving(config: SimulatorConfig) -> AsyncIterator[str]:
    """Serve a simulated instance; yield its base URL."""
    engine = SimulatedEngine(config)
    runner = web.AppRunner(
        engine.build_app(), access_log=None, handler_cancellation=True, shutdown_timeout=1.0
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, config.host, config.port).start()
        engine.port = runner.addresses[0][1]
        yield f"http://{_in_url(config.host)}:{engine.port}"
    finally:
        await runner.cleanup()


def _asked(raw: bytes, *, is_chat: bool) -> _Asked:
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise RequestError(f"the request body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError("the request body must be a JSON object")
    most = body.get("max_completion_tokens") or body.get("max_tokens") or _DEFAULT_TOKENS
    if not isinstance(most, int) or most < 1:
        raise RequestError("max_tokens must be at least 1")
    return _Asked(body, is_chat, _num_tokens(body), most)


def _num_tokens(body: Json) -> int:
    """Return how many tokens a prompt has: as many as ids, or by its letters."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
        return max(1, len(prompt))
    text = prompt if isinstance(prompt, str) else json.dumps(prompt or body.get("messages", ""))
    return max(1, len(text) // _LETTERS_PER_TOKEN)


def _usage(asked: _Asked, num_tokens: int) -> Json:
    count = asked.num_prompt_tokens
    return {
        "prompt_tokens": count,
        "completion_tokens": num_tokens,
        "total_tokens": count + num_tokens,
    }


def _text(num_tokens: int) -> str:
    return " kv" * num_tokens


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _event(content: Json) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


async def _open_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    return response


async def _end_stream(response: web.StreamResponse, last: Json | None) -> None:
    if last is not None:
        await response.write(_event(last))
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()


@web.middleware
async def _refuse(request: web.Request, handler: Any) -> web.StreamResponse:  # noqa: ANN401
    try:
        response: web.StreamResponse = await handler(request)
    except RequestError as error:
        return web.json_response({"error": {"message": str(error)}}, status=400)
    return response
