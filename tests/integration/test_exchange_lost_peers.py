"""Peers that are lost for a moment, or of which somebody believes what is not so."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
import zmq

from kvferry.connector.peers.outbound import OutboundPeers
from kvferry.connector.ports import HistoryRequest, ReceiveOutcome
from kvferry.protocol.codec import encode
from kvferry.protocol.ids import BlockHash, Epoch, InstanceId, TransferId
from kvferry.protocol.messages import InstanceQuery
from kvferry.protocol.params import Mode, PeerAddress
from tests.integration.exchange_pair import (
    PROMPT,
    Side,
    pair,
    wait_whole,
)
from tests.integration.test_exchange_push import (
    NUM_BLOCKS,
    TRANSFER,
    TRANSPORTS,
    Prefill,
    assert_received,
    begin_receive,
    num_answered,
    num_registered,
    wait_result,
    wait_until,
)


@contextmanager
def silence(side: Side) -> Iterator[None]:
    """Keep the thread that answers for ``side`` from doing anything."""
    with side.pool.lock, zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.LINGER, 0)
        client.connect(side.exchange.address.control_address)
        client.send(encode(1, InstanceQuery()))  # whose answer counts the pool's free blocks
        yield


@pytest.mark.parametrize("transport_name", TRANSPORTS)
@pytest.mark.parametrize("num_written", [0, 4, 8])
def test_a_sender_that_was_silent_for_a_while_costs_no_block_for_ever(
    transport_name: str, num_written: int
) -> None:
    """It lives, has nothing posted any more and need not do anything: it has to be asked."""
    times = {"control_timeout_s": 0.5, "push_heartbeat_s": 0.1, "quarantine_grace_s": 0.4}
    with pair(transport_name, **times) as (prefill, decode):
        source = Prefill(prefill)
        source.begin()
        blocks = begin_receive(decode, prefill)
        wait_until(lambda: num_registered(prefill) == 1)
        if 0 < num_written < NUM_BLOCKS:
            source.compute(num_written)
            last = blocks[num_written - 1]
            wait_until(lambda: bool((decode.memory[last] == source.expected(3)).all()))
        with silence(prefill):
            assert wait_result(decode).outcome is ReceiveOutcome.UNREACHABLE
        decode.pool.drop(blocks)
        wait_until(lambda: decode.port.snapshot().num_blocks_quarantined == 0)
        if num_written == NUM_BLOCKS:
            source.compute_all()
        else:
            prefill.port.withdraw(TRANSFER)
            prefill.pool.drop(source.blocks)
        wait_whole(prefill, decode)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("is_greeted", [False, True], ids=["", "greeted"])
def test_a_sender_that_was_silent_for_a_while_holds_nothing_for_longer(
    monkeypatch: pytest.MonkeyPatch, mode: Mode, is_greeted: bool
) -> None:
    """It was told in vain that it need not: by the lease alone it would hold on for a minute.

    It is told again, even where something else is the first to greet it anew.
    """
    times = {"control_timeout_s": 0.5, "push_heartbeat_s": 0.1, "renew_interval_s": 0.1}
    with pair("shm", handoff_lease_s=60.0, **times) as (prefill, decode):
        if mode is Mode.PUSH:
            source = Prefill(prefill)
            source.begin()
            source.compute_all()
        else:
            prefill.offer(TRANSFER)
        decode.port.begin_receive(TRANSFER, prefill.exchange.address, PROMPT, mode=mode)
        wait_until(lambda: num_answered(prefill, "hello", "helloreply") == 1)
        with silence(prefill):
            wait_until(lambda: decode.port.snapshot().num_peers_resting == 1)
            if is_greeted:
                monkeypatch.setattr(OutboundPeers, "send_late_releases", lambda _: None)
            decode.port.end_receive(TRANSFER, needed=True)
        if is_greeted:
            wait_until(partial(is_free_after_a_greeting, prefill, decode))
        wait_whole(prefill, decode)


def is_free_after_a_greeting(prefill: Side, decode: Side) -> bool:
    decode.port.contact(prefill.exchange.address)
    return prefill.pool.num_free == prefill.pool.num_blocks


def wrong_hints(prefill: Side) -> dict[str, PeerAddress]:
    """What somebody might believe of ``prefill`` that is not so, or not the usual."""
    right = prefill.exchange.address
    port = right.control_address.rpartition(":")[2]
    return {
        "earlier start": PeerAddress(right.instance_id, Epoch(999_999), right.control_address),
        "earlier name": PeerAddress(InstanceId("before"), Epoch(999_999), right.control_address),
        "closed port": PeerAddress(right.instance_id, right.epoch, "tcp://127.0.0.1:1"),
        "nobody there": PeerAddress(right.instance_id, Epoch(999_999), "tcp://127.0.0.1:1"),
        "other name": PeerAddress(right.instance_id, right.epoch, f"tcp://localhost:{port}"),
    }


@pytest.mark.parametrize(
    "name", ["earlier start", "earlier name", "closed port", "nobody there", "other name"]
)
def test_a_wrong_hint_hurts_nobody_who_uses_the_right_one(name: str) -> None:
    with pair(control_timeout_s=1.0, max_held_share=1.0) as (prefill, decode):
        source = Prefill(prefill)
        source.begin()
        blocks = begin_receive(decode, prefill)
        wait_until(lambda: num_registered(prefill) == 1)
        source.compute()
        wrong = wrong_hints(prefill)[name]
        decode.port.contact(wrong)
        wish_blocks = decode.pool.allocate(4)
        history_request = HistoryRequest((BlockHash(b"h" * 32),) * 4, tuple(wish_blocks), (), 16, 1)
        decode.port.read_history(wrong, history_request)
        outcome = wait_result(decode).outcome
        expected = {
            "earlier start": ReceiveOutcome.GONE,
            "earlier name": ReceiveOutcome.GONE,
            "other name": ReceiveOutcome.DECLINED,
        }
        assert outcome is expected.get(name, ReceiveOutcome.UNREACHABLE)
        decode.pool.drop(wish_blocks)
        source.compute_all()
        assert_received(decode, blocks, source)
        wait_whole(prefill, decode)


def test_hints_of_peers_that_never_answer_open_so_many_sessions_and_no_more() -> None:
    with pair(control_timeout_s=0.5, max_peers=2) as (prefill, decode), ExitStack() as listening:
        for number in range(3):
            server = listening.enter_context(socket.create_server(("127.0.0.1", 0)))
            address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
            decode.port.contact(PeerAddress(InstanceId(f"x{number}"), Epoch(1), address))
        decode.port.begin_receive(TRANSFER, prefill.exchange.address, PROMPT, mode=Mode.PUSH)
        result = wait_result(decode)
        assert result.outcome is ReceiveOutcome.UNREACHABLE
        assert "2 other peers have not answered yet" in result.detail
        decode.port.end_receive(TRANSFER, needed=False)
        wait_until(lambda: decode.port.snapshot().num_peers_resting == 2)
        source = Prefill(prefill)
        source.begin()
        blocks = begin_receive(decode, prefill)
        source.compute_all()
        assert_received(decode, blocks, source)
        wait_whole(prefill, decode)


def test_a_session_that_gave_way_is_none_that_nobody_answers() -> None:
    with pair(control_timeout_s=0.5, max_peers=2) as (prefill, decode), ExitStack() as listening:
        prefill.offer(TRANSFER)
        blocks, _ = decode.receive(TRANSFER, prefill)
        decode.pool.drop(blocks)
        wait_until(lambda: num_answered(prefill, "release", "released") == 1)
        silent = []
        for number in range(2):
            server = listening.enter_context(socket.create_server(("127.0.0.1", 0)))
            address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
            silent.append(PeerAddress(InstanceId(f"x{number}"), Epoch(1), address))
        decode.port.contact(silent[0])
        blocks = decode.pool.allocate(1)
        history_request = HistoryRequest((BlockHash(b"h" * 32),), tuple(blocks), (), 16, 1)
        decode.port.read_history(silent[1], history_request)
        assert "did not answer within" in wait_result(decode).detail
        decode.pool.drop(blocks)
        wait_whole(prefill, decode)


def test_an_instance_that_has_moved_is_found_where_it_is_now() -> None:
    """Nothing is under way with it at the address before."""
    with pair(max_held_share=1.0) as (prefill, decode):
        for number, peer in enumerate([prefill.exchange.address, *wrong_hints(prefill).values()]):
            if peer.epoch != prefill.exchange.address.epoch or peer.control_address.endswith(":1"):
                continue
            transfer_id = TransferId(f"xfer-{number}")
            source = Prefill(prefill, transfer_id)
            source.begin()
            decode.port.begin_receive(transfer_id, peer, PROMPT, mode=Mode.PUSH)
            blocks = decode.pool.allocate(NUM_BLOCKS)
            decode.port.receive(transfer_id, blocks, 0)
            source.compute_all()
            assert_received(decode, blocks, source)
            wait_whole(prefill, decode)
