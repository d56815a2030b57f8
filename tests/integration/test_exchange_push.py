"""Blocks pushed between two exchanges, over real sockets and transports."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from kvferry.connector.ports import PrefillEnd, PromptIdentity, ReceiveOutcome, ReceiveResult
from kvferry.connector.transfers import Outgoing, OutgoingTransfers
from kvferry.errors import RequestError
from kvferry.protocol.ids import BlockNumber, TransferId
from kvferry.protocol.params import Mode
from kvferry.protocol.prefill_result import FirstToken
from tests.integration.exchange_pair import (
    BLOCK_BYTES,
    PROMPT,
    WAIT_S,
    Side,
    make_side,
    pair,
    wait_whole,
)

TRANSFER = TransferId("xfer-1")
TRANSPORTS = ["shm", "nixl"]
END = PrefillEnd(FirstToken(7, 1), 12.5)
NUM_BLOCKS = 8


class Prefill:
    """Computes a prompt of eight blocks, a chunk of two at a time, when told to."""

    def __init__(self, side: Side, transfer_id: TransferId = TRANSFER) -> None:
        self.side, self.transfer_id = side, transfer_id
        self.blocks: list[BlockNumber] = []
        self.num_computed = 0

    def begin(self) -> None:
        self.blocks = self.side.pool.allocate(NUM_BLOCKS)
        self.side.port.begin_send(self.transfer_id, PROMPT)

    def compute(self, num_blocks: int = 2) -> None:
        for index in range(self.num_computed, self.num_computed + num_blocks):
            self.side.memory[self.blocks[index]] = (hash(self.transfer_id) + index) % 251
        self.num_computed += num_blocks
        tokens = self.num_computed * 16
        if self.num_computed < NUM_BLOCKS:
            self.side.port.advance_send(self.transfer_id, self.blocks, tokens)
        else:
            self.side.port.complete_send(self.transfer_id, self.blocks, END)
            self.side.pool.drop(self.blocks)

    def compute_all(self) -> None:
        while self.num_computed < NUM_BLOCKS:
            self.compute()

    def compute_all_in(self, blocks: list[BlockNumber]) -> None:
        """Go on in others than before, which have another owner in the end."""
        self.side.pool.hold(blocks)
        self.blocks = blocks
        self.compute_all()

    def expected(self, index: int) -> int:
        return (hash(self.transfer_id) + index) % 251


def wait_until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(WAIT_S / 0.005)):
        if condition():
            return
        pause.wait(0.005)
    raise AssertionError("it did not come to pass")


def num_answered(side: Side, message: str, reply: str) -> float:
    return side.counter("kvferry_control_requests_total", type=message, result=reply)


def num_registered(side: Side) -> float:
    return num_answered(side, "register", "registered")


def wait_result(side: Side) -> ReceiveResult:
    """Wait for the one result that is due."""
    results: list[ReceiveResult] = []

    def has_come() -> bool:
        results.extend(side.port.take_results())
        return bool(results)

    wait_until(has_come)
    (result,) = results
    return result


def begin_receive(
    decode: Side, prefill: Side, transfer_id: TransferId = TRANSFER, first_block: int = 0
) -> list[BlockNumber]:
    decode.port.begin_receive(transfer_id, prefill.exchange.address, PROMPT, mode=Mode.PUSH)
    blocks = decode.pool.allocate(NUM_BLOCKS - first_block)
    decode.port.receive(transfer_id, blocks, first_block)
    return blocks


def assert_received(
    decode: Side, blocks: list[BlockNumber], source: Prefill, first_block: int = 0
) -> None:
    result = wait_result(decode)
    assert result.outcome is ReceiveOutcome.RECEIVED, result.detail
    assert result.num_bytes == len(blocks) * BLOCK_BYTES
    for index, block in enumerate(blocks, first_block):
        assert (decode.memory[block] == source.expected(index)).all(), index
    (arrival,) = decode.port.take_first_tokens()
    assert arrival.end == END
    decode.pool.drop(blocks)


@pytest.mark.parametrize("transport_name", TRANSPORTS)
@pytest.mark.parametrize("num_before", [0, 2, 4, 6, 8])
def test_a_registration_may_come_at_any_time(transport_name: str, num_before: int) -> None:
    with pair(transport_name) as (prefill, decode):
        source = Prefill(prefill)
        source.begin()
        for _ in range(num_before // 2):
            source.compute()
        blocks = begin_receive(decode, prefill)
        if num_before < NUM_BLOCKS:
            wait_until(lambda: num_registered(prefill) == 1)
            source.compute_all()
        assert_received(decode, blocks, source)
        wait_whole(prefill, decode)


@pytest.mark.parametrize("transport_name", TRANSPORTS)
def test_a_registration_may_come_before_prefill_is_known(transport_name: str) -> None:
    with pair(transport_name) as (prefill, decode):
        blocks = begin_receive(decode, prefill)
        wait_until(lambda: prefill.port.snapshot().num_handoffs_held == 1)
        source = Prefill(prefill)
        source.begin()
        source.compute_all()
        assert_received(decode, blocks, source)
        wait_whole(prefill, decode)


def test_the_time_of_a_push_has_no_wait_for_prefill_in_it() -> None:
    with pair() as (prefill, decode):
        source = Prefill(prefill)
        source.begin()
        blocks = begin_receive(decode, prefill)
        threading.Event().wait(3.0)
        source.compute_all()
        assert_received(decode, blocks, source)
        assert decode.counts(1, "kvferry_transfer_seconds_count", mode="push")
        assert decode.counter("kvferry_transfer_seconds_sum", mode="push") < 3.0


def test_only_what_is_missing_is_written() -> None:
    with pair() as (prefill, decode):
        source = Prefill(prefill)
        source.begin()
        blocks = begin_receive(decode, prefill, first_block=5)
        source.compute_all()
        assert_received(decode, blocks, source, first_block=5)
        wait_whole(prefill, decode)


@pytest.mark.parametrize("transport_name", TRANSPORTS)
def test_several_pushes_at_once_in_both_directions(transport_name: str) -> None:
    with pair(transport_name, max_inflight_bytes=2 * BLOCK_BYTES, max_held_share=1.0) as (
        left,
        right,
    ):
        under_way: list[tuple[Side, list[BlockNumber], Prefill]] = []
        for number in range(6):
            transfer_id = TransferId(f"xfer-{number}")
            sender, receiver = (left, right) if number % 2 else (right, left)
            source = Prefill(sender, transfer_id)
            source.begin()
            under_way.append((receiver, begin_receive(receiver, sender, transfer_id), source))
        for _ in range(NUM_BLOCKS // 2):
            for _, _, source in under_way:
                source.compute()
        results: dict[TransferId, ReceiveResult] = {}

        def have_all_come() -> bool:
            for side in (left, right):
                results.update({r.transfer_id: r for r in side.port.take_results()})
            return len(results) == len(under_way)

        wait_until(have_all_come)
        for receiver, blocks, source in under_way:
            assert results[source.transfer_id].outcome is ReceiveOutcome.RECEIVED
            for index, block in enumerate(blocks):
                assert (receiver.memory[block] == source.expected(index)).all()
            receiver.pool.drop(blocks)
        wait_whole(left, right)


@pytest.mark.parametrize("num_before", [0, 4])
def test_an_aborted_prefill_is_told_at_once(num_before: int) -> None:
    with pair() as (prefill, decode):
        source = Prefill(prefill)
        source.begin()
        blocks = begin_receive(decode, prefill)
        wait_until(lambda: num_registered(prefill) == 1)
        for _ in range(num_before // 2):
            source.compute()
        prefill.port.withdraw(TRANSFER)
        prefill.pool.drop(source.blocks)
        assert wait_result(decode).outcome is ReceiveOutcome.GONE
        decode.pool.drop(blocks)
        wait_whole(prefill, decode)


def test_a_receiver_that_wants_nothing_stops_the_prefill() -> None:
    with pair() as (prefill, decode):
        source = Prefill(prefill)
        source.begin()
        decode.port.begin_receive(TRANSFER, prefill.exchange.address, PROMPT, mode=Mode.PUSH)
        decode.port.end_receive(TRANSFER, needed=False)
        stopped: list[TransferId] = []

        def has_stopped() -> bool:
            stopped.extend(prefill.port.take_stopped_sends())
            return bool(stopped)

        wait_until(has_stopped)
        assert stopped == [TRANSFER]
        prefill.port.withdraw(TRANSFER)
        prefill.pool.drop(source.blocks)
        wait_whole(prefill, decode)


def test_other_blocks_may_be_registered_later() -> None:
    with pair() as (prefill, decode):
        source = Prefill(prefill)
        source.begin()
        first = begin_receive(decode, prefill)
        source.compute(4)
        assert decode.port.give_back(TRANSFER)
        decode.pool.drop(first)
        second = decode.pool.allocate(NUM_BLOCKS)
        assert not set(first) & set(second)
        decode.port.receive(TRANSFER, second, 0)
        wait_until(lambda: num_registered(prefill) == 2)
        source.compute_all()
        assert_received(decode, second, source)
        wait_whole(prefill, decode)


def test_a_late_release_leaves_the_notices_to_who_has_registered_since() -> None:
    seldom_s = 3 * WAIT_S  # a heartbeat would show the way again
    with pair(push_heartbeat_s=seldom_s) as (prefill, decode):
        other = make_side("other", push_heartbeat_s=seldom_s)
        source = Prefill(prefill)
        source.begin()
        left = begin_receive(other, prefill)
        wait_until(lambda: num_registered(prefill) == 1)
        blocks = begin_receive(decode, prefill)
        wait_until(lambda: num_registered(prefill) == 2)
        other.port.end_receive(TRANSFER, needed=False)
        other.pool.drop(left)
        wait_until(lambda: num_answered(prefill, "release", "released") == 1)
        source.compute_all()
        assert_received(decode, blocks, source)
        wait_whole(prefill, decode, other)
        other.close()


def test_another_prompt_is_a_mismatch() -> None:
    with pair() as (prefill, decode):
        source = Prefill(prefill)
        source.begin()
        other = PromptIdentity(PROMPT.num_tokens, b"q" * 32)
        decode.port.begin_receive(TRANSFER, prefill.exchange.address, other, mode=Mode.PUSH)
        blocks = decode.pool.allocate(NUM_BLOCKS)
        decode.port.receive(TRANSFER, blocks, 0)
        assert wait_result(decode).outcome is ReceiveOutcome.MISMATCH
        decode.pool.drop(blocks)
        prefill.port.withdraw(TRANSFER)
        prefill.pool.drop(source.blocks)
        wait_whole(prefill, decode)


def test_nobody_waits_for_itself_to_push() -> None:
    """As where a router takes one instance for the other."""
    with pair() as (_, decode):
        with pytest.raises(RequestError, match=r"decode is this instance itself: .*--control"):
            begin_receive(decode, decode)
        wait_whole(decode)


def test_a_dead_sender_is_noticed_by_its_silence() -> None:
    with pair(control_timeout_s=0.3, push_heartbeat_s=0.1) as (prefill, decode):
        source = Prefill(prefill)
        source.begin()
        blocks = begin_receive(decode, prefill)
        wait_until(lambda: num_registered(prefill) == 1)
        source.compute(4)
        prefill.exchange.close()
        assert wait_result(decode).outcome is ReceiveOutcome.UNREACHABLE
        decode.pool.drop(blocks)
        # Both are one process here, which still lives: on shm its writes cannot be ruled out by
        # death. Its link has said goodbye, though, which is as good.
        wait_whole(decode)


def test_registrations_whose_prefill_never_comes_are_bounded_and_forgotten() -> None:
    with pair(prefill_timeout_s=1.0, max_early_registrations=4) as (prefill, decode):
        for number in range(8):
            transfer_id = TransferId(f"xfer-{number}")
            decode.port.begin_receive(transfer_id, prefill.exchange.address, PROMPT, mode=Mode.PUSH)
            blocks = decode.pool.allocate(NUM_BLOCKS)
            decode.port.receive(transfer_id, blocks, 0)
            decode.pool.drop(blocks)
        wait_whole(prefill, decode)


@pytest.mark.parametrize("transport_name", TRANSPORTS)
@pytest.mark.parametrize("verifies", [True, False])
def test_blocks_that_were_anothers_when_they_were_posted_are_found_where_that_is_verified(
    monkeypatch: pytest.MonkeyPatch, transport_name: str, verifies: bool
) -> None:
    """With the references of a push removed: its prefill is preempted, its blocks are reused, and
    only then decode registers."""

    def refer_without_holding(
        outgoing: OutgoingTransfers, transfer: Outgoing, blocks: list[BlockNumber]
    ) -> bool:
        transfer.blocks = tuple(blocks)
        return True

    def forget(outgoing: OutgoingTransfers, transfer: Outgoing) -> None:
        transfer.lease_ends_s = None

    monkeypatch.setattr(OutgoingTransfers, "refer", refer_without_holding)
    monkeypatch.setattr(OutgoingTransfers, "let_go", forget)
    with pair(transport_name, verify_transfers=verifies) as (prefill, decode):
        source = Prefill(prefill)
        source.begin()
        source.compute()
        prefill.pool.drop(source.blocks)
        others = prefill.pool.allocate(prefill.pool.num_free)
        prefill.memory[others] = 255
        blocks = begin_receive(decode, prefill)
        wait_until(lambda: num_registered(prefill) == 1)
        source.compute_all_in(others[:NUM_BLOCKS])
        result = wait_result(decode)
        expected = ReceiveOutcome.CORRUPT if verifies else ReceiveOutcome.RECEIVED
        assert result.outcome is expected, result.detail
        decode.pool.drop(blocks)
        prefill.pool.drop(others)
        counted = {"result": "compared"}
        assert decode.counts(8 * verifies, "kvferry_verified_blocks_total", **counted)
