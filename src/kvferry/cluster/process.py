"""One supervised process: start it, wait until it is ready, end it in time; and following its log.

Knows a command, a log file and a ready file; knows nothing of roles.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from kvferry.clock import Clock
from kvferry.cluster.child import command_line
from kvferry.errors import ClusterError

_READY_POLL_S = 0.05
_LOG_POLL_S = 0.2
_TAIL_LINES = 15


class ReadyReport(msgspec.Struct, frozen=True):
    """What a process writes to its ready file once it serves."""

    url: str
    pid: int = 0
    control_address: str = ""
    instance_id: str = ""


class ManagedProcess:
    """A child process that does not outlive this one. All methods are called on one event loop."""

    def __init__(self, name: str, run_folder: Path, clock: Clock) -> None:
        self.name = name
        self.log_path = run_folder / f"{name}.log"
        self.ready_path = run_folder / f"{name}.ready.json"
        self._clock = clock
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Process id. Raises ``ClusterError`` before ``start``."""
        return self._started().pid

    @property
    def has_started(self) -> bool:
        """Whether ``start`` has got as far as a process."""
        return self._process is not None

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended, as far as the event loop has heard."""
        return self._process is not None and self._process.returncode is not None

    async def start(
        self,
        command: Sequence[str],
        cores: tuple[int, ...] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start ``command`` pinned to ``cores`` (none: not pinned), with its output in the log.

        It gets a session of its own, so that a terminal's Ctrl-C reaches it only through here.
        ``environment`` is this process's own if None.
        """
        with self.log_path.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command_line(os.getpid(), cores, command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                env=None if environment is None else dict(environment),
            )

    async def wait_ready(self, deadline_s: float) -> ReadyReport:
        """Return the process's ready report.

        Raises ``ClusterError`` with the end of its log if it dies, or is not ready ``deadline_s``
        seconds from now.
        """
        end_s = self._clock.monotonic_s() + deadline_s
        while not self.ready_path.exists():
            if await self._ended_within(_READY_POLL_S):
                raise self.death()
            if self._clock.monotonic_s() >= end_s:
                raise ClusterError(
                    f"{self.name} was not ready within {deadline_s:.0f} s\n{self.log_tail()}"
                )
        try:
            return msgspec.json.decode(self.ready_path.read_bytes(), type=ReadyReport)
        except msgspec.MsgspecError as error:
            raise ClusterError(f"{self.name} wrote a malformed ready file: {error}") from error

    async def wait_ended(self) -> None:
        """Return when the process has ended."""
        await self._started().wait()

    async def stop(self, grace_s: float) -> None:
        """End the process: SIGTERM, after ``grace_s`` SIGKILL to its session. Safe to repeat."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
            # A stopped process sees no SIGTERM until it continues.
            process.send_signal(signal.SIGCONT)
        if not await self._ended_within(grace_s):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    def death(self) -> ClusterError:
        """Return the error that says how the process ended, with the end of its log."""
        code = self._started().returncode
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with code {code}"
        return ClusterError(f"{self.name} {how}\n{self.log_tail()}")

    def log_tail(self) -> str:
        """Return the last lines of the log, each prefixed with the process's name."""
        try:
            with self.log_path.open(encoding="utf-8", errors="replace") as log:
                lines = deque(log, maxlen=_TAIL_LINES)
        except OSError as error:
            return f"  (no log: {error})"
        return "\n".join(f"  {self.name} | {line.rstrip()}" for line in lines) or "  (empty log)"

    async def _ended_within(self, timeout_s: float) -> bool:
        try:
            await asyncio.wait_for(self._started().wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def _started(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise ClusterError(f"{self.name} has not been started")
        return self._process


class LogFollower:
    """Passes on lines that are appended to log files, prefixed with the file's stem."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._offsets: dict[Path, int] = {}

    async def follow(self, paths: Callable[[], Iterable[Path]]) -> None:
        """Pass on new lines of ``paths()`` (asked again and again) until cancelled."""
        try:
            while True:
                self.drain(paths())
                await asyncio.sleep(_LOG_POLL_S)
        finally:
            self.drain(paths())

    def drain(self, paths: Iterable[Path]) -> None:
        """Pass on all complete lines that are there now."""
        for path in paths:
            offset = self._offsets.get(path, 0)
            try:
                with path.open("rb") as log:
                    log.seek(offset)
                    appended = log.read()
            except FileNotFoundError:
                continue
            complete = appended[: appended.rfind(b"\n") + 1]
            self._offsets[path] = offset + len(complete)
            for line in complete.decode("utf-8", "replace").splitlines():
                self._emit(f"{path.stem} | {line}")
