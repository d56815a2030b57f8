"""A scripted engine, a byte tokenizer and a served instance made of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import aiohttp

from kvferry.blocks.pool import PoolSnapshot
from kvferry.clock import SystemClock
from kvferry.connector.config import ExchangeConfig
from kvferry.connector.ports import ConnectorSnapshot
from kvferry.engine.config import EngineConfig
from kvferry.engine.request import (
    CacheReset,
    EngineRequest,
    FinishReason,
    OutputCallback,
    TokenOutput,
)
from kvferry.engine.runner import EngineSnapshot
from kvferry.engine.tokenizer import DetokenizerStream
from kvferry.errors import RequestError
from kvferry.observe.metrics import Metrics
from kvferry.protocol.compatibility import KVLayout
from kvferry.protocol.ids import Epoch, InstanceId, RequestId, TransferId
from kvferry.protocol.keys import UserKeyFile
from kvferry.protocol.kv_report import KvReport
from kvferry.protocol.messages import InstanceInfo
from kvferry.protocol.params import FirstToken, KvTransferParams, PeerAddress, Role, TokenLogprob
from kvferry.server.app import HttpServer, build_app
from kvferry.server.config import HttpConfig, InstanceConfig
from kvferry.server.instance import Instance
from kvferry.server.service import InstanceService

EOS = 256
VOCAB_SIZE = 257
WALL_TIME_S = 1_900_000_000.0
PEER = PeerAddress(InstanceId("prefill-0"), Epoch(7), "tcp://127.0.0.1:5555")
IDLE = EngineSnapshot(
    num_running=0,
    num_waiting=0,
    num_receiving=0,
    pool=PoolSnapshot(
        num_blocks=10, num_free=10, num_cached=0, num_retained=0, num_retained_evicted=0
    ),
    num_preemptions=0,
    num_conversations=0,
    retention_ends={},
)


class ByteTokenizer:
    """One token per byte, and an end token."""

    digest = "bytes"
    chat_template_digest = "template"

    def __init__(self) -> None:
        self.encoding_threads: list[str] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.encoding_threads.append(threading.current_thread().name)
        return list(text.encode())

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        if any(message["role"] == "alien" for message in messages):
            raise RequestError("the chat template refuses the messages: alien", param="messages")
        text = "".join(f"[{message['role']}]{message['content']}" for message in messages)
        return text + ("[assistant]" if add_generation_prompt else "")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        parts, run = [], bytearray()
        for token in token_ids:
            if token < EOS:
                run.append(token)
            elif not skip_special_tokens:
                parts.append(run.decode(errors="replace") + "<eos>")
                run.clear()
        return "".join(parts) + run.decode(errors="replace")

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        return [f"<{token}>" for token in token_ids]

    def stream(
        self, *, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = ()
    ) -> DetokenizerStream:
        return DetokenizerStream(
            lambda ids: self.decode(ids, skip_special_tokens=False),
            skipped_ids=frozenset({EOS}) if skip_special_tokens else frozenset(),
            context_token_ids=prompt_token_ids[-5:],
        )


Script = Callable[[EngineRequest], Sequence[TokenOutput]]


def says(text: str | bytes, reason: FinishReason = FinishReason.LENGTH) -> Script:
    """Answer ``text`` a byte at a time; STOP adds the end token."""
    tokens = list(text.encode() if isinstance(text, str) else text)
    if reason is FinishReason.STOP:
        tokens.append(EOS)

    def script(request: EngineRequest) -> list[TokenOutput]:
        return outputs_of(request, tokens, reason)

    return script


def outputs_of(
    request: EngineRequest, tokens: Sequence[int], reason: FinishReason | None
) -> list[TokenOutput]:
    outputs = []
    for position, token in enumerate(tokens):
        is_last = position == len(tokens) - 1 and reason is not None
        stopped = is_last and reason is FinishReason.STOP
        outputs.append(
            TokenOutput(
                request_id=request.request_id,
                token_id=token,
                logprob=_logprob(request, token),
                finish_reason=reason if is_last else None,
                stop_token_id=token if stopped else None,
                report=report_of(request) if is_last else None,
            )
        )
    return outputs


def _logprob(request: EngineRequest, token: int) -> TokenLogprob | None:
    if request.sampling.logprobs is None:
        return None
    top = ((token, -0.5), (ord("z"), -1.5))
    return TokenLogprob(-0.5, top[: request.sampling.logprobs])


def report_of(request: EngineRequest) -> KvReport:
    return KvReport(
        arrived_s=1.0, num_prompt_tokens=len(request.prompt_token_ids), num_cached_tokens=3
    )


@dataclass(frozen=True, slots=True)
class ServedModel:
    max_model_len: int = 100
    vocabulary_size: int = VOCAB_SIZE


@dataclass(slots=True)
class ScriptedEngine:
    """Answers by ``script`` on a thread of its own; without one, when the test says ``emit``."""

    script: Script | None = None
    refusal: RequestError | None = None
    answers_aborts: bool = True
    requests: list[EngineRequest] = field(default_factory=list)
    aborted: list[RequestId] = field(default_factory=list)
    num_cache_resets: int = 0
    state: EngineSnapshot = IDLE
    failure: str | None = None
    model: ServedModel = field(default_factory=ServedModel)
    _callbacks: dict[RequestId, OutputCallback] = field(default_factory=dict)
    _changed: threading.Event = field(default_factory=threading.Event)
    _loop_events: list[asyncio.Event] = field(default_factory=list)

    def submit(self, request: EngineRequest, on_output: OutputCallback) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request)
        self._callbacks[request.request_id] = on_output
        self._notify()
        if self.script is not None:
            outputs = self.script(request)
            threading.Thread(target=self._send, args=(outputs, on_output)).start()

    def abort(self, request_id: RequestId) -> None:
        self.aborted.append(request_id)
        self._notify()
        if self.answers_aborts and request_id in self._callbacks:
            request = next(item for item in self.requests if item.request_id == request_id)
            self._callbacks[request_id](
                TokenOutput(
                    request_id=request_id,
                    finish_reason=FinishReason.ABORT,
                    report=report_of(request),
                )
            )

    def snapshot(self) -> EngineSnapshot:
        return self.state

    def reset_prefix_cache(self) -> CacheReset:
        self.num_cache_resets += 1
        return CacheReset(5, 3, 2, 1)

    def emit(self, request: EngineRequest, text: str) -> None:
        self._send(outputs_of(request, list(text.encode()), None), self.callback(request))

    def finish(self, request: EngineRequest, reason: FinishReason, error: str = "") -> None:
        self.callback(request)(
            TokenOutput(
                request_id=request.request_id,
                finish_reason=reason,
                error=error or None,
                report=report_of(request),
            )
        )

    def callback(self, request: EngineRequest) -> OutputCallback:
        return self._callbacks[request.request_id]

    async def wait_requests(self, count: int = 1) -> EngineRequest:
        await self._wait(lambda: len(self.requests) >= count)
        return self.requests[-1]

    async def wait_aborted(self, count: int = 1) -> None:
        await self._wait(lambda: len(self.aborted) >= count)

    async def _wait(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                event = asyncio.Event()
                self._loop_events.append(event)
                await event.wait()

    def _notify(self) -> None:
        events, self._loop_events = self._loop_events, []
        for event in events:
            event.set()

    @staticmethod
    def _send(outputs: Sequence[TokenOutput], on_output: OutputCallback) -> None:
        for output in outputs:
            on_output(output)


class FakeConnector:
    """Records what the server tells it."""

    def __init__(self) -> None:
        self.withdrawn: list[TransferId] = []
        self.withdrawals = asyncio.Event()

    def withdraw(self, transfer_id: TransferId) -> None:
        self.withdrawn.append(transfer_id)
        self.withdrawals.set()

    def snapshot(self) -> ConnectorSnapshot:
        return ConnectorSnapshot(num_handoffs_held=2)


def hands_over(text: str) -> Script:
    """Prefill's answer: one token and the handoff."""

    def script(request: EngineRequest) -> list[TokenOutput]:
        return [handoff_output(request, text)]

    return script


def handoff_output(request: EngineRequest, text: str) -> TokenOutput:
    assert request.transfer is not None
    token = text.encode()[0]
    return TokenOutput(
        request_id=request.request_id,
        token_id=token,
        finish_reason=FinishReason.LENGTH,
        report=report_of(request),
        handoff=KvTransferParams(
            transfer_id=request.transfer.transfer_id,
            role=Role.DECODE,
            peer=PEER,
            first_token=FirstToken(token, 11),
            num_prompt_tokens=len(request.prompt_token_ids),
            lease_s=30.0,
        ),
    )


LAYOUT = KVLayout(
    model_name="tiny",
    weights_digest="w",
    config_digest="c",
    kv_dtype="float32",
    num_layers=1,
    num_kv_heads=1,
    head_size=2,
    block_size_tokens=16,
    block_bytes=256,
    attention_backend="paged",
    region_strides=(256, 128, 64, 8, 8, 4),
)


class FakeExchange:
    def __init__(self, port: FakeConnector) -> None:
        self.port = port

    def info(self) -> InstanceInfo:
        address, fingerprint = "tcp://127.0.0.1:5556", LAYOUT.fingerprint()
        return InstanceInfo(
            InstanceId("tiny-0"), Epoch(9), address, fingerprint, LAYOUT, "shm", ("pull",), 10, 8
        )


class FakeTransport:
    def __init__(self) -> None:
        self.blind_links = 0

    def num_blind_links(self) -> int:
        return self.blind_links


@dataclass(slots=True)
class Served:
    """A running server and everything behind it."""

    engine: ScriptedEngine
    tokenizer: ByteTokenizer
    connector: FakeConnector
    transport: FakeTransport
    client: aiohttp.ClientSession
    server: HttpServer
    service: InstanceService
    url: str

    async def post(self, path: str, body: object) -> tuple[int, Any]:
        async with self.client.post(path, json=body) as response:
            return response.status, await response.json()

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Return the data of every event; the last must be ``[DONE]`` and is left out."""
        async with self.client.post(path, json=body | {"stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            return parse_events(await response.read())


def parse_events(data: bytes) -> list[Any]:
    *events, done, end = data.decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


@contextlib.asynccontextmanager
async def serve(
    engine: ScriptedEngine,
    *,
    http: HttpConfig | None = None,
    cluster_key: bytes | None = None,
    user_key_file: UserKeyFile | None = None,
) -> AsyncIterator[Served]:
    tokenizer, connector, transport = ByteTokenizer(), FakeConnector(), FakeTransport()
    config = InstanceConfig(
        model="tiny",
        engine=EngineConfig(),
        exchange=ExchangeConfig(
            instance_id=InstanceId("tiny-0"),
            epoch=Epoch(9),
            cluster_key=cluster_key,
            user_key_file=user_key_file,
        ),
        http=http or HttpConfig(shutdown_timeout_s=1.0),
        served_model_names=("tiny", "alias"),
    )
    instance = Instance(
        config=config,
        tokenizer=cast(Any, tokenizer),
        engine=cast(Any, engine),
        exchange=cast(Any, FakeExchange(connector)),
        transport=cast(Any, transport),
        metrics=Metrics(),
        parts=contextlib.ExitStack(),
    )
    service = InstanceService(instance, SystemClock(), wall_time_s=lambda: WALL_TIME_S)
    server = HttpServer(build_app(service), config.http)
    url = await server.start()
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=20)) as client:
        served = Served(engine, tokenizer, connector, transport, client, server, service, url)
        try:
            yield served
        finally:
            await client.close()
            await server.close()
            service.close()
