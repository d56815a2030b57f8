"""What an engine does in each role of a handoff, against a connector moved by hand."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.connector.ports import PromptIdentity, ReceiveOutcome
from kvferry.engine.request import FinishReason
from kvferry.errors import RequestError
from kvferry.protocol.hashing import chain_root, prompt_digest
from kvferry.protocol.ids import TransferId
from kvferry.protocol.kv_report import KvReport
from kvferry.protocol.params import FirstToken, KvTransferParams, Role, TokenLogprob
from tests.support.tiny_model import TINY_VOCABULARY_SIZE
from tests.unit.engine.rig import PEER, Answer, Rig

TRANSFER_ID = TransferId("xfer-1")
FAILURES = [outcome for outcome in ReceiveOutcome if outcome is not ReceiveOutcome.RECEIVED]


@pytest.fixture
def rig(tiny_model_dir: Path) -> Iterator[Rig]:
    with Rig(tiny_model_dir) as rig:
        yield rig


def random_prompt(length: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(3, TINY_VOCABULARY_SIZE) for _ in range(length)]


def prefill_role(transfer_id: TransferId = TRANSFER_ID) -> KvTransferParams:
    return KvTransferParams(transfer_id=transfer_id, role=Role.PREFILL)


def decode_role(
    token_id: int | None, *, seed: int = 5, transfer_id: TransferId = TRANSFER_ID
) -> KvTransferParams:
    first = None
    if token_id is not None:
        first = FirstToken(token_id, seed, TokenLogprob(-0.5, ((token_id, -0.5),)))
    return KvTransferParams(
        transfer_id=transfer_id,
        role=Role.DECODE,
        peer=PEER,
        first_token=first,
        prefill_end_s=12.5,
    )


def report_of(answer: Answer) -> KvReport:
    report = answer.outputs[-1].report
    assert report is not None
    return report


def plain_tokens(folder: Path, prompt: list[int], num_tokens: int) -> list[int]:
    with Rig(folder) as plain:
        return plain.submit(prompt, max_tokens=num_tokens).wait().tokens


# -- prefill ----------------------------------------------------------------------------------


def test_prefill_ends_after_one_token_and_offers_every_block(rig: Rig) -> None:
    prompt = random_prompt(37)
    answer = rig.submit(prompt, transfer=prefill_role(), max_tokens=50, logprobs=1).wait()
    assert (len(answer.outputs), answer.reason) == (1, FinishReason.LENGTH)
    handoff = answer.outputs[0].handoff
    assert handoff is not None
    assert (handoff.role, handoff.peer, handoff.lease_s) == (Role.DECODE, PEER, 30.0)
    assert handoff.transfer_id == TRANSFER_ID
    assert handoff.num_prompt_tokens == 37
    assert handoff.prefill_end_s == report_of(answer).prefill_end_s
    assert handoff.first_token is not None
    assert handoff.first_token.token_id == answer.tokens[0]
    assert handoff.first_token.logprob == answer.outputs[0].logprob is not None
    assert len(rig.connector.offers[TRANSFER_ID]) == 3
    root = chain_root(rig.engine.model.layout(16).fingerprint())
    expected = PromptIdentity(37, prompt_digest(root, prompt))
    assert rig.connector.identities[TRANSFER_ID] == expected
    assert rig.pool.num_free == rig.pool.num_blocks - 3, "held by the offer alone"
    rig.connector.withdraw(TRANSFER_ID)
    assert rig.pool.num_free == rig.pool.num_blocks


def test_prefill_draws_a_seed_or_passes_the_clients_on(rig: Rig) -> None:
    drawn, given = (
        rig.submit([9, 8, 7], transfer=prefill_role(TransferId(name)), temperature=1.0, seed=seed)
        .wait()
        .outputs[0]
        .handoff
        for name, seed in (("a", None), ("b", 11))
    )
    assert drawn is not None
    assert drawn.first_token is not None
    assert given is not None
    assert given.first_token is not None
    assert given.first_token.seed == 11
    assert 0 <= drawn.first_token.seed < 2**53


def test_prefill_says_stop_when_the_first_token_stops(rig: Rig) -> None:
    prompt = random_prompt(20)
    first = rig.submit(prompt, max_tokens=1).wait().tokens[0]
    answer = rig.submit(prompt, transfer=prefill_role(), stop_token_ids=(first,)).wait()
    assert answer.reason is FinishReason.STOP
    assert answer.outputs[0].handoff is not None


def test_prefill_with_an_id_in_use_is_an_error_and_leaks_nothing(rig: Rig) -> None:
    rig.submit(random_prompt(20), transfer=prefill_role()).wait()
    answer = rig.submit(random_prompt(40, 1), transfer=prefill_role()).wait()
    assert answer.reason is FinishReason.ERROR
    assert "in use" in (answer.outputs[-1].error or "")
    assert rig.pool.num_free == rig.pool.num_blocks - 2


def test_an_offer_gives_way_to_a_request_that_lacks_blocks(tiny_model_dir: Path) -> None:
    with Rig(tiny_model_dir, num_blocks=6, prefix_caching=False) as rig:
        rig.submit(random_prompt(70), transfer=prefill_role()).wait()
        assert rig.pool.num_free == 1
        answer = rig.submit(random_prompt(60, 1), max_tokens=3).wait()
        assert answer.reason is FinishReason.LENGTH
        assert rig.connector.offers == {}


# -- decode -----------------------------------------------------------------------------------


def test_the_first_token_is_answered_before_submit_returns(rig: Rig) -> None:
    answer = rig.submit(random_prompt(100), transfer=decode_role(42), max_tokens=5)
    assert answer.tokens[:1] == [42]
    assert answer.outputs[0].logprob == TokenLogprob(-0.5, ((42, -0.5),))
    rig.connector.finish_receive(TRANSFER_ID, ReceiveOutcome.RECEIVED)
    assert len(answer.wait().tokens) == 5


def test_received_blocks_continue_the_answer(tiny_model_dir: Path, rig: Rig) -> None:
    prompt = random_prompt(100)
    expected = plain_tokens(tiny_model_dir, prompt, 6)
    with Rig(tiny_model_dir) as prefill:
        handoff = prefill.submit(prompt, transfer=prefill_role()).wait().outputs[0].handoff
        answer = rig.submit(prompt, transfer=handoff, max_tokens=6)
        num_bytes = rig.copy_blocks(prefill, TRANSFER_ID)
        rig.connector.finish_receive(TRANSFER_ID, ReceiveOutcome.RECEIVED, num_bytes)
        assert answer.wait().tokens == expected
        report = report_of(answer)
        assert (report.num_received_tokens, report.num_computed_prompt_tokens) == (100, 0)
        assert (report.num_received_bytes, report.transport) == (num_bytes, "fake")
        assert report.receive_outcome == "received"
        assert handoff is not None
        assert report.prefill_end_s == handoff.prefill_end_s
        assert report.kv_ready_s is not None
        assert rig.connector.ended == [TRANSFER_ID]
        # What was received serves the next turn.
        again = rig.submit([*prompt, *expected], max_tokens=1).wait()
        assert report_of(again).num_cached_tokens == 96


def test_without_a_first_token_only_the_last_prompt_token_is_computed(
    tiny_model_dir: Path, rig: Rig
) -> None:
    for length in (96, 100):
        prompt = random_prompt(length, length)
        transfer_id = TransferId(f"bare-{length}")
        with Rig(tiny_model_dir) as prefill:
            prefill.submit(prompt, transfer=prefill_role(transfer_id)).wait()
            role = decode_role(None, transfer_id=transfer_id)
            answer = rig.submit(prompt, transfer=role, max_tokens=4)
            rig.copy_blocks(prefill, transfer_id)
            rig.connector.finish_receive(transfer_id, ReceiveOutcome.RECEIVED)
            assert answer.wait().tokens == plain_tokens(tiny_model_dir, prompt, 4)
            assert report_of(answer).num_computed_prompt_tokens == 1


@pytest.mark.parametrize("outcome", FAILURES)
def test_a_failed_receive_recomputes_with_the_first_token_kept(
    rig: Rig, outcome: ReceiveOutcome
) -> None:
    prompt = random_prompt(100)
    answer = rig.submit(prompt, transfer=decode_role(42), max_tokens=4)
    receive = rig.connector.wait_receive(TRANSFER_ID)
    rig.pool.hold(receive.blocks)  # quarantined: a transfer may still touch them
    for block in receive.blocks:
        rig.cache.blocks[block].fill_(float("nan"))
    rig.connector.finish_receive(TRANSFER_ID, outcome)
    tokens = answer.wait().tokens
    rig.pool.drop(receive.blocks)
    assert tokens[0] == 42
    assert tokens[1:] == rig.submit([*prompt, 42], max_tokens=3).wait().tokens
    report = report_of(answer)
    assert report.receive_outcome == outcome.value
    assert (report.num_received_tokens, report.num_computed_prompt_tokens) == (0, 100)


def test_less_than_the_threshold_is_computed_and_the_peer_told(rig: Rig) -> None:
    answer = rig.submit(random_prompt(63), transfer=decode_role(42), max_tokens=2).wait()
    assert rig.connector.receives == {}
    assert rig.connector.ended[0] == TRANSFER_ID
    assert report_of(answer).num_computed_prompt_tokens == 63


def test_a_first_token_that_ends_the_answer_frees_the_peer(rig: Rig) -> None:
    ends: tuple[dict[str, Any], ...] = ({"max_tokens": 1}, {"stop_token_ids": (42,)})
    for index, options in enumerate(ends):
        transfer_id = TransferId(f"short-{index}")
        role = decode_role(42, transfer_id=transfer_id)
        answer = rig.submit(random_prompt(100), transfer=role, **options)
        assert answer.is_finished
        assert report_of(answer).num_prompt_tokens == 100
        assert transfer_id in rig.connector.begun
        assert rig.connector.ended[-1] == transfer_id
    assert answer.reason is FinishReason.STOP
    assert answer.outputs[-1].stop_token_id == 42


def test_others_run_while_one_receives(rig: Rig) -> None:
    answer = rig.submit(random_prompt(100), transfer=decode_role(42), max_tokens=4)
    rig.connector.wait_receive(TRANSFER_ID)
    assert len(rig.submit(random_prompt(50, 2), max_tokens=8).wait().tokens) == 8
    assert rig.engine.snapshot().num_receiving == 1
    assert answer.tokens == [42]
    rig.connector.finish_receive(TRANSFER_ID, ReceiveOutcome.GONE)
    answer.wait()


def test_abort_while_receiving(rig: Rig) -> None:
    answer = rig.submit(random_prompt(100), transfer=decode_role(42), max_tokens=4)
    receive = rig.connector.wait_receive(TRANSFER_ID)
    rig.engine.abort(answer.request_id)
    assert answer.wait().reason is FinishReason.ABORT
    assert rig.connector.ended == [TRANSFER_ID]
    assert rig.pool.num_references(receive.blocks[0]) == 1, "the connector's own"
    rig.connector.finish_receive(TRANSFER_ID, ReceiveOutcome.RECEIVED)  # comes too late
    rig.submit([9], max_tokens=1).wait()


def test_a_momentarily_full_pool_waits(tiny_model_dir: Path) -> None:
    with Rig(tiny_model_dir, num_blocks=8) as rig:
        held = rig.pool.allocate(4)
        answer = rig.submit(random_prompt(100), transfer=decode_role(42), max_tokens=3)
        assert answer.tokens == [42], "the first token does not wait"
        rig.pool.drop(held)
        rig.connector.finish_receive(TRANSFER_ID, ReceiveOutcome.GONE)
        assert len(answer.wait().tokens) == 3


def test_a_receive_that_ended_before_it_had_blocks_is_a_recompute(
    tiny_model_dir: Path, rig: Rig
) -> None:
    """Whoever ended it: the engine goes on, for this request and for others."""
    prompt = random_prompt(100)
    expected = plain_tokens(tiny_model_dir, prompt, 4)
    rig.connector.broken.add(TRANSFER_ID)
    answer = rig.submit(prompt, transfer=decode_role(expected[0]), max_tokens=4).wait()
    assert answer.tokens == expected
    assert report_of(answer).receive_outcome == "failed"
    assert TRANSFER_ID in rig.connector.ended
    assert rig.submit(prompt, max_tokens=4).wait().tokens == expected


def test_preemption_after_a_receive_keeps_the_tokens(tiny_model_dir: Path) -> None:
    prompt = random_prompt(100)
    other_prompt = random_prompt(60, 3)
    expected = plain_tokens(tiny_model_dir, prompt, 40)
    with (
        Rig(tiny_model_dir) as prefill,
        Rig(tiny_model_dir, num_blocks=14, prefix_caching=False) as rig,
    ):
        handoff = prefill.submit(prompt, transfer=prefill_role()).wait().outputs[0].handoff
        may_go_on = threading.Event()
        older = rig.submit(other_prompt, max_tokens=100, may_go_on=may_go_on)
        older.wait_tokens(1)
        answer = rig.submit(prompt, transfer=handoff, max_tokens=40)
        may_go_on.set()
        rig.copy_blocks(prefill, TRANSFER_ID)
        rig.connector.finish_receive(TRANSFER_ID, ReceiveOutcome.RECEIVED)
        assert answer.wait().tokens == expected
        assert len(older.wait().tokens) == 100
        assert report_of(answer).num_preemptions > 0


def test_a_transfer_id_in_use_is_refused_before_any_token(rig: Rig) -> None:
    first = rig.submit(random_prompt(100), transfer=decode_role(42), max_tokens=2)
    refused = Answer(first.request_id)
    with pytest.raises(RequestError, match="in use"):
        rig.submit(random_prompt(100), transfer=decode_role(42), max_tokens=2)
    assert refused.outputs == []
    rig.connector.finish_receive(TRANSFER_ID, ReceiveOutcome.GONE)
    first.wait()


def test_a_first_token_outside_of_the_vocabulary_is_refused(rig: Rig) -> None:
    with pytest.raises(RequestError, match="not in the vocabulary"):
        rig.submit(random_prompt(100), transfer=decode_role(TINY_VOCABULARY_SIZE))
    assert rig.connector.ended == [TRANSFER_ID]
    assert rig.engine.snapshot().num_waiting == 0
