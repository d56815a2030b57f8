"""Pools with room for one push and a bit, in both directions at once, and idle registrations."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvferry.protocol.codec import decode, encode
from kvferry.protocol.compatibility import KVLayout
from kvferry.protocol.ids import BlockNumber, Epoch, InstanceId, TransferId
from kvferry.protocol.messages import (
    Declined,
    DeclineReason,
    Hello,
    HelloReply,
    Message,
    Register,
    Registered,
)
from kvferry.transport.base import MemoryRegion, address_of
from kvferry.transport.registry import create_transport
from tests.integration.deployment_client import (
    Answer,
    Client,
    Json,
    body_of,
    fresh_prompt,
    new_transfer,
    salted,
)
from tests.integration.deployment_setup import Deployment, Program, open_deployment
from tests.integration.push_legs import Push, peer_of
from tests.own_key import prove_own_key
from tests.support.process_forks import ProcessForks

pytestmark = pytest.mark.slow

NUM_TOKENS = 320
NUM_BLOCKS = 25
"""1.2 times what one request of that prompt and its answer needs."""
NUM_PUSHES = 5
"""In each direction."""
RING_BOUND_S = 30.0
NUM_REGISTRATIONS = 10_000
REGISTRATION_S = 5.0
MAX_EARLY = 1024
MAX_GROWTH_BYTES = 64 * 1024 * 1024


@pytest.fixture(scope="module")
def deployment(
    forks: ProcessForks, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    options = ("--transport", "shm", "--num-blocks", str(NUM_BLOCKS))
    with open_deployment(tmp_path_factory.mktemp("push-capacity"), forks) as deployment:
        for name in ("left", "right"):
            deployment.add_engine(name, tiny_model, *options)
        deployment.wait_ready()
        yield deployment


async def push_all(
    client: Client, sender: Program, receiver: Program, bodies: list[Json], *, reversed_: bool
) -> list[Answer]:
    """All legs at once, the receiver's in the other order where ``reversed_``."""
    peer = await peer_of(client, sender)
    pushes = [Push(client, salted(body), new_transfer(), peer) for body in bodies]
    sending = [push.begin_prefill(sender) for push in pushes]
    order = list(reversed(pushes)) if reversed_ else pushes
    receiving = {push.transfer_id: push.begin_decode(receiver) for push in order}
    answers = [await receiving[push.transfer_id] for push in pushes]
    assert [(await leg).status for leg in sending] == [200] * len(pushes)
    return answers


@pytest.mark.parametrize("reversed_", [False, True])
async def test_small_pools_in_both_roles_at_once_never_wait_in_a_ring(
    client: Client, deployment: Deployment, *, reversed_: bool
) -> None:
    left, right = deployment["left"], deployment["right"]
    bodies = [body_of(fresh_prompt(NUM_TOKENS), 8) for _ in range(2 * NUM_PUSHES)]
    begun_s = time.monotonic()
    tokens = [await client.plain(left, body) for body in bodies]
    alone_s = time.monotonic() - begun_s
    begun_s = time.monotonic()
    there, back = await asyncio.gather(
        push_all(client, left, right, bodies[:NUM_PUSHES], reversed_=reversed_),
        push_all(client, right, left, bodies[NUM_PUSHES:], reversed_=reversed_),
    )
    took_s = time.monotonic() - begun_s
    print(f"{took_s:.1f} s; one instance alone: {alone_s:.1f} s")  # noqa: T201 - for -s
    assert [answer.token_ids for answer in [*there, *back]] == tokens
    assert took_s < RING_BOUND_S


class Stranger:
    """A receiver that registers and whose prefill legs never come; speaks the protocol itself."""

    def __init__(self, shown: Json) -> None:
        self._layout = msgspec.convert(shown["layout"], KVLayout)
        self._epoch = Epoch(shown["epoch"])
        self._transport = create_transport("shm")
        size = self._layout.block_bytes
        view = self._transport.allocate(size)
        self._transport.register([MemoryRegion(address_of(view), size, size, 1)])
        self._link = self._transport.open_link("sender", peer_writes=False)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        prove_own_key(self._socket)
        self._socket.connect(shown["control_address"])
        self._name = InstanceId("stranger")

    async def greet(self) -> None:
        hello = Hello(self._name, Epoch(3), self._layout, "shm", self._link.local_metadata)
        await self._socket.send(encode(1, hello))
        assert isinstance(await self._reply(), HelloReply)

    async def register(self, count: int) -> list[Message]:
        """Register ``count`` transfers, a hundred at a time."""
        replies: list[Message] = []
        for start in range(0, count, 100):
            for number in range(start, start + 100):
                await self._socket.send(encode(number + 2, self._registration(number)))
            replies += [await self._reply() for _ in range(100)]
        return replies

    def _registration(self, number: int) -> Register:
        return Register(
            self._name,
            Epoch(3),
            self._epoch,
            TransferId(f"never-{number}"),
            0,
            16 * 128,
            b"n" * 32,
            0,
            tuple(BlockNumber(block) for block in range(128)),
            REGISTRATION_S,
        )

    async def _reply(self) -> Message:
        async with asyncio.timeout(10):
            return decode(await self._socket.recv()).message

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()
        self._transport.close()


def resident_bytes(program: Program) -> int:
    for line in Path(f"/proc/{program.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


async def test_ten_thousand_registrations_whose_prefill_never_comes(
    client: Client, deployment: Deployment
) -> None:
    left, right = deployment["left"], deployment["right"]
    stranger = Stranger(await client.instance(left))
    try:
        await stranger.greet()
        before = resident_bytes(left)
        begun_s = time.monotonic()
        replies = await stranger.register(NUM_REGISTRATIONS)
        took_s = time.monotonic() - begun_s
        growth = resident_bytes(left) - before
        print(f"{took_s:.1f} s, {growth / 2**20:.1f} MiB more")  # noqa: T201 - for -s
        assert growth < MAX_GROWTH_BYTES
        kept = [reply for reply in replies if isinstance(reply, Registered)]
        declined = [reply for reply in replies if isinstance(reply, Declined)]
        assert len(kept) >= MAX_EARLY
        assert len(kept) + len(declined) == NUM_REGISTRATIONS
        assert {reply.reason for reply in declined} <= {DeclineReason.PRESSURE}
        held = (await client.instance(left))["exchange"]["num_handoffs_held"]
        assert held <= MAX_EARLY
        body = body_of(fresh_prompt(100), 4)
        tokens = await client.plain(right, body)
        (answer,) = await push_all(client, left, right, [body], reversed_=False)
        assert answer.token_ids == tokens
        await client.wait_whole(left, timeout_s=REGISTRATION_S + 2)
    finally:
        stranger.close()
    (answer,) = await push_all(client, left, right, [body], reversed_=False)
    assert (answer.token_ids, answer.outcome) == (tokens, "received")
