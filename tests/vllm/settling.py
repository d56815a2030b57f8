"""Waits for what servers do by themselves, with a deadline."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable

from tests.vllm.asking import Client, Question, random_tokens
from tests.vllm.serving import VllmServer

BOUND_S = 30.0
"""Any request here ends within it, on slow cores."""
_USAGE = "vllm:kv_cache_usage_perc"


async def wait_for(is_there: Callable[[], bool], *, bound_s: float = BOUND_S) -> None:
    """Ask again and again until it is so."""
    deadline_s = time.monotonic() + bound_s
    while not await asyncio.to_thread(is_there):
        assert time.monotonic() < deadline_s, "it has not come to that"
        await asyncio.sleep(0.05)


async def have_all_run(*servers: VllmServer) -> None:
    """Have those go on that were stopped, and start those again that were killed."""
    for server in servers:
        server.send(signal.SIGCONT)
        if not server.process.is_alive:
            server.begin()
    for server in servers:
        await asyncio.to_thread(server.wait_ready)


async def wait_whole(client: Client, *servers: VllmServer) -> None:
    """Wait until no block is in use. A request makes a step, in which references are given back."""
    for server in servers:
        deadline_s = time.monotonic() + BOUND_S
        while True:
            await client.tokens(server.url, Question(random_tokens(3, 1), max_tokens=2))
            usage = server.metric(_USAGE)
            if usage == 0:
                break
            assert time.monotonic() < deadline_s, f"{server.name}: {usage:.3f} still in use"
            await asyncio.sleep(0.2)
