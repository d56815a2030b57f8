"""Real instances and a router as processes that a test kills, stops and starts again."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.process_forks import ForkedProcess, ProcessForks

BOUND_S = 15.0
"""Any request ends within it, whatever fails: the timeouts below, and slow cores."""
READY_S = 90.0
RECEIVE_TIMEOUT_S = 3.0
HANDOFF_LEASE_S = 3.0


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
        assert self.process is not None
        assert report["pid"] == self.process.own_pid
        self.url = report["url"]
        self.control_address = report.get("control_address", "")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()

    def pause(self) -> None:
        """Stop it; on return each of its threads stands still, which may take a busy machine."""
        assert self.process is not None
        self.process.send(signal.SIGSTOP)
        self.is_paused = True
        deadline_s = time.monotonic() + BOUND_S
        while self.is_alive and not self._stands_still():
            assert time.monotonic() < deadline_s, f"{self.name} does not stop"
            time.sleep(0.001)

    def _stands_still(self) -> bool:
        states = []
        for stat in Path(f"/proc/{self.pid}/task").glob("*/stat"):
            with contextlib.suppress(OSError):  # A thread that ends just now.
                states.append(stat.read_text().rpartition(")")[2].split()[0])
        return all(state == "T" for state in states)

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
        # What is no HTTP at all, aiohttp itself reports with a traceback.
        log = re.sub(r"Error handling request from \S+\nTraceback", "", self.log())
        assert "Traceback" not in log, log

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
class Deployment:
    """Processes of one module's tests."""

    folder: Path
    forks: ProcessForks
    programs: dict[str, Program] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Program:
        return self.programs[name]

    @property
    def instances(self) -> list[Program]:
        return [p for p in self.programs.values() if not p.name.startswith("router")]

    def add_engine(self, name: str, model: Path, *options: str) -> Program:
        arguments = (
            "engine", "serve", str(model), "--instance-id", name, "--served-model-name", "tiny",
            "--dtype", "float32", "--threads", "1", "--log-level", "debug",
            "--receive-timeout-s", str(RECEIVE_TIMEOUT_S),
            "--handoff-lease-s", str(HANDOFF_LEASE_S), *options,
        )  # fmt: skip
        return self._add(name, arguments)

    def add_router(
        self,
        prefill: Sequence[Program],
        decode: Sequence[Program],
        *options: str,
        name: str = "router",
    ) -> Program:
        """Start a router that pulls, unless ``options`` say otherwise."""
        legs = [("--prefill", program.url) for program in prefill]
        legs += [("--decode", program.url) for program in decode]
        arguments = (
            "router", *itertools.chain(*legs), "--mode", "pull", "--prefill-timeout-s", "8",
            "--health-interval-s", "0.3", "--connect-timeout-s", "2",
            "--log-level", "debug", *options,
        )  # fmt: skip
        router = self._add(name, arguments)
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


@contextlib.contextmanager
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
