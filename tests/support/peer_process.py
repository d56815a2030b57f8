"""A second process with a pool, driven over its standard input, for tests of faults.

It ends when its input does, so it never outlives the process that started it. Knows a transport by
its name, and nothing of requests or leases.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from kvferry.clock import SystemClock
from kvferry.errors import FerryError, TransferFailedError
from kvferry.transport.base import (
    Link,
    MemoryRegion,
    Transfer,
    TransferStatus,
    Transport,
    address_of,
)
from kvferry.transport.host import this_process
from kvferry.transport.registry import create_transport

SERVE_INTERVAL_S = 0.0005
REPLY_TIMEOUT_S = 60.0

Action = Literal["connect", "fill", "transfer", "abandon", "serve", "reopen", "disconnect"]


class PeerSetup(msgspec.Struct, frozen=True):
    """What pool and transport the process has."""

    transport: str
    options: dict[str, str | None]
    num_blocks: int
    block_bytes: int
    boot_id: str = ""
    """Say to be on the host of that boot id; else the real one."""


class Command(msgspec.Struct, frozen=True):
    """One line to the process."""

    action: Action
    metadata: bytes = b""
    value: int = 0
    operation: Literal["READ", "WRITE"] = "WRITE"
    local: list[int] = []
    remote: list[int] = []


class Reply(msgspec.Struct, frozen=True):
    """One line from the process."""

    state: str
    metadata: bytes = b""
    error: str = ""


class Pool:
    """A transport with one registered region, for either process."""

    def __init__(self, setup: PeerSetup) -> None:
        self.transport = make_transport(setup)
        self.view = self.transport.allocate(setup.num_blocks * setup.block_bytes)
        region = MemoryRegion(
            address_of(self.view), setup.block_bytes, setup.block_bytes, setup.num_blocks
        )
        self.transport.register([region])


def make_transport(setup: PeerSetup) -> Transport:
    """Return the transport that ``setup`` names."""
    process = this_process()
    if setup.boot_id:
        process = msgspec.structs.replace(process, boot_id=setup.boot_id)
    return create_transport(setup.transport, process=process, **setup.options)


def finish(link: Link, transfer: Transfer, timeout_s: float = REPLY_TIMEOUT_S) -> TransferStatus:
    """Poll without a pause until ``transfer`` is terminal.

    Raises ``TransferFailedError`` if that takes longer than ``timeout_s``.
    """
    clock = SystemClock()
    deadline_s = clock.monotonic_s() + timeout_s
    while clock.monotonic_s() < deadline_s:
        status = link.poll(transfer)
        if status is not TransferStatus.IN_PROGRESS:
            return status
    raise TransferFailedError(f"still in progress after {timeout_s} s")


class PeerProcess:
    """The process, seen from the one that started it."""

    def __init__(self, setup: PeerSetup, launcher: Sequence[str] = ()) -> None:
        """``launcher`` is a command that runs the process as its only child; none: started here."""
        root = Path(__file__).parents[2]
        arguments = [sys.executable, "-m", __name__, msgspec.json.encode(setup).decode()]
        self._process = subprocess.Popen(
            [*launcher, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join((f"{root}/src", str(root)))},
            bufsize=0,
        )
        self.metadata = self.wait_reply().metadata
        self.pid = _only_child(self._process.pid) if launcher else self._process.pid

    def send(self, command: Command) -> None:
        """Send a command, whose reply is to be waited for."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(command) + b"\n")

    def ask(self, command: Command) -> Reply:
        """Send a command and return its reply."""
        self.send(command)
        return self.wait_reply()

    def wait_reply(self, timeout_s: float = REPLY_TIMEOUT_S) -> Reply:
        """Return the next reply. Raises ``TransferFailedError`` if none comes."""
        stdout = self._process.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], timeout_s)[0]:
            raise TransferFailedError(f"the peer process said nothing for {timeout_s} s")
        line = stdout.readline()
        if not line:
            raise TransferFailedError(f"the peer process ended with {self._process.wait()}")
        return msgspec.json.decode(line, type=Reply)

    def send_signal(self, number: int) -> None:
        """Send a signal to the process."""
        os.kill(self.pid, number)

    def wait_end(self, timeout_s: float = REPLY_TIMEOUT_S) -> int:
        """Close its input and return its exit status."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(timeout_s)

    def kill(self) -> None:
        """Kill it and wait until it is gone; safe to repeat."""
        self._process.kill()
        self._process.wait(REPLY_TIMEOUT_S)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


def _only_child(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


class _Server:
    """The process, seen from inside."""

    def __init__(self, setup: PeerSetup) -> None:
        self._setup = setup
        self._pool = Pool(setup)
        self._link = self._pool.transport.open_link("starter")
        self._serves = False

    def run(self) -> None:
        self._say(Reply("ready", self._link.local_metadata))
        while True:
            interval_s = SERVE_INTERVAL_S if self._serves else None
            if select.select([sys.stdin], [], [], interval_s)[0]:
                line = sys.stdin.buffer.readline()
                if not line:
                    break
                self._say(self._answer(msgspec.json.decode(line, type=Command)))
            if self._serves:
                self._link.progress()
        self._pool.transport.close()

    def _answer(self, command: Command) -> Reply:
        try:
            return self._do(command)
        except FerryError as error:
            return Reply("failed", error=type(error).__name__)

    def _do(self, command: Command) -> Reply:
        match command.action:
            case "connect":
                self._link.connect(command.metadata)
            case "fill":
                self._pool.view[:] = bytes([command.value]) * len(self._pool.view)
            case "serve":
                self._serves = bool(command.value)
            case "transfer":
                return self._transfer(command)
            case "abandon":
                return self._abandon(command)
            case "reopen":
                self._link.disconnect()
                self._link = self._pool.transport.open_link("starter")
                return Reply("ready", self._link.local_metadata)
            case "disconnect":
                self._link.disconnect()
        return Reply("ok")

    def _transfer(self, command: Command) -> Reply:
        """Reply twice: before posting and at the end."""
        self._say(Reply("posting"))
        return Reply(finish(self._link, self._post(command)).value)

    def _abandon(self, command: Command) -> Reply:
        """Post, go on for one poll, try to release, and disconnect with it in progress."""
        transfer = self._post(command)
        status = self._link.poll(transfer)
        refusal = ""
        try:
            self._link.release(transfer)
        except FerryError as error:
            refusal = type(error).__name__
        self._link.disconnect()
        return Reply(status.value, error=refusal)

    def _post(self, command: Command) -> Transfer:
        post = self._link.read if command.operation == "READ" else self._link.write
        return post(command.local, command.remote)

    def _say(self, reply: Reply) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
        sys.stdout.buffer.flush()


def main(arguments: list[str]) -> None:
    """Serve one process: the only argument is a ``PeerSetup`` as JSON."""
    _Server(msgspec.json.decode(arguments[0], type=PeerSetup)).run()


if __name__ == "__main__":
    main(sys.argv[1:])
