"""Orders executed: which reference is dropped when, and whose end it is."""

from __future__ import annotations

import threading

import pytest

from kvferry.connector.ports import HistoryRequest, PromptIdentity, ReceiveOutcome, ReceiveResult
from kvferry.errors import LocalProtocolError, RequestError
from kvferry.protocol.ids import BlockHash, RequestId, TransferId
from kvferry.protocol.params import Mode
from kvferry.vllm_plugin.orders import (
    AdvanceSend,
    Begin,
    BeginSend,
    CompleteSend,
    Contact,
    End,
    Fill,
    FillEnd,
    FillHistory,
    Forget,
    LetGo,
    Offer,
    RestartSend,
    Retain,
    Withdraw,
)
from tests.unit.vllm_plugin.executor_rig import ExecutorRig
from tests.unit.vllm_plugin.fake_engine import PEER, blocks

_PROMPT = PromptIdentity(8, b"d" * 32)
_A, _X = RequestId("a"), TransferId("x")
_BEGIN = Begin(_A, _X, PEER, _PROMPT, Mode.PULL)


@pytest.fixture
def rig() -> ExecutorRig:
    return ExecutorRig()


def test_blocks_come_back_once_the_exchange_has_let_go_of_them(rig: ExecutorRig) -> None:
    rig.executor.execute(_BEGIN)
    rig.executor.execute(Fill(_A, _X, blocks(4, 5), 0))
    assert rig.pins.take_returned() == []
    rig.exchange.let_go(_X)
    assert rig.pins.take_returned() == [4, 5]


def test_a_result_is_its_requests_end(rig: ExecutorRig) -> None:
    rig.executor.execute(_BEGIN)
    rig.executor.execute(Fill(_A, _X, blocks(4, 5), 0))
    result = ReceiveResult(_X, ReceiveOutcome.RECEIVED, num_bytes=9, num_blocks=2)
    rig.exchange.results = [result]
    (end,) = rig.executor.take_ends()
    assert (end.request_id, end.num_blocks, end.num_bytes, end.is_received) == (_A, 2, 9, True)
    assert rig.executor.take_ends() == []


def test_a_result_that_comes_as_the_receive_begins_is_not_lost(rig: ExecutorRig) -> None:
    """A peer that rests since it was lost is told of by another thread at once."""
    ends: list[FillEnd] = []
    taking = threading.Thread(target=lambda: ends.extend(rig.executor.take_ends()))

    def lose_at_once() -> None:
        rig.exchange.results = [ReceiveResult(_X, ReceiveOutcome.UNREACHABLE, "it rests")]
        taking.start()
        taking.join(0.2)  # which it can't end in, unless it has lost the result

    rig.exchange.on_begin = lose_at_once
    rig.executor.execute(_BEGIN)
    taking.join(10)
    assert [(end.request_id, end.outcome) for end in ends] == [(_A, "unreachable")]


def test_a_push_that_was_written_has_filled_all(rig: ExecutorRig) -> None:
    rig.executor.execute(_BEGIN)
    rig.exchange.results = [ReceiveResult(_X, ReceiveOutcome.RECEIVED)]
    (end,) = rig.executor.take_ends()
    assert end.is_received
    assert blocks(1, 2)[end.num_blocks :] == ()


def test_a_receive_that_cannot_begin_fails_at_once_and_once(rig: ExecutorRig) -> None:
    """A push that waits for its prefill to be admitted would wait for ever."""
    rig.exchange.error = RequestError("in use")
    rig.executor.execute(_BEGIN)
    rig.exchange.error = None
    rig.executor.execute(Fill(_A, _X, blocks(4), 0))
    (end,) = rig.executor.take_ends()
    assert (end.request_id, end.is_received) == (_A, False)
    assert rig.pins.take_returned() == [4]
    assert rig.num_told == 1
    rig.executor.execute(End(_A, True))
    assert ("end_receive", _X, True) not in rig.exchange.calls


def test_a_bug_in_filling_fails_its_request_too(rig: ExecutorRig) -> None:
    rig.executor.execute(_BEGIN)
    rig.exchange.error = KeyError("a bug")
    with pytest.raises(KeyError):
        rig.executor.execute(Fill(_A, _X, blocks(4), 0))
    (end,) = rig.executor.take_ends()
    assert (end.request_id, end.is_received) == (_A, False)
    assert rig.pins.take_returned() == [4]


def test_a_second_request_under_one_transfer_id_fails_alone(rig: ExecutorRig) -> None:
    rig.executor.execute(_BEGIN)
    rig.exchange.error = RequestError("in use")
    rig.executor.execute(Begin(RequestId("b"), _X, PEER, _PROMPT, Mode.PULL))
    rig.exchange.error = None
    rig.executor.execute(Fill(RequestId("b"), _X, blocks(1), 0))
    rig.executor.execute(Fill(_A, _X, blocks(2), 0))
    assert [end.request_id for end in rig.executor.take_ends()] == ["b"]
    assert rig.exchange.held == {_X: blocks(2)}


def test_nothing_is_told_of_a_request_that_was_ended(rig: ExecutorRig) -> None:
    rig.executor.execute(_BEGIN)
    rig.executor.execute(Fill(_A, _X, blocks(4), 0))
    rig.executor.execute(End(_A, True))
    assert rig.exchange.calls[-1] == ("end_receive", _X, True)
    rig.exchange.results = [ReceiveResult(_X, ReceiveOutcome.RECEIVED, num_blocks=1)]
    assert rig.executor.take_ends() == []
    assert not rig.executor._receives


def _history() -> FillHistory:
    hashes = (BlockHash(b"h" * 32),)
    return FillHistory(_A, PEER, HistoryRequest(hashes, blocks(4), tuple(range(4)), 4, 1))


def test_a_history_is_its_requests_too_and_ended_with_it(rig: ExecutorRig) -> None:
    rig.executor.execute(_history())
    history = next(iter(rig.exchange.held))
    rig.exchange.results = [ReceiveResult(history, ReceiveOutcome.GONE, "not here")]
    (end,) = rig.executor.take_ends()
    assert (end.request_id, end.outcome, end.num_blocks) == (_A, "gone", 0)
    rig.executor.execute(End(_A, True))
    assert rig.exchange.calls[-1] == ("end_receive", history, True)


def test_of_a_history_full_blocks_and_the_tokens_after_them_are_counted_apart(
    rig: ExecutorRig,
) -> None:
    rig.executor.execute(_history())
    history = next(iter(rig.exchange.held))
    result = ReceiveResult(
        history, ReceiveOutcome.RECEIVED, num_blocks=3, num_partial_tokens=2, num_bytes=9
    )
    rig.exchange.results = [result]
    (end,) = rig.executor.take_ends()
    assert (end.num_blocks, end.num_partial_tokens, end.num_bytes) == (2, 2, 9)
    assert (end.is_received, end.mode) == (True, "history")


def test_a_history_that_cannot_be_asked_for_is_a_failure(rig: ExecutorRig) -> None:
    rig.exchange.error = LocalProtocolError("unequal")
    rig.executor.execute(_history())
    (end,) = rig.executor.take_ends()
    assert not end.is_received
    assert rig.pins.take_returned() == [4]


def test_an_offer_is_answered_and_kept_by_the_exchange(rig: ExecutorRig) -> None:
    answer = rig.executor.execute(Offer(_A, _X, _PROMPT, blocks(1, 2)))
    assert (answer.lease_s, answer.error) == (30.0, "")
    assert rig.pins.take_returned() == []
    rig.exchange.let_go(_X)
    assert rig.pins.take_returned() == [1, 2]


def test_an_offer_that_is_refused_is_answered_with_why(rig: ExecutorRig) -> None:
    rig.exchange.error = RequestError("used before")
    assert rig.executor.execute(Offer(_A, _X, _PROMPT, blocks(1))).error == "used before"
    assert rig.pins.take_returned() == [1]


def test_a_pushs_blocks_stay_pinned_until_its_prefill_ends(rig: ExecutorRig) -> None:
    rig.executor.execute(BeginSend(_A, _X, _PROMPT))
    rig.executor.execute(AdvanceSend(_A, _X, blocks(1), 4))
    rig.executor.execute(AdvanceSend(_A, _X, blocks(2), 8))
    assert rig.exchange.calls[-1] == ("advance_send", blocks(1, 2), 8)
    answer = rig.executor.execute(CompleteSend(_A, _X, blocks(3), 7))
    assert answer.lease_s == 30.0
    assert rig.pins.take_returned() == []
    rig.exchange.let_go(_X)
    assert rig.pins.take_returned() == [1, 2, 3]


def test_a_preempted_push_offers_nothing_until_it_has_blocks_again(rig: ExecutorRig) -> None:
    rig.executor.execute(BeginSend(_A, _X, _PROMPT))
    rig.executor.execute(AdvanceSend(_A, _X, blocks(1), 4))
    rig.executor.execute(RestartSend(_A, _X))
    # Told before the pins go: no registration may start a WRITE from these blocks any more, and
    # none counts on this prefill's going on.
    assert rig.exchange.calls[-2:] == [("advance_send", (), 0), ("pause_send", _X)]
    assert rig.pins.take_returned() == [1]
    rig.executor.execute(AdvanceSend(_A, _X, blocks(9), 4))
    assert rig.exchange.calls[-1] == ("advance_send", blocks(9), 4)


def test_a_push_that_is_withdrawn_gives_its_blocks_back(rig: ExecutorRig) -> None:
    rig.executor.execute(BeginSend(_A, _X, _PROMPT))
    rig.executor.execute(AdvanceSend(_A, _X, blocks(1), 4))
    rig.executor.execute(Withdraw(_A, _X))
    assert rig.exchange.calls[-1] == ("withdraw", _X)
    assert rig.pins.take_returned() == [1]


def test_a_push_that_was_refused_keeps_no_block(rig: ExecutorRig) -> None:
    rig.executor.execute(AdvanceSend(_A, _X, blocks(1), 4))
    assert rig.executor.execute(CompleteSend(_A, _X, blocks(2), 7)).error
    assert sorted(rig.pins.take_returned()) == [1, 2]


def test_another_request_under_the_same_id_is_never_sent_as_this_one(rig: ExecutorRig) -> None:
    other = RequestId("b")
    rig.executor.execute(BeginSend(_A, _X, _PROMPT))
    rig.executor.execute(AdvanceSend(_A, _X, blocks(1), 4))
    rig.executor.execute(AdvanceSend(other, _X, blocks(7), 8))
    rig.executor.execute(RestartSend(other, _X))
    rig.executor.execute(Withdraw(other, _X))
    assert rig.executor.execute(CompleteSend(other, _X, blocks(8), 7)).error
    assert sorted(rig.pins.take_returned()) == [7, 8]
    rig.executor.execute(AdvanceSend(_A, _X, blocks(2), 8))
    assert rig.exchange.calls[-1] == ("advance_send", blocks(1, 2), 8)
    assert ("withdraw", _X) not in rig.exchange.calls


def test_retained_blocks_are_found_until_they_are_let_go_of(rig: ExecutorRig) -> None:
    block_hash = BlockHash(b"h" * 32)
    rig.executor.execute(Retain((block_hash,), blocks(4)))
    assert rig.pins.acquire_cached([block_hash]) == list(blocks(4))
    rig.executor.execute(LetGo((block_hash,)))
    rig.pins.drop(blocks(4))
    assert rig.pins.take_returned() == [4]


def test_a_push_is_admitted_once_its_prefill_is_at_work(rig: ExecutorRig) -> None:
    rig.executor.execute(_BEGIN)
    rig.executor.execute(Begin(RequestId("b"), TransferId("y"), PEER, _PROMPT, Mode.PUSH))
    assert rig.executor.take_admitted() == []
    rig.exchange.admitted = {_X, TransferId("y")}
    assert rig.executor.take_admitted() == [RequestId("b")], "a pull has no share to wait for"
    assert rig.executor.take_admitted() == []


def test_a_push_that_was_ended_is_not_admitted(rig: ExecutorRig) -> None:
    rig.executor.execute(Begin(_A, _X, PEER, _PROMPT, Mode.PUSH))
    rig.executor.execute(End(_A, True))
    rig.exchange.admitted = {_X}
    assert rig.executor.take_admitted() == []


def test_what_is_void_is_neither_found_nor_offered_nor_sent(rig: ExecutorRig) -> None:
    block_hash = BlockHash(b"h" * 32)
    rig.executor.execute(Retain((block_hash,), blocks(4)))
    rig.executor.execute(Offer(_A, _X, _PROMPT, blocks(1, 2)))
    rig.executor.execute(BeginSend(_A, TransferId("y"), _PROMPT))
    rig.executor.execute(AdvanceSend(_A, TransferId("y"), blocks(7), 4))
    answer = rig.executor.execute(Forget())
    assert sorted(answer.returned) == [1, 2, 4, 7]
    assert rig.pins.acquire_cached([block_hash]) == []
    assert ("withdraw", "y") in rig.exchange.calls
    assert rig.pins.take_returned() == []
    rig.executor.execute(LetGo((block_hash,)))


def test_a_rank_asks_the_peers_worker_of_the_same_rank() -> None:
    rig = ExecutorRig(rank=2)
    rig.executor.execute(_BEGIN)
    rig.executor.execute(Contact(PEER))
    wanted = HistoryRequest((BlockHash(b"h" * 32),), blocks(1), (1, 2, 3, 4), 4, 1)
    rig.executor.execute(FillHistory(RequestId("b"), PEER, wanted))
    assert rig.exchange.peers == [PEER.of_rank(2)] * 3
