"""Real instances and a router as processes that a test kills, stops and starts again.

Everything that a failure test looks at is here: answers, pools, metrics, logs, faults.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from kvferry.testing.process_forks import ForkedProcess, ProcessForks

BOUND_S = 15.0
"""Any request ends within it, whatever fails: the timeouts below, and slow cores."""
READY_S = 90.0
SETTLE_S = 15.0
RECEIVE_TIMEOUT_S = 3.0
HANDOFF_LEASE_S = 3.0
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
class Program:
    """One process: an instance or the router. A restart keeps its name, port and options."""

    name: str
    folder: Path
    forks: ProcessForks
    arguments: tuple[str, ...]
    process: ForkedProcess | None = None
    url: str = ""
    control_address: str = ""
    is_paused: bool = False

    @property
    def log_path(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def _ready_path(self) -> Path:
        return self.folder / f"{self.name}.json"

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.is_alive

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def begin(self) -> None:
        self._ready_path.unlink(missing_ok=True)
        port = self.url.rpartition(":")[2] or "0"
        options = ("--port", port, "--ready-file", str(self._ready_path))
        self.process = self.forks.start((*self.arguments, *options), self.log_path)
        self.is_paused = False

    def wait_ready(self) -> None:
        deadline_s = time.monotonic() + READY_S
        while not self._ready_path.exists():
            assert self.is_alive, self.log()
            assert time.monotonic() < deadline_s, self.log()
            time.sleep(0.02)
        report = json.loads(self._ready_path.read_text())
        assert report["pid"] == self.pid
        self.url = report["url"]
        self.control_address = report.get("control_address", "")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()

    def pause(self) -> None:
        assert self.process is not None
        self.process.send(signal.SIGSTOP)
        self.is_paused = True

    def resume(self) -> None:
        assert self.process is not None
        self.process.send(signal.SIGCONT)
        self.is_paused = False

    def restore(self) -> None:
        """Have it run, whatever a test has done to it."""
        if self.is_paused and self.is_alive:
            self.resume()
        if not self.is_alive:
            self.begin()
            self.wait_ready()

    def end(self) -> None:
        """End it as an operator would; it must not take long, and leave no trace of a bug."""
        assert self.process is not None
        self.restore()
        self.process.send(signal.SIGTERM)
        ended = self.process.wait(20)
        self.process.kill()
        assert ended, f"{self.name} did not end on SIGTERM\n{self.log()}"
        assert "Traceback" not in self.log(), self.log()

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def log_size(self) -> int:
        return self.log_path.stat().st_size

    async def wait_log(self, pattern: str, since: int, timeout_s: float = BOUND_S) -> None:
        """Return as soon as a line after byte ``since`` of the log matches."""
        wanted = re.compile(pattern.encode())
        deadline_s = time.monotonic() + timeout_s
        with self.log_path.open("rb") as log:
            log.seek(since)
            seen = b""
            while not wanted.search(seen):
                seen += log.read()
                assert time.monotonic() < deadline_s, f"no {pattern!r} in\n{seen.decode()}"
                await asyncio.sleep(0.0005)


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
        self, program: Program, body: object, *, bound_s: float = BOUND_S, path: str = PATH
    ) -> Answer:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
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
        total = 0.0
        for line in text.splitlines():
            match = re.match(r"(\w+)(\{.*\})? (\S+)$", line)
            if match is None or match[1] != name:
                continue
            if all(f'{key}="{value}"' in (match[2] or "") for key, value in labels.items()):
                total += float(match[3])
        return total

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
        if not event:
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


@dataclass(slots=True)
class Deployment:
    """Processes of one module's tests."""

    folder: Path
    forks: ProcessForks
    programs: dict[str, Program] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Program:
        return self.programs[name]

    @property
    def instances(self) -> list[Program]:
        return [program for program in self.programs.values() if program.name != "router"]

    def add_engine(self, name: str, model: Path, *options: str) -> Program:
        arguments = (
            "engine", "serve", str(model), "--instance-id", name, "--served-model-name", "tiny",
            "--dtype", "float32", "--threads", "1", "--log-level", "debug",
            "--receive-timeout-s", str(RECEIVE_TIMEOUT_S),
            "--handoff-lease-s", str(HANDOFF_LEASE_S), *options,
        )  # fmt: skip
        return self._add(name, arguments)

    def add_router(
        self, prefill: Sequence[Program], decode: Sequence[Program], *options: str
    ) -> Program:
        legs = [("--prefill", program.url) for program in prefill]
        legs += [("--decode", program.url) for program in decode]
        arguments = (
            "router", *itertools.chain(*legs), "--prefill-timeout-s", "8",
            "--health-interval-s", "0.3", "--connect-timeout-s", "2",
            "--log-level", "debug", *options,
        )  # fmt: skip
        router = self._add("router", arguments)
        router.wait_ready()
        return router

    def wait_ready(self) -> None:
        for program in self.programs.values():
            program.wait_ready()

    def restore(self) -> None:
        for program in self.programs.values():
            program.restore()

    def end(self) -> None:
        for program in reversed(self.programs.values()):
            program.end()

    def _add(self, name: str, arguments: tuple[str, ...]) -> Program:
        program = Program(name, self.folder, self.forks, arguments)
        self.programs[name] = program
        program.begin()
        return program


@contextmanager
def open_deployment(folder: Path, forks: ProcessForks) -> Iterator[Deployment]:
    """Processes that are ended the ordinary way; if a test failed, at least they end."""
    deployment = Deployment(folder, forks)
    try:
        yield deployment
        deployment.end()
    finally:
        for program in deployment.programs.values():
            if program.process is not None:
                program.kill()


async def wait_healthy(client: Client, router: Program, count: int) -> None:
    """Return once the router finds ``count`` instances healthy."""
    async with asyncio.timeout(BOUND_S):
        while await client.metric(router, "kvferry_router_instance_healthy") != count:
            await asyncio.sleep(0.02)
