"""Today's code and a made-up next version exchange blocks; each side takes the other for the newer.

Over real control ports and transports, with fields that nobody knows at every level.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from kvferry.connector.ports import HistoryRequest, PromptIdentity, ReceiveOutcome
from kvferry.protocol.hashing import block_hashes, chain_root
from kvferry.protocol.ids import PROTOCOL_VERSION, TransferId
from kvferry.protocol.messages import InstanceInfo
from kvferry.protocol.params import Mode
from tests.integration.exchange_pair import LAYOUT, NUM_BLOCKS, PROMPT, Side, pair, wait_whole
from tests.integration.next_version import NextVersion, next_version, with_unknown_memory
from tests.integration.test_exchange_push import (
    Prefill,
    assert_received,
    num_registered,
    wait_result,
    wait_until,
)
from tests.unit.protocol.recorded_version_3 import RECORDED

TRANSFER = TransferId("xfer-1")
TRANSPORTS = ["shm", "nixl"]
World = tuple[Side, Side, NextVersion]


@pytest.fixture(params=TRANSPORTS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Prefill, decode, and the way from decode to prefill."""
    with pair(request.param) as (prefill, decode), next_version(prefill) as way:
        yield prefill, decode, way
        wait_whole(prefill, decode)
        for side in (prefill, decode):
            for reason in ("malformed", "version"):
                assert side.counter("kvferry_control_malformed_total", reason=reason) == 0


def test_a_pull(world: World) -> None:
    prefill, decode, way = world
    _, sent = prefill.offer(TRANSFER)
    decode.port.begin_receive(TRANSFER, way.address, PROMPT)
    blocks = decode.pool.allocate(8)
    decode.port.receive(TRANSFER, blocks, 0)
    result = decode.wait_result()
    assert result.outcome is ReceiveOutcome.RECEIVED, result.detail
    assert decode.memory[blocks].tobytes() == sent
    decode.pool.drop(blocks)


def test_a_push(world: World) -> None:
    prefill, decode, way = world
    source = Prefill(prefill)
    source.begin()
    source.compute()
    decode.port.begin_receive(TRANSFER, way.address, PROMPT, mode=Mode.PUSH)
    blocks = decode.pool.allocate(8)
    decode.port.receive(TRANSFER, blocks, 0)
    wait_until(lambda: num_registered(prefill) == 1)
    source.compute_all()
    assert_received(decode, blocks, source)


def test_a_read_back(world: World) -> None:
    holder, reader, way = world
    tokens = list(range(64))
    hashes = block_hashes(chain_root(LAYOUT.fingerprint()), tokens, 16)
    held = holder.pool.allocate(4)
    for number, (block, block_hash) in enumerate(zip(held, hashes, strict=True)):
        holder.memory[block] = 10 + number
        holder.pool.publish(block, block_hash)
    holder.pool.drop(held)
    blocks = reader.pool.allocate(4)
    reader.port.read_history(
        way.address, HistoryRequest(tuple(hashes), tuple(blocks), tuple(tokens), 16, 1)
    )
    result = reader.wait_result()
    assert (result.outcome, result.num_blocks) == (ReceiveOutcome.RECEIVED, 4), result.detail
    assert [int(reader.memory[block][0]) for block in blocks] == [10, 11, 12, 13]
    reader.pool.drop(blocks)


def set_reason(message: dict[str, Any]) -> None:
    message["reason"] = "a_mood_of_the_next_version"


def test_a_refusal_for_an_unknown_reason_is_one(world: World) -> None:
    prefill, decode, way = world
    way.changes["declined"] = set_reason
    prefill.offer(TRANSFER)
    other = PromptIdentity(PROMPT.num_tokens, b"q" * 32)
    decode.port.begin_receive(TRANSFER, way.address, other)
    blocks = decode.pool.allocate(8)
    decode.port.receive(TRANSFER, blocks, 0)
    result = decode.wait_result()
    assert result.outcome is ReceiveOutcome.DECLINED
    assert "differ" in result.detail, "the peer's own words"
    decode.pool.drop(blocks)
    prefill.port.withdraw(TRANSFER)


def test_a_push_that_fails_for_an_unknown_reason_has_failed(world: World) -> None:
    prefill, decode, way = world
    way.changes["failed"] = set_reason
    source = Prefill(prefill)
    source.begin()
    decode.port.begin_receive(TRANSFER, way.address, PROMPT, mode=Mode.PUSH)
    blocks = decode.pool.allocate(8)
    decode.port.receive(TRANSFER, blocks, 0)
    wait_until(lambda: num_registered(prefill) == 1)
    prefill.port.withdraw(TRANSFER)
    prefill.pool.drop(source.blocks)
    assert wait_result(decode).outcome is ReceiveOutcome.FAILED
    decode.pool.drop(blocks)


def test_a_newer_layout_is_judged_by_the_newer_side(world: World) -> None:
    """It knows the field and what its absence means; today's side takes its refusal by name."""
    prefill, decode, way = world

    def refuse(message: dict[str, Any]) -> None:
        message.clear()
        detail = "twist differs: ours is 3, the peer's is 0"
        message.update(type="declined", reason="incompatible", field="twist", detail=detail)

    way.changes["hello_reply"] = refuse
    prefill.offer(TRANSFER)
    decode.port.begin_receive(TRANSFER, way.address, PROMPT)
    blocks = decode.pool.allocate(8)
    decode.port.receive(TRANSFER, blocks, 0)
    result = decode.wait_result()
    assert result.outcome is ReceiveOutcome.INCOMPATIBLE
    assert "twist" in result.detail
    decode.pool.drop(blocks)
    prefill.port.withdraw(TRANSFER)


def test_memory_of_an_unknown_kind_is_incompatible(world: World) -> None:
    prefill, decode, way = world
    way.changes["hello_reply"] = with_unknown_memory
    prefill.offer(TRANSFER)
    decode.port.begin_receive(TRANSFER, way.address, PROMPT)
    blocks = decode.pool.allocate(8)
    decode.port.receive(TRANSFER, blocks, 0)
    result = decode.wait_result()
    assert result.outcome is ReceiveOutcome.INCOMPATIBLE, result
    assert "MOON" in result.detail
    decode.pool.drop(blocks)
    prefill.port.withdraw(TRANSFER)


QUESTIONS = {
    "acquire": "declined",
    "acquire_history": "declined",
    "register": "declined",
    "renew": "declined",
    "release": "released",
    "instance": "instance_info",
    "hello": "declined",
}
"""Recorded requests of the release before, and what they are answered; none is of this process."""


def test_the_release_before_is_answered() -> None:
    with pair() as (prefill, _), zmq.Context() as context:
        socket = context.socket(zmq.DEALER)
        socket.connect(prefill.exchange.address.control_address)
        for name, expected in QUESTIONS.items():
            fields = msgspec.msgpack.decode(RECORDED[name])
            fields["version"] = PROTOCOL_VERSION - 1
            socket.send(msgspec.msgpack.encode(fields))
            assert socket.poll(5000), name
            answer = msgspec.msgpack.decode(socket.recv())
            assert answer["message"]["type"] == expected, name
            if name == "instance":
                info = msgspec.convert(answer["message"], InstanceInfo)
                assert info.layout == LAYOUT
                assert info.num_blocks == NUM_BLOCKS
        socket.close(0)
