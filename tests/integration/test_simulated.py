"""``kvferry engine simulate`` as processes behind a real router: answers, times, each dialect."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from kvferry.bench.client import CompletionClient, StreamedAnswer
from kvferry.clock import SystemClock

LIMIT_S = 30.0
PROMPT = list(range(200))


@asynccontextmanager
async def running(folder: Path, name: str, *arguments: str) -> AsyncIterator[str]:
    """Run one ``kvferry`` program until the end; yield its URL."""
    ready = folder / f"{name}.json"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvferry.cli.main", *arguments, "--ready-file", str(ready),
    )  # fmt: skip
    try:
        async with asyncio.timeout(LIMIT_S):
            while not ready.exists():
                assert process.returncode is None
                await asyncio.sleep(0.01)
        yield json.loads(ready.read_text())["url"]
        process.terminate()
        assert await asyncio.wait_for(process.wait(), LIMIT_S) == 0
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def fleet(folder: Path, dialect: str, *times: str) -> AsyncIterator[dict[str, str]]:
    """Run a prefill and a decode instance of one dialect, and a router; yield their URLs."""
    async with AsyncExitStack() as stack:
        urls = {}
        for name in ("prefill", "decode"):
            simulate = ("engine", "simulate", "--dialect", dialect, "--instance-id", name)
            urls[name] = await stack.enter_async_context(running(folder, name, *simulate, *times))
        roles = ("--prefill", urls["prefill"], "--decode", urls["decode"])
        kind = ("--engine", dialect, "--log-level", "error")
        router = running(folder, "router", "router", "--port", "0", *roles, *kind)
        urls["router"] = await stack.enter_async_context(router)
        yield urls


async def ask(url: str, mode: str | None, body: Mapping[str, object]) -> StreamedAnswer:
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        client = CompletionClient(session, SystemClock())
        return await client.stream(f"{url}/v1/completions", body, mode=mode)


async def test_both_modes_hand_over_and_take_the_times_that_are_set(tmp_path: Path) -> None:
    times = ("--prefill-ms", "100", "--prefill-ms-per-token", "0.5", "--decode-ms", "30")
    body = {"prompt": PROMPT, "max_tokens": 4}
    async with fleet(tmp_path, "kvferry", *times, "--transfer-ms-per-token", "0.1") as urls:
        for mode in ("pull", "push"):
            answer = await ask(urls["router"], mode, body)
            report = answer.report
            assert report is not None
            assert (report.mode, report.receive_outcome) == (mode, "received")
            assert report.num_received_tokens == len(PROMPT)
            assert report.prefill is not None
            assert report.prefill.num_computed_tokens == len(PROMPT)
            assert answer.token_ids == (0, 1, 2, 3)
            # No upper bounds: those are the machine's.
            assert answer.ttft_s >= 0.1 + 200 * 0.0005 + 200 * 0.0001
            assert answer.token_times_s[-1] - answer.sent_s >= 0.1 + 0.1 + 0.02 + 3 * 0.03
        plain = await ask(urls["decode"], None, body)
        assert plain.report is not None
        assert plain.report.num_received_tokens == 0
        assert plain.report.prefill_end_s is not None


async def test_one_prompt_is_computed_after_another(tmp_path: Path) -> None:
    simulate = ("engine", "simulate", "--prefill-ms", "100", "--prefill-ms-per-token", "0")
    async with running(tmp_path, "alone", *simulate, "--decode-ms", "0") as url:
        begun_s = time.monotonic()
        body = {"prompt": "a", "max_tokens": 1}
        await asyncio.gather(*(ask(url, None, body) for _ in range(3)))
        assert time.monotonic() - begun_s >= 0.3


@pytest.mark.parametrize("dialect", ["vllm", "vllm-nixl"])
async def test_vllm_s_dialects_hand_over_by_pull(tmp_path: Path, dialect: str) -> None:
    async with fleet(tmp_path, dialect, "--prefill-ms", "1", "--decode-ms", "1") as urls:
        answer = await ask(urls["router"], "pull", {"prompt": PROMPT, "max_tokens": 3})
        assert answer.token_ids == (0, 1, 2)
        assert answer.transfer_params is None
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{urls['decode']}/metrics") as response,
        ):
            assert f"hits_total {len(PROMPT)}\n" in await response.text()


async def test_chats_are_answered_whole_and_wrong_bodies_refused(tmp_path: Path) -> None:
    async with (
        running(tmp_path, "alone", "engine", "simulate", "--prefill-ms", "0") as url,
        aiohttp.ClientSession() as session,
    ):
        chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        async with session.post(f"{url}/v1/chat/completions", json=chat) as response:
            shown = await response.json()
        assert shown["choices"][0]["message"]["content"] == " kv kv"
        assert shown["usage"]["completion_tokens"] == 2
        async with session.post(f"{url}/v1/completions", data=b"[") as response:
            assert response.status == 400
