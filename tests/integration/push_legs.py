"""A test as the router of a push: it sends each leg itself, when and to whom it likes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp

from tests.integration.deployment_client import Answer, Client, Json
from tests.integration.deployment_setup import BOUND_S, Program

REGISTERED = {"type": "register", "result": "registered"}
WIDE_OPTIONS = ("--num-blocks", "64", "--max-held-share", "1")
SHORT_LEASE = ("--handoff-lease-s", "1.5")
"""For tests that leave many a prefill without a reader."""
CHUNK_OPTIONS = ("--max-num-batched-tokens", "32")
"""Two blocks a step, so that a prefill takes a while."""


async def peer_of(client: Client, prefill: Program) -> Json:
    """What a decode leg needs to know of the prefill instance."""
    shown = await client.instance(prefill)
    return {key: shown[key] for key in ("instance_id", "epoch", "control_address")}


@dataclass(slots=True)
class Push:
    """One request's two legs."""

    client: Client
    body: Json
    transfer_id: str
    peer: Json
    bound_s: float = 3 * BOUND_S

    def begin_prefill(self, prefill: Program) -> asyncio.Task[Answer]:
        params = {"transfer_id": self.transfer_id, "role": "prefill", "mode": "push"}
        return self._begin(prefill, params)

    def begin_decode(self, decode: Program, **fields: object) -> asyncio.Task[Answer]:
        params = {
            "transfer_id": self.transfer_id,
            "role": "decode",
            "mode": "push",
            "peer": self.peer,
            **fields,
        }
        return self._begin(decode, params)

    def _begin(self, program: Program, params: Json) -> asyncio.Task[Answer]:
        body = self.body | {"kv_transfer_params": params}
        return asyncio.create_task(self.client.post(program, body, bound_s=self.bound_s))

    async def wait_writing(self, prefill: Program, since: int) -> None:
        """Return as soon as prefill has posted a WRITE after byte ``since`` of its log."""
        await prefill.wait_log(f"writing .* of {self.transfer_id}", since)


async def num_registered(client: Client, prefill: Program) -> float:
    return await client.metric(prefill, "kvferry_control_requests_total", **REGISTERED)


async def wait_registered(client: Client, prefill: Program, count: float) -> None:
    """Return once ``prefill`` has accepted ``count`` registrations since its start."""
    async with asyncio.timeout(BOUND_S):
        while await num_registered(client, prefill) < count:
            await asyncio.sleep(0.005)


async def wait_metric(client: Client, program: Program, name: str, count: float) -> None:
    """Return once a metric is at least ``count``."""
    metric, _, outcome = name.partition(" ")
    async with asyncio.timeout(BOUND_S):
        while await client.metric(program, metric, outcome=outcome) < count:
            await asyncio.sleep(0.005)


async def leave(leg: asyncio.Task[Answer]) -> None:
    """Close a leg's connection, as a client or router that is gone does."""
    assert not leg.done()
    leg.cancel()
    with contextlib.suppress(asyncio.CancelledError, aiohttp.ClientError):
        await leg


@dataclass(slots=True)
class ControlProxy:
    """Between a receiver and a sender's control port: keeps back what the sender says last.

    From the first bytes that contain ``hold_from`` on, nothing of the sender reaches the receiver.
    """

    target: str
    hold_from: bytes
    address: str = ""
    held: asyncio.Event = field(default_factory=asyncio.Event)
    _pumps: set[asyncio.Task[None]] = field(default_factory=set)

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self.target.removeprefix("tcp://").rpartition(":")
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.close()
            return
        for pump in (self._pump(reader, far_writer), self._pump_held(far_reader, writer)):
            task = asyncio.create_task(pump)
            self._pumps.add(task)
            task.add_done_callback(self._pumps.discard)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError), contextlib.closing(writer):
            while data := await reader.read(65536):
                writer.write(data)

    async def _pump_held(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError), contextlib.closing(writer):
            while data := await reader.read(65536):
                if self.hold_from in data:
                    self.held.set()
                if not self.held.is_set():
                    writer.write(data)

    async def close(self) -> None:
        for pump in list(self._pumps):
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)


@asynccontextmanager
async def control_proxy(target: str, hold_from: bytes) -> AsyncIterator[ControlProxy]:
    proxy = ControlProxy(target, hold_from)
    server = await asyncio.start_server(proxy.accept, "127.0.0.1", 0)
    proxy.address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
