"""Blocks move between two exchanges, and whatever does not fit is refused by name."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.connector.peers import outbound
from kvferry.connector.peers.control import ControlServer, Received
from kvferry.connector.planner import Planner
from kvferry.connector.ports import HistoryRequest, PromptIdentity, ReceiveOutcome
from kvferry.errors import (
    ConfigError,
    LocalProtocolError,
    RequestError,
    TransferError,
    TransferFailedError,
)
from kvferry.protocol.codec import MAX_MESSAGE_BYTES, encode
from kvferry.protocol.ids import BlockHash, BlockNumber, Epoch, InstanceId, TransferId
from kvferry.protocol.messages import InstanceQuery, Renew
from kvferry.protocol.params import Mode, PeerAddress
from kvferry.transport import nixl, shm
from kvferry.transport.base import Link, TransferStatus
from tests.integration.exchange_pair import (
    LAYOUT,
    PROMPT,
    WAIT_S,
    Side,
    make_side,
    pair,
    wait_whole,
)

TRANSFER = TransferId("xfer-1")
WORK = {"shm": shm._CopyWork, "nixl": nixl._OwnWork}
LINKS = {"shm": shm.ShmLink, "nixl": nixl.NixlLink}
TRANSPORTS = list(WORK)


@pytest.mark.parametrize("transport_name", TRANSPORTS)
def test_blocks_arrive_bit_equal_and_both_pools_are_whole(transport_name: str) -> None:
    with pair(transport_name, verify_transfers=True) as (prefill, decode):
        for number in range(3):
            transfer_id = TransferId(f"xfer-{number}")
            _, sent = prefill.offer(transfer_id)
            blocks, result = decode.receive(transfer_id, prefill)
            assert result.outcome is ReceiveOutcome.RECEIVED, result.detail
            assert decode.memory[blocks].tobytes() == sent
            assert (result.num_bytes, result.transport) == (len(sent), transport_name)
            decode.pool.drop(blocks)
        wait_whole(prefill, decode)
        assert decode.counts(3, "kvferry_receives_total", mode="pull", outcome="received")
        assert prefill.counts(3, "kvferry_handoffs_total", outcome="read")


def test_a_process_with_many_open_files_moves_blocks_too() -> None:
    """As a worker that has loaded a model: select() knows no descriptor above 1023."""
    with contextlib.ExitStack() as files:
        for _ in range(1100):
            files.enter_context(open(os.devnull, "rb"))
        with pair() as (prefill, decode):
            prefill.offer(TRANSFER)
            blocks, result = decode.receive(TRANSFER, prefill)
            assert result.outcome is ReceiveOutcome.RECEIVED, result.detail
            decode.pool.drop(blocks)
            wait_whole(prefill, decode)


@pytest.mark.parametrize("transport_name", TRANSPORTS)
def test_both_directions_between_one_pair(transport_name: str) -> None:
    with pair(transport_name) as (left, right):
        _, sent_left = left.offer(TransferId("to-right"))
        _, sent_right = right.offer(TransferId("to-left"))
        blocks_right, result_right = right.receive(TransferId("to-right"), left)
        blocks_left, result_left = left.receive(TransferId("to-left"), right)
        assert result_left.outcome is result_right.outcome is ReceiveOutcome.RECEIVED
        assert right.memory[blocks_right].tobytes() == sent_left
        assert left.memory[blocks_left].tobytes() == sent_right
        right.pool.drop(blocks_right)
        left.pool.drop(blocks_left)
        wait_whole(left, right)


def refuse(*_: object) -> None:
    raise TransferFailedError("the transport refuses")


@pytest.mark.parametrize("transport_name", TRANSPORTS)
@pytest.mark.parametrize("how", ["refused", "failed"])
def test_a_link_whose_read_has_failed_is_made_anew(
    monkeypatch: pytest.MonkeyPatch, transport_name: str, how: str
) -> None:
    with pair(transport_name) as (prefill, decode):
        prefill.offer(TRANSFER)
        with monkeypatch.context() as patch:
            if how == "refused":
                patch.setattr(LINKS[transport_name], "_post", refuse)
            else:
                patch.setattr(WORK[transport_name], "advance", lambda _: TransferStatus.ERROR)
            blocks, result = decode.receive(TRANSFER, prefill)
        assert result.detail.startswith("the transport re")
        decode.pool.drop(blocks)
        deadline_s = time.monotonic() + 20
        while result.outcome is not ReceiveOutcome.RECEIVED:
            # Nothing is posted on the broken link; a lost peer may rest for a while.
            assert "closed" not in result.detail
            assert "broke" not in result.detail
            assert time.monotonic() < deadline_s, result.detail
            transfer_id = TransferId(f"again-{time.monotonic()}")
            _, sent = prefill.offer(transfer_id)
            blocks, result = decode.receive(transfer_id, prefill)
            decode.pool.drop(blocks)
            prefill.port.withdraw(transfer_id)
        assert decode.memory[blocks].tobytes() == sent
        wait_whole(prefill, decode)


def refused(prefill: Side, decode: Side) -> tuple[ReceiveOutcome, str]:
    blocks, result = decode.receive(TRANSFER, prefill)
    decode.pool.drop(blocks)
    return result.outcome, result.detail


def test_another_layout_is_refused_naming_the_field() -> None:
    other = msgspec.structs.replace(LAYOUT, kv_dtype="bfloat16")
    prefill, decode = make_side("prefill"), make_side("decode", layout=other)
    try:
        prefill.offer(TRANSFER)
        outcome, detail = refused(prefill, decode)
        assert outcome is ReceiveOutcome.INCOMPATIBLE
        for part in ("kv_dtype", "float32", "bfloat16"):
            assert part in detail
        prefill.port.withdraw(TRANSFER)
        wait_whole(prefill, decode)
    finally:
        decode.close()
        prefill.close()


def test_a_peer_that_does_not_fit_is_asked_once_in_its_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outbound, "LOST_SESSION_REST_S", 0.0)
    other = msgspec.structs.replace(LAYOUT, kv_dtype="bfloat16")
    prefill, decode = make_side("prefill"), make_side("decode", layout=other)
    third = make_side("third", layout=other)
    try:
        for number in range(3):
            transfer_id = TransferId(f"xfer-{number}")
            prefill.offer(transfer_id)
            third.offer(transfer_id)
            blocks, result = decode.receive(transfer_id, prefill)
            assert result.outcome is ReceiveOutcome.INCOMPATIBLE
            decode.pool.drop(blocks)
            blocks, result = decode.receive(transfer_id, third)
            assert result.outcome is ReceiveOutcome.RECEIVED, "another one is not concerned"
            decode.pool.drop(blocks)
            prefill.port.withdraw(transfer_id)
        hellos = {"type": "hello", "result": "declined"}
        assert prefill.counts(1, "kvferry_control_requests_total", **hellos)
        wait_whole(prefill, decode, third)
    finally:
        for side in (decode, prefill, third):
            side.close()


def test_a_restarted_peer_has_none_of_the_old_blocks() -> None:
    with pair() as (prefill, decode):
        prefill.offer(TRANSFER)
        address = prefill.exchange.address
        old = PeerAddress(address.instance_id, Epoch(999_999), address.control_address)
        decode.port.begin_receive(TRANSFER, old, PROMPT)
        blocks = decode.pool.allocate(8)
        decode.port.receive(TRANSFER, blocks, 0)
        assert decode.wait_result().outcome is ReceiveOutcome.GONE
        decode.pool.drop(blocks)
        prefill.port.withdraw(TRANSFER)
        wait_whole(prefill, decode)


def test_another_prompt_under_the_same_id_is_a_mismatch() -> None:
    with pair() as (prefill, decode):
        prefill.offer(TRANSFER)
        other = PromptIdentity(PROMPT.num_tokens, b"q" * 32)
        decode.port.begin_receive(TRANSFER, prefill.exchange.address, other)
        blocks = decode.pool.allocate(8)
        decode.port.receive(TRANSFER, blocks, 0)
        assert decode.wait_result().outcome is ReceiveOutcome.MISMATCH
        decode.pool.drop(blocks)
        prefill.port.withdraw(TRANSFER)
        wait_whole(prefill, decode)


def test_a_dead_peer_costs_one_bounded_wait_and_then_none() -> None:
    with pair(control_timeout_s=0.3) as (prefill, decode):
        address = prefill.exchange.address
        prefill.exchange.close()
        started_s = time.monotonic()
        outcome, detail = refused(prefill, decode)
        assert outcome is ReceiveOutcome.UNREACHABLE
        assert address.control_address in detail
        assert time.monotonic() - started_s < 5
        wait_whole(decode)


def test_a_peer_that_dies_after_the_handshake_is_noticed() -> None:
    with pair(control_timeout_s=0.3) as (prefill, decode):
        prefill.offer(TransferId("first"))
        blocks, result = decode.receive(TransferId("first"), prefill)
        assert result.outcome is ReceiveOutcome.RECEIVED
        decode.pool.drop(blocks)
        prefill.exchange.close()
        assert refused(prefill, decode)[0] is ReceiveOutcome.UNREACHABLE
        wait_whole(decode)


def test_with_a_cluster_key_only_its_holders_get_in() -> None:
    key, other_key = b"k" * 32, b"o" * 32
    prefill = make_side("prefill", cluster_key=key)
    friend = make_side("friend", cluster_key=key, control_timeout_s=5.0)
    stranger = make_side("stranger", control_timeout_s=0.3)
    thief = make_side("thief", cluster_key=other_key, control_timeout_s=0.3)
    try:
        prefill.offer(TRANSFER)
        for outsider in (stranger, thief):
            assert refused(prefill, outsider)[0] is ReceiveOutcome.UNREACHABLE
        blocks, result = friend.receive(TRANSFER, prefill)
        assert result.outcome is ReceiveOutcome.RECEIVED
        friend.pool.drop(blocks)
        wait_whole(prefill, friend, stranger, thief)
    finally:
        for side in (friend, stranger, thief, prefill):
            side.close()


def test_an_address_of_another_host_needs_a_cluster_key() -> None:
    with pytest.raises(ConfigError, match="cluster key"):
        make_side("exposed", control_host="0.0.0.0")
    with pair() as (_, decode):
        refused = ("tcp://192.0.2.1:5000", "ipc:///tmp/x", "tcp://127.0.0.1", "inproc://x")
        ports = ("0", "65536", "-1", "http", "\N{ARABIC-INDIC DIGIT THREE}", "1" * 5000)
        history_request = HistoryRequest((BlockHash(b"h" * 32),), (BlockNumber(0),), (), 16, 1)
        for address in (*refused, *(f"tcp://127.0.0.1:{port}" for port in ports)):
            peer = PeerAddress(InstanceId("x"), Epoch(1), address)
            with pytest.raises(RequestError, match="control_address"):
                decode.port.begin_receive(TRANSFER, peer, PROMPT)
            with pytest.raises(RequestError, match="control_address"):
                decode.port.contact(peer)
            with pytest.raises(RequestError, match="control_address"):
                decode.port.read_history(peer, history_request)
        with pytest.raises(RequestError, match="it holds its own history"):
            decode.port.read_history(decode.exchange.address, history_request)


@pytest.mark.parametrize("kind", ["pull", "push", "history"])
def test_a_peer_to_whom_no_link_can_be_opened_costs_no_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """The engine hears of it, and nothing is left open."""
    with pair() as (prefill, decode):

        def fail(*_: object, **__: object) -> Link:
            raise TransferError("there is no room for another link")

        monkeypatch.setattr(decode.transport, "open_link", fail)
        peer, blocks = prefill.exchange.address, decode.pool.allocate(8)
        if kind == "history":
            decode.port.contact(peer)
            history_request = HistoryRequest((BlockHash(b"h" * 32),) * 8, tuple(blocks), (), 16, 1)
            decode.port.read_history(peer, history_request)
        else:
            decode.port.begin_receive(TRANSFER, peer, PROMPT, mode=Mode(kind))
            with contextlib.suppress(LocalProtocolError):  # A push may have failed by now.
                decode.port.receive(TRANSFER, blocks, 0)
        result = decode.wait_result()
        assert result.outcome is ReceiveOutcome.UNREACHABLE
        assert "no room for another link" in result.detail
        decode.pool.drop(blocks)
        wait_whole(prefill, decode)
    assert "a bug in kvferry" not in caplog.text
    assert "did not stop" not in caplog.text


def test_ipv6_works() -> None:
    with pair(control_host="::1") as (prefill, decode):
        assert prefill.exchange.address.control_address.startswith("tcp://[::1]:")
        prefill.offer(TRANSFER)
        blocks, result = decode.receive(TRANSFER, prefill)
        assert result.outcome is ReceiveOutcome.RECEIVED
        decode.pool.drop(blocks)
        wait_whole(prefill, decode)


def ask(
    side: Side, send: Callable[[zmq.Socket[bytes]], None], until: Callable[[], bool] = lambda: True
) -> bool:
    """Send something odd on a fresh socket; return whether the port still answers a query.

    The odd one's socket stays open until ``until`` holds: closing it could lose what it has sent.
    """
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.RCVTIMEO, 5000)
        client.connect(side.exchange.address.control_address)
        send(client)
        with context.socket(zmq.DEALER) as second:
            second.setsockopt(zmq.LINGER, 0)
            second.setsockopt(zmq.RCVTIMEO, 5000)
            second.connect(side.exchange.address.control_address)
            second.send(encode(1, InstanceQuery()))
            is_answered = b"instance_info" in second.recv()
        deadline_s = time.monotonic() + WAIT_S
        while not until():
            assert time.monotonic() < deadline_s, "what was sent has not arrived"
            time.sleep(0.001)
        return is_answered


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(frames=st.lists(st.binary(max_size=300), min_size=1, max_size=3))
def test_random_frames_are_counted_and_dropped(shared_side: Side, frames: list[bytes]) -> None:
    def send(client: zmq.Socket[bytes]) -> None:
        client.send_multipart(frames)

    assert ask(shared_side, send)


def test_truncated_and_oversized_messages_are_dropped() -> None:
    """On a side of its own: what another test has sent may still be on its way to a shared one."""
    side = make_side("door")

    def malformed() -> float:
        return side.counter("kvferry_control_malformed_total", reason="malformed")

    try:
        whole = encode(1, Renew(TRANSFER, Epoch(1), 1.0))
        for cut in range(len(whole)):
            # The answer came by another connection; the counter has its own time.
            assert ask(
                side,
                lambda client, cut=cut: client.send(whole[:cut]),  # type: ignore[misc]
                until=lambda cut=cut: malformed() > cut,  # type: ignore[misc]
            )
        assert malformed() == len(whole)
        assert ask(side, lambda client: client.send(b"x" * (MAX_MESSAGE_BYTES + 1)))
    finally:
        side.close()


def test_a_request_that_meets_a_bug_costs_no_other_its_answer(
    monkeypatch: pytest.MonkeyPatch, shared_side: Side
) -> None:
    received: list[Received] = []
    receive = ControlServer.receive

    def receive_both(server: ControlServer) -> list[Received]:
        received.extend(receive(server))
        both, received[:] = (received[:], []) if len(received) >= 2 else ([], received)
        return both

    def fail(*_: object) -> None:
        raise AssertionError("a bug that a test has put there")

    monkeypatch.setattr(ControlServer, "receive", receive_both)
    monkeypatch.setattr(Planner, "answer", fail)
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.RCVTIMEO, 20_000)
        client.connect(shared_side.exchange.address.control_address)
        client.send(encode(1, Renew(TRANSFER, Epoch(1), 1.0)))
        client.send(encode(2, InstanceQuery()))
        assert b"instance_info" in client.recv()


def test_raw_bytes_on_the_port_do_no_harm(shared_side: Side) -> None:
    host, _, port = shared_side.exchange.address.control_address[6:].rpartition(":")
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\xff" * 64, b""):
        with socket.create_connection((host, int(port)), timeout=5) as raw:
            raw.sendall(garbage)
    assert ask(shared_side, lambda client: None)


def test_an_offer_that_nobody_reads_ends_in_time_where_nothing_else_happens() -> None:
    with pair(handoff_lease_s=0.05) as (prefill, decode):
        prefill.offer(TRANSFER)
        wait_whole(prefill, decode)
        assert prefill.counts(1, "kvferry_handoffs_total", outcome="expired")


@pytest.mark.alone
def test_an_idle_exchange_leaves_the_core_alone() -> None:
    with pair() as (prefill, decode):
        prefill.offer(TRANSFER)
        blocks, _ = decode.receive(TRANSFER, prefill)
        decode.pool.drop(blocks)
        wait_whole(prefill, decode)
        started_s, used_s = time.monotonic(), time.process_time()
        while time.monotonic() - started_s < 2.0:
            decode.has_results.wait(0.5)
        assert time.process_time() - used_s < 0.02 * 2.0
