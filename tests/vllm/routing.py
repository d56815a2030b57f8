"""The real router as a process in front of real vLLM servers, and what clients ask it."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec

from kvferry.client.metrics_text import metric_total
from tests.vllm.asking import Question

_START_S = 60.0
_ANSWER_S = 120.0


@dataclass(slots=True)
class RoutedAnswer:
    """What a client got, whole or not."""

    status: int
    content: bytes
    ended_s: float
    tokens: list[int] = field(default_factory=list)
    error_code: str = ""

    def __post_init__(self) -> None:
        """Read the tokens of all choices and the error, from a stream's events or the one body."""
        for event in self.content.split(b"\n\n"):
            data = event.removeprefix(b"data: ").strip()
            if data.startswith(b"{"):
                said = msgspec.json.decode(data)
                self.error_code = self.error_code or str(said.get("error", {}).get("code", ""))
                for choice in said.get("choices", ()):
                    self.tokens += choice.get("token_ids") or []


@dataclass(frozen=True, slots=True)
class RunningRouter:
    """A router that listens at ``url``."""

    url: str
    session: aiohttp.ClientSession

    async def ask(
        self, question: Question, headers: Mapping[str, str] | None = None, **fields: object
    ) -> RoutedAnswer:
        """Return whatever comes, streamed or not."""
        body = question.body(**fields)
        async with (
            asyncio.timeout(_ANSWER_S),
            self.session.post(f"{self.url}/v1/completions", json=body, headers=headers) as response,
        ):
            content = await response.read()
        return RoutedAnswer(response.status, content, time.monotonic())

    async def tokens(
        self, question: Question, headers: Mapping[str, str] | None = None, **fields: object
    ) -> list[int]:
        """Return the tokens of a good answer, streamed or not."""
        answer = await self.ask(question, headers, **fields)
        assert (answer.status, answer.error_code) == (200, ""), answer.content
        assert b"kv_transfer_params" not in answer.content
        return answer.tokens

    async def figure(self, name: str, **labels: str) -> float:
        """Return the sum of one of its metrics over all labels but the given ones."""
        return await self.instance_figure(self.url, name, **labels)

    async def instance_figure(self, url: str, name: str, **labels: str) -> float:
        """Return the sum of a metric at ``url`` over all labels but the given ones."""
        async with self.session.get(f"{url}/metrics") as response:
            return metric_total(await response.text(), name, **labels) or 0.0


@asynccontextmanager
async def routing(folder: Path, *options: str) -> AsyncIterator[RunningRouter]:
    """Start ``kvferry router`` with ``options``; its log is in ``folder``."""
    ready = folder / "router.ready"
    ready.unlink(missing_ok=True)
    log_path = folder / "router.log"
    with log_path.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvferry.cli.main", "router", "--port", "0",
            "--ready-file", str(ready), "--shutdown-timeout-s", "1", *options,
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        async with asyncio.timeout(_START_S):
            while not ready.exists():
                assert process.returncode is None, log_path.read_text()
                await asyncio.sleep(0.05)
        async with aiohttp.ClientSession() as session:
            yield RunningRouter(json.loads(ready.read_text())["url"], session)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
