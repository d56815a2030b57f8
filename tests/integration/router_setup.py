"""A router over scripted engines, all in this process, on real sockets."""

from __future__ import annotations

import io
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from kvferry.client.metrics_text import metric_by_label, metric_total
from kvferry.clock import Clock, SystemClock
from kvferry.router.config import RouterConfig
from kvferry.router.engines import EngineConfig
from kvferry.router.service import Router
from tests.integration.fake_control_port import FakeControlPort, fake_control_port
from tests.support.scripted_engine import ScriptedEngine

PATH = "/v1/completions"


@dataclass(slots=True)
class Deployment:
    router: Router
    prefill: list[ScriptedEngine]
    decode: list[ScriptedEngine]
    client: aiohttp.ClientSession

    @property
    def p(self) -> ScriptedEngine:
        return self.prefill[0]

    @property
    def d(self) -> ScriptedEngine:
        return self.decode[0]

    def post(
        self, body: object, path: str = PATH, headers: Mapping[str, str] | None = None
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        # A stream, as bytes of more than a megabyte are a warning.
        data = raw if len(raw) < 500_000 else io.BytesIO(raw)
        return self.client.post(self.router.url + path, data=data, headers=headers)

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of all samples of ``name`` that carry ``labels``."""
        async with self.client.get(self.router.url + "/metrics") as response:
            text = await response.text()
        return metric_total(text, name, **labels) or 0.0

    async def outcomes(self) -> dict[str, int]:
        async with self.client.get(self.router.url + "/metrics") as response:
            text = await response.text()
        found = metric_by_label(text, "kvferry_router_requests_total", "outcome")
        return {outcome: int(count) for outcome, count in found.items() if count}

    async def wait_settled(self) -> None:
        """Wait until no request runs and everything that was to be ended has been."""
        await self.router.wait_idle()

    def assert_nothing_held(self) -> None:
        assert [engine.held for engine in self.prefill] == [set() for _ in self.prefill]


@asynccontextmanager
async def deployment(
    num_prefill: int = 1,
    num_decode: int = 1,
    *,
    host: str = "127.0.0.1",
    capabilities: tuple[str, ...] | None = None,
    clock: Clock | None = None,
    engines_at: Callable[[Sequence[str]], EngineConfig] | None = None,
    **options: Any,  # noqa: ANN401 - those of RouterConfig
) -> AsyncIterator[Deployment]:
    peers: dict[str, ScriptedEngine] = {}
    prefill = [ScriptedEngine(f"prefill-{number}", peers) for number in range(num_prefill)]
    decode = [ScriptedEngine(f"decode-{number}", peers) for number in range(num_decode)]
    async with AsyncExitStack() as stack:
        for engine in (*prefill, *decode):
            engine.capabilities = capabilities
            await engine.start(host)
            stack.push_async_callback(engine.stop)
        if engines_at is not None:
            options["engines"] = engines_at([engine.url for engine in (*prefill, *decode)])
        options = {"shutdown_timeout_s": 0.0, "health_interval_s": 60.0, **options}
        config = RouterConfig(
            prefill_urls=tuple(engine.url for engine in prefill),
            decode_urls=tuple(engine.url for engine in decode),
            host=host,
            port=0,
            **options,
        )
        router = Router(config, clock=clock or SystemClock())
        await router.start()
        stack.push_async_callback(router.stop)
        client = await stack.enter_async_context(aiohttp.ClientSession())
        yield Deployment(router, prefill, decode, client)


@asynccontextmanager
async def vllm_deployment(
    num_prefill: int = 1,
    num_decode: int = 1,
    *,
    engines: EngineConfig | None = None,
    **options: Any,  # noqa: ANN401 - those of RouterConfig
) -> AsyncIterator[tuple[Deployment, list[FakeControlPort]]]:
    """As ``deployment``, with engines that say at their control ports alone who they are.

    ``engines`` are told to the router instead of those ports.
    """
    names = [f"prefill-{n}" for n in range(num_prefill)] + [
        f"decode-{n}" for n in range(num_decode)
    ]
    with ExitStack() as stack:
        ports = [stack.enter_context(fake_control_port(name)) for name in names]

        def told(urls: Sequence[str]) -> EngineConfig:
            addresses = {url: port.address for url, port in zip(urls, ports, strict=True)}
            return engines or EngineConfig(control_addresses=addresses)

        async with deployment(num_prefill, num_decode, engines_at=told, **options) as world:
            yield world, ports


def events_of(body: bytes) -> list[Any]:
    """The JSON of all events of a stream, without the end mark."""
    found = [
        line.removeprefix("data:").strip()
        for event in re.split(r"\n\n+", body.decode())
        for line in event.splitlines()
        if line.startswith("data:")
    ]
    return [json.loads(data) for data in found if data != "[DONE]"]
