"""``ScriptedEngine``: an instance's HTTP side without a model, with faults on demand.

Speaks the part of OpenAI's API that the router uses, with ``kv_transfer_params``; records what it
was asked; holds what it offers until it is read or ended. Owns a real server on a free port.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from aiohttp import web

_WAIT_LIMIT_S = 5.0
_COMPLETION_PATHS = ("/v1/completions", "/v1/chat/completions")
DEFAULT_EVENTS = (
    b'data: {"choices": [{"text": "one"}]}\n\n',
    b'data: {"choices": [{"text": " two", "finish_reason": "stop"}]}\n\n',
    b"data: [DONE]\n\n",
)
DEFAULT_ANSWER = b'{"object": "text_completion", "choices": [{"index": 0, "text": "one two"}]}'


@dataclass(slots=True, kw_only=True)
class Script:
    """How requests are answered; every part may be a fault."""

    status: int = 200
    body: bytes | None = None
    """The whole answer; None makes one that fits the request."""
    headers: Mapping[str, str] = field(default_factory=dict)
    events: tuple[bytes, ...] = DEFAULT_EVENTS
    """What a stream consists of."""
    extra_params: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the offered transfer parameters."""
    offers: bool = True
    progress: tuple[tuple[int, int], ...] = ()
    """A prefill leg that asks for progress is streamed: (computed, all) tokens, then its answer."""
    before_headers: asyncio.Event | None = None
    """Nothing is answered until it is set."""
    before_event: Mapping[int, asyncio.Event] = field(default_factory=dict)
    """The event of that number is held until it is set."""
    reset_before_headers: bool = False
    reset_after_events: int | None = None
    pause_s: float = 0.0
    """Between two events, for measurements."""


@dataclass(frozen=True, slots=True)
class Received:
    """One request as it came."""

    path: str
    headers: Mapping[str, str]
    raw: bytes
    body: dict[str, Any]

    @property
    def params(self) -> dict[str, Any] | None:
        """Its transfer parameters."""
        return self.body.get("kv_transfer_params")

    @property
    def role(self) -> str:
        """``prefill``, ``decode`` or ``plain``."""
        return str(self.params["role"]) if self.params else "plain"


class ScriptedEngine:
    """One instance; ``peers`` is shared by all that hand over to each other."""

    def __init__(self, name: str, peers: dict[str, ScriptedEngine] | None = None) -> None:
        self.name = name
        self.prefill = Script()
        self.decode = Script()
        """Also answers plain requests."""
        self.once: deque[Script] = deque()
        """Scripts for the next requests, whatever their role, before the two above."""
        self.health_status = 200
        self.health_gate: asyncio.Event | None = None
        self.tokenize_gate: asyncio.Event | None = None
        self.capabilities: tuple[str, ...] | None = None
        """What it says it can do; None: it does not say who it is."""
        self.identity_fields: Mapping[str, Any] = {}
        """What else it says of who it is."""
        self.epoch = 1
        self.num_blocks = 100
        self.num_free_blocks = 100
        self.num_identity_asks = 0
        self.received: list[Received] = []
        self.ended: list[str] = []
        """Transfer ids that it was told to end."""
        self.takes_signatures = True
        """Whether it obeys who tells it to end a transfer; else as one with another key."""
        self.delete_headers: list[Mapping[str, str]] = []
        self.held: set[str] = set()
        self.registered: set[str] = set()
        """Pushes that a decode leg waits for, or has waited for, here."""
        self.num_left = 0
        """Requests whose sender left before the end."""
        self.num_probes = 0
        self._peers = {} if peers is None else peers
        self._peers[name] = self
        self._changed = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self._site: web.TCPSite | None = None
        self._port = 0
        self._host = "127.0.0.1"

    @property
    def url(self) -> str:
        """Base URL, known once it has started; the same after a restart."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    async def start(self, host: str = "127.0.0.1") -> None:
        """Listen; on the port of before, if it was stopped."""
        self._host = host
        app = web.Application(client_max_size=64 * 1024 * 1024)
        for path in _COMPLETION_PATHS:
            app.router.add_post(path, self._complete)
        app.router.add_get("/health", self._health)
        app.router.add_get("/kvferry/instance", self._identify)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_delete("/kvferry/transfers/{transfer_id}", self._end)
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1
        )
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, host, self._port)
        await self._site.start()
        self._port = self._runner.addresses[0][1]

    async def stop_listening(self) -> None:
        """Refuse connections, and end those on which nothing is asked; the others stay."""
        if self._site is not None and self._runner is not None and self._runner.server is not None:
            await self._site.stop()
            self._runner.server.pre_shutdown()

    async def stop(self) -> None:
        """Stop listening and cut every connection."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def __aenter__(self) -> ScriptedEngine:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` holds; it is looked at whenever something has happened here.

        Raises ``TimeoutError`` after five seconds.
        """
        async with asyncio.timeout(_WAIT_LIMIT_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def roles(self) -> list[str]:
        """The roles of the requests received, in order."""
        return [received.role for received in self.received]

    async def _health(self, request: web.Request) -> web.Response:
        del request
        self.num_probes += 1
        self._changed.set()
        if self.health_gate is not None:
            await self.health_gate.wait()
        return web.Response(status=self.health_status)

    async def _identify(self, request: web.Request) -> web.Response:
        del request
        self.num_identity_asks += 1
        self._changed.set()
        if self.capabilities is None:
            return web.Response(status=404)
        return web.json_response(
            {
                "instance_id": self.name,
                "epoch": self.epoch,
                "control_address": "tcp://127.0.0.1:1",
                "fingerprint": "00",
                "capabilities": self.capabilities,
                "num_blocks": self.num_blocks,
                "num_free_blocks": self.num_free_blocks,
                "num_requests_running": 0,
                **self.identity_fields,
            }
        )

    async def _models(self, request: web.Request) -> web.Response:
        del request
        return web.json_response({"object": "list", "data": [{"id": self.name}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        if self.tokenize_gate is not None:
            await self.tokenize_gate.wait()
        return web.json_response({"tokens": [1, 2, 3], "asked": await request.json()})

    async def _end(self, request: web.Request) -> web.Response:
        transfer_id = request.match_info["transfer_id"]
        if not self.takes_signatures:
            return web.json_response({"error": {"code": "unsigned"}}, status=403)
        self.ended.append(transfer_id)
        self.delete_headers.append(request.headers)
        self.held.discard(transfer_id)
        self._changed.set()
        return web.json_response({"ended": transfer_id})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        received = Received(request.path, request.headers, raw, json.loads(raw))
        self.received.append(received)
        self._changed.set()
        role_script = self.prefill if received.role == "prefill" else self.decode
        script = self.once.popleft() if self.once else role_script
        try:
            return await self._answer(request, received, script)
        except asyncio.CancelledError:
            self._note_left()
            raise
        except ConnectionError:
            self._note_left()
            return web.Response(status=499)

    def _note_left(self) -> None:
        self.num_left += 1
        self._changed.set()

    async def _answer(
        self, request: web.Request, received: Received, script: Script
    ) -> web.StreamResponse:
        if script.before_headers is not None:
            await script.before_headers.wait()
        if script.reset_before_headers:
            return _cut(request)
        if "stream_options" in received.body and not received.body.get("stream"):
            return _refused("stream_options needs stream")
        if script.status != 200:
            body = script.body if script.body is not None else b'{"error": {"message": "no"}}'
            return _whole(body, script)
        if received.role == "prefill":
            if received.body.get("kv_progress") and script.progress:
                return await self._stream(request, script, self._progress(received, script))
            return _whole(self._offer(received, script), script)
        self._read_from_peer(received)
        if received.body.get("stream"):
            return await self._stream(request, script, script.events)
        return _whole(DEFAULT_ANSWER if script.body is None else script.body, script)

    def _progress(self, received: Received, script: Script) -> Iterator[bytes]:
        for num_computed, num_all in script.progress:
            told = {"num_computed_tokens": num_computed, "num_prompt_tokens": num_all}
            yield b"data: " + json.dumps({"kv_progress": told}).encode() + b"\n\n"
        yield b"data: " + self._offer(received, script) + b"\n\n"
        yield b"data: [DONE]\n\n"

    def _offer(self, received: Received, script: Script) -> bytes:
        if script.body is not None:
            return script.body
        answer: dict[str, Any] = {"object": "text_completion", "choices": []}
        if script.offers and received.params is not None:
            transfer_id = received.params["transfer_id"]
            if transfer_id not in self.registered:
                self.held.add(transfer_id)
            answer["kv_transfer_params"] = {
                "transfer_id": transfer_id,
                "role": "decode",
                "mode": received.params["mode"],
                "peer": {
                    "instance_id": self.name, "epoch": 1, "control_address": "tcp://127.0.0.1:1",
                },
                "first_token": {"token_id": 7, "seed": 1},
                "num_prompt_tokens": 3,
                "lease_s": 30.0,
                **script.extra_params,
            }  # fmt: skip
        return json.dumps(answer).encode()

    def _read_from_peer(self, received: Received) -> None:
        if received.params is None:
            return
        peer = self._peers.get(received.params["peer"]["instance_id"])
        if peer is not None:
            if received.params.get("mode") == "push":
                peer.registered.add(received.params["transfer_id"])
            peer.held.discard(received.params["transfer_id"])

    async def _stream(
        self, request: web.Request, script: Script, events: Iterable[bytes]
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", **script.headers}
        )
        await response.prepare(request)
        number = -1
        for number, event in enumerate(events):
            gate = script.before_event.get(number)
            if gate is not None:
                await gate.wait()
            if script.reset_after_events == number:
                return _cut(request, response)
            if script.pause_s and number:
                await asyncio.sleep(script.pause_s)
            await response.write(event)
        if script.reset_after_events == number + 1:
            return _cut(request, response)
        await response.write_eof()
        return response


def _whole(body: bytes, script: Script) -> web.Response:
    headers = {"Content-Type": "application/json", **script.headers}
    return web.Response(status=script.status, body=body, headers=headers)


def _refused(message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=400)


def _cut(request: web.Request, response: web.StreamResponse | None = None) -> web.StreamResponse:
    """End the connection without an answer, or in the middle of one."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response() if response is None else response
