"""Decisions of the engine's and the mover's threads at once, between two exchanges."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import zmq

from kvferry.connector.effects import PostWrite
from kvferry.connector.mover import Mover
from kvferry.connector.peers.inbound import reader_name
from kvferry.connector.peers.outbound import OutboundPeers
from kvferry.connector.peers.posted import Writes
from kvferry.connector.ports import ReceiveOutcome
from kvferry.protocol.codec import encode
from kvferry.protocol.ids import Epoch, InstanceId, TransferId
from kvferry.protocol.messages import Hello, Message, Reply
from kvferry.protocol.params import PeerAddress
from kvferry.transport.base import Link
from tests.integration.exchange_pair import PROMPT, WAIT_S, Side, pair, wait_whole
from tests.integration.test_exchange_push import (
    NUM_BLOCKS,
    TRANSFER,
    Prefill,
    assert_received,
    begin_receive,
    num_registered,
    wait_result,
    wait_until,
)


def test_a_push_that_is_not_needed_just_as_it_ends_leaves_no_link_to_serve() -> None:
    """The engine decides while the mover has the sender's last words in hand already."""
    with pair() as (prefill, decode):
        for number in range(10):
            leave_as_it_ends(decode, Prefill(prefill, TransferId(f"xfer-{number}")), number)
            wait_whole(prefill, decode)


def leave_as_it_ends(decode: Side, source: Prefill, number: int) -> None:
    prefill, transfer_id = source.side, source.transfer_id
    source.begin()
    blocks = begin_receive(decode, prefill, transfer_id)
    wait_until(lambda: num_registered(prefill) == number + 1)
    with mover_stands_still(decode, prefill) as then:
        source.compute_all()
        wait_until(lambda: prefill.port.snapshot().num_handoffs_held == 0)
        then.append(lambda: decode.port.end_receive(transfer_id, needed=False))
    wait_until(lambda: not then)
    decode.pool.drop(blocks)
    decode.port.take_first_tokens()


@contextmanager
def mover_stands_still(decode: Side, prefill: Side) -> Iterator[list[Callable[[], None]]]:
    """Meanwhile decode's mover hears nothing; what is put in the list is called at its next call
    of the engine."""
    stands, may_go = threading.Event(), threading.Event()
    then: list[Callable[[], None]] = []

    def stand() -> None:
        stands.set()
        assert may_go.wait(WAIT_S)
        decode.on_results = lambda: then.pop()() if then else None

    decode.on_results = stand
    unknown = TransferId("unknown")
    decode.port.begin_receive(unknown, prefill.exchange.address, PROMPT)
    decode.port.receive(unknown, blocks := decode.pool.allocate(NUM_BLOCKS), 0)
    assert stands.wait(WAIT_S)
    decode.port.take_results()
    decode.pool.drop(blocks)
    yield then
    may_go.set()


def test_nothing_decided_for_an_old_link_is_written_on_a_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine goes on while the receiver connects anew, and the old blocks may be reused."""
    old_links: list[Link | None] = []
    posted_on: list[Link | None] = []
    answer, post = Mover._answer, Writes.post

    def advance_first(mover: Mover, identity: bytes, message: Message) -> Reply:
        if isinstance(message, Hello) and posted_on == []:
            old_links.append(mover._inbound.link(reader_name(message)))
            if old_links[-1] is not None:
                source.compute(4)
        return answer(mover, identity, message)

    def note(writes: Writes, effect: PostWrite, link: Link | None) -> None:
        posted_on.append(link)
        post(writes, effect, link)

    monkeypatch.setattr(Mover, "_answer", advance_first)
    monkeypatch.setattr(Writes, "post", note)
    with pair() as (prefill, decode):
        source = Prefill(prefill)
        source.begin()
        blocks = begin_receive(decode, prefill)
        wait_until(lambda: num_registered(prefill) == 1)
        greet_anew(decode, prefill)
        wait_until(lambda: posted_on != [])
        assert posted_on[0] is old_links[-1]
        prefill.port.withdraw(TRANSFER)
        prefill.pool.drop(source.blocks)
        wait_result(decode)
        decode.pool.drop(blocks)


def test_what_comes_on_an_earlier_connection_is_declined() -> None:
    """A peer that stood still may hear it only after the handshake on a later one: its blocks are
    others' by then."""
    with pair() as (prefill, decode):
        source = Prefill(prefill)
        source.begin()
        source.compute_all()
        assert_received(decode, begin_receive(decode, prefill), source)
        greet_anew(decode, prefill)
        late = TransferId("late")
        blocks = begin_receive(decode, prefill, late)
        result = wait_result(decode)
        assert (result.transfer_id, result.outcome) == (late, ReceiveOutcome.DECLINED)
        assert "has not said hello on this connection" in result.detail
        decode.pool.drop(blocks)
        wait_whole(prefill, decode)


def greet_anew(decode: Side, prefill: Side) -> None:
    """Say hello as decode does that has lost its connection."""
    info = decode.exchange.info()
    link = decode.transport.open_link("prefill", peer_writes=False)
    hello = Hello(info.instance_id, info.epoch, info.layout, info.transport, link.local_metadata)
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.connect(prefill.exchange.address.control_address)
        asking.send(encode(1, hello))
        assert asking.poll(int(1e3 * WAIT_S))
        asking.close(0)


def test_what_is_decided_as_it_closes_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that could not be stopped in time may still decide."""
    close = OutboundPeers.close

    def decide_first(holders: OutboundPeers) -> None:
        stranger = PeerAddress(InstanceId("other"), Epoch(7), "tcp://127.0.0.1:9")
        decode.port.contact(stranger)
        close(holders)

    with pair() as (prefill, decode):
        source = Prefill(prefill)
        source.begin()
        source.compute_all()
        assert_received(decode, begin_receive(decode, prefill), source)
        monkeypatch.setattr(OutboundPeers, "close", decide_first)
        decode.exchange.close()
        monkeypatch.undo()
        port = int(decode.exchange.address.control_address.rpartition(":")[2])
        with socket.socket() as again:
            again.bind(("127.0.0.1", port))
