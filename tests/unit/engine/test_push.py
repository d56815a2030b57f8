"""What an engine does in each role of a push, against a connector moved by hand."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.connector.ports import ReceiveOutcome
from kvferry.engine.request import FinishReason
from kvferry.engine.threshold import RecomputeThreshold
from kvferry.protocol.ids import TransferId
from kvferry.protocol.params import KvTransferParams, Mode, OnFailure, Role, TokenLogprob
from tests.support.tiny_model import TINY_VOCABULARY_SIZE
from tests.unit.engine.rig import PEER, Rig
from tests.unit.engine.test_handoff import plain_tokens, random_prompt, report_of

TRANSFER_ID = TransferId("push-1")
FAILURES = [outcome for outcome in ReceiveOutcome if outcome is not ReceiveOutcome.RECEIVED]
SENDING = KvTransferParams(transfer_id=TRANSFER_ID, role=Role.PREFILL, mode=Mode.PUSH)
RECEIVING = KvTransferParams(transfer_id=TRANSFER_ID, role=Role.DECODE, mode=Mode.PUSH, peer=PEER)
STRICT = KvTransferParams(
    transfer_id=TRANSFER_ID,
    role=Role.DECODE,
    mode=Mode.PUSH,
    peer=PEER,
    on_failure=OnFailure.ERROR,
)


@pytest.fixture
def rig(tiny_model_dir: Path) -> Iterator[Rig]:
    with Rig(tiny_model_dir, prefill_chunk_tokens=32) as rig:
        yield rig


# -- prefill ----------------------------------------------------------------------------------


def test_prefill_tells_of_every_chunk(rig: Rig) -> None:
    answer = rig.submit(random_prompt(75), transfer=SENDING, logprobs=1).wait()
    assert rig.connector.sends[TRANSFER_ID] == [
        ("begin", 0),
        ("advance", 32),
        ("advance", 64),
        ("complete", answer.tokens[0]),  # the last chunk's positions come with it
    ]
    handoff = answer.outputs[0].handoff
    assert handoff is not None
    assert (handoff.role, handoff.mode, handoff.peer) == (Role.DECODE, Mode.PUSH, PEER)
    assert handoff.first_token is not None
    assert handoff.first_token.token_id == answer.tokens[0]
    assert handoff.prefill_end_s == report_of(answer).prefill_end_s


def test_a_preempted_prefill_is_begun_once(tiny_model_dir: Path) -> None:
    slowly: dict[str, Any] = {"prefill_chunk_tokens": 4, "max_num_sequences": 4}
    with Rig(tiny_model_dir, num_blocks=12, prefix_caching=False, **slowly) as rig:
        may_go_on = threading.Event()
        older = rig.submit(random_prompt(60, 1), max_tokens=80, may_go_on=may_go_on)
        older.wait_tokens(1)
        answer = rig.submit(random_prompt(110), transfer=SENDING)
        may_go_on.set()
        answer.wait()
        older.wait()
        said = rig.connector.sends[TRANSFER_ID]
        assert report_of(answer).num_preemptions > 0
        assert [name for name, _ in said].count("begin") == 1
        counts = [count for name, count in said if name == "advance"]
        assert counts != sorted(counts), "fewer again after the preemption"
        assert [name for name, _ in said].count("pause") == report_of(answer).num_preemptions
        assert said[-2:] == [("advance", 108), ("complete", answer.tokens[0])]


def test_an_aborted_prefill_is_withdrawn_even_before_it_was_admitted(rig: Rig) -> None:
    held = rig.pool.allocate(rig.pool.num_free)
    answer = rig.submit(random_prompt(75), transfer=SENDING)
    rig.engine.abort(answer.request_id)
    assert answer.wait().reason is FinishReason.ABORT
    assert rig.connector.sends[TRANSFER_ID] == [("begin", 0), ("withdraw", 0)]
    rig.pool.drop(held)


def test_a_prefill_that_is_not_needed_ends_early(tiny_model_dir: Path) -> None:
    with Rig(tiny_model_dir, num_blocks=200, prefill_chunk_tokens=16) as rig:
        answer = rig.submit(random_prompt(3000), transfer=SENDING)
        with rig.connector.changed:
            assert rig.connector.changed.wait_for(lambda: TRANSFER_ID in rig.connector.sends, 20)
        rig.connector.stop(TRANSFER_ID)
        assert answer.wait().reason is FinishReason.NOT_NEEDED
        assert (answer.tokens, answer.outputs[-1].handoff) == ([], None)
        rig.connector.stop(TRANSFER_ID)  # repeated after its end
        rig.submit([9], max_tokens=1).wait()


def test_an_id_in_use_leaves_the_others_push_alone(rig: Rig) -> None:
    rig.submit(random_prompt(75), transfer=SENDING).wait()
    answer = rig.submit(random_prompt(75, 1), transfer=SENDING).wait()
    assert answer.reason is FinishReason.ERROR
    assert ("withdraw", 0) not in rig.connector.sends[TRANSFER_ID]


# -- decode -----------------------------------------------------------------------------------


def test_the_first_token_is_answered_before_the_kv_is_there(tiny_model_dir: Path, rig: Rig) -> None:
    prompt = random_prompt(100)
    expected = plain_tokens(tiny_model_dir, prompt, 6)
    with Rig(tiny_model_dir) as prefill:
        prefill.submit(prompt, transfer=SENDING).wait()
        answer = rig.submit(prompt, transfer=RECEIVING, max_tokens=6)
        assert rig.connector.modes[TRANSFER_ID] is Mode.PUSH
        rig.connector.wait_receive(TRANSFER_ID)
        assert answer.tokens == []
        rig.connector.tell_first_token(TRANSFER_ID, expected[0], seed=11)
        answer.wait_tokens(1)
        assert answer.outputs[0].logprob == TokenLogprob(-0.5, ((expected[0], -0.5),))
        rig.connector.tell_first_token(TRANSFER_ID, 3)  # told again by another notice
        num_bytes = rig.copy_blocks(prefill, TRANSFER_ID)
        rig.connector.finish_receive(TRANSFER_ID, ReceiveOutcome.RECEIVED, num_bytes)
        assert answer.wait().tokens == expected
    report = report_of(answer)
    assert (report.num_received_tokens, report.num_computed_prompt_tokens) == (100, 0)
    assert (report.num_received_bytes, report.transport) == (num_bytes, "fake")
    assert (report.receive_outcome, report.prefill_end_s) == ("received", 12.5)


@pytest.mark.parametrize("has_blocks", [False, True])
@pytest.mark.parametrize("outcome", FAILURES)
def test_a_failure_keeps_the_first_token(
    rig: Rig, outcome: ReceiveOutcome, has_blocks: bool
) -> None:
    prompt = random_prompt(100)
    if not has_blocks:
        rig.connector.refused.add(TRANSFER_ID)
    answer = rig.submit(prompt, transfer=STRICT, max_tokens=4)
    rig.connector.tell_first_token(TRANSFER_ID, 42)
    answer.wait_tokens(1)
    if has_blocks:
        rig.connector.finish_receive(TRANSFER_ID, outcome)
    else:
        rig.connector.fail(TRANSFER_ID, outcome)
    assert answer.wait().tokens[0] == 42
    assert answer.tokens[1:] == rig.submit([*prompt, 42], max_tokens=3).wait().tokens
    assert report_of(answer).receive_outcome == outcome.value


@pytest.mark.parametrize("has_blocks", [False, True])
@pytest.mark.parametrize("transfer", [RECEIVING, STRICT])
def test_a_failure_before_the_first_token(
    tiny_model_dir: Path, rig: Rig, transfer: KvTransferParams, has_blocks: bool
) -> None:
    prompt = random_prompt(100)
    if not has_blocks:
        rig.connector.refused.add(TRANSFER_ID)
    answer = rig.submit(prompt, transfer=transfer, max_tokens=4)
    if has_blocks:
        rig.connector.finish_receive(TRANSFER_ID, ReceiveOutcome.GONE)
    else:
        rig.connector.fail(TRANSFER_ID, ReceiveOutcome.GONE)
    answer.wait()
    if transfer is STRICT:
        assert (answer.reason, answer.tokens) == (FinishReason.ERROR, [])
        assert "did not come (gone" in (answer.outputs[-1].error or "")
    else:
        assert answer.tokens == plain_tokens(tiny_model_dir, prompt, 4)


def test_a_failure_in_the_moment_of_registration(tiny_model_dir: Path, rig: Rig) -> None:
    prompt = random_prompt(100)
    rig.connector.broken.add(TRANSFER_ID)
    answer = rig.submit(prompt, transfer=RECEIVING, max_tokens=4)
    rig.connector.fail(TRANSFER_ID, ReceiveOutcome.UNREACHABLE)
    assert answer.wait().tokens == plain_tokens(tiny_model_dir, prompt, 4)


def test_what_comes_before_the_engine_knows_of_the_request_is_kept(
    tiny_model_dir: Path, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random_prompt(100)
    begin_receive = rig.connector.begin_receive

    def begin_and_hear_at_once(*args: Any, mode: Mode) -> None:  # noqa: ANN401 - passed on
        begin_receive(*args, mode=mode)
        rig.connector.tell_first_token(TRANSFER_ID, 42, seed=3)
        rig.connector.fail(TRANSFER_ID, ReceiveOutcome.GONE)

    monkeypatch.setattr(rig.connector, "begin_receive", begin_and_hear_at_once)
    answer = rig.submit(prompt, transfer=RECEIVING, max_tokens=4).wait()
    assert answer.tokens[0] == 42
    assert answer.tokens[1:] == plain_tokens(tiny_model_dir, [*prompt, 42], 3)


def test_who_may_not_have_blocks_yet_holds_nobody_up(rig: Rig) -> None:
    rig.connector.refused.add(TRANSFER_ID)
    answer = rig.submit(random_prompt(100), transfer=RECEIVING, max_tokens=2)
    assert rig.submit(random_prompt(50, 2), max_tokens=3).wait().reason is FinishReason.LENGTH
    assert TRANSFER_ID not in rig.connector.receives
    assert rig.engine.snapshot().num_waiting == 1
    rig.connector.refused.clear()
    rig.engine.wake()
    rig.connector.tell_first_token(TRANSFER_ID, 42)
    rig.connector.finish_receive(TRANSFER_ID, ReceiveOutcome.RECEIVED)
    assert answer.wait().tokens[0] == 42


@pytest.mark.parametrize("length", [63, 100])
def test_what_is_nearly_there_is_computed(tiny_model_dir: Path, rig: Rig, length: int) -> None:
    prompt = random_prompt(length)
    if length == 100:
        rig.submit(prompt[:70], max_tokens=1).wait()
    answer = rig.submit(prompt, transfer=RECEIVING, max_tokens=4).wait()
    assert rig.connector.receives == {}
    assert rig.connector.ended[0] == TRANSFER_ID
    assert answer.tokens == plain_tokens(tiny_model_dir, prompt, 4)


def test_a_first_token_that_ends_the_answer(rig: Rig) -> None:
    either: tuple[dict[str, Any], ...] = ({"max_tokens": 1}, {"stop_token_ids": (42,)})
    for number, options in enumerate(either):
        transfer_id = TransferId(f"short-{number}")
        transfer = msgspec.structs.replace(RECEIVING, transfer_id=transfer_id)
        answer = rig.submit(random_prompt(100), transfer=transfer, **options)
        receive = rig.connector.wait_receive(transfer_id)
        rig.connector.tell_first_token(transfer_id, 42)
        assert answer.wait().tokens == [42]
        assert rig.connector.ended[-1] == transfer_id
        rig.pool.drop(receive.blocks)  # the connector's, once nothing can touch them
    assert answer.outputs[-1].stop_token_id == 42


def test_a_first_token_outside_of_the_vocabulary_is_a_failed_push(
    tiny_model_dir: Path, rig: Rig
) -> None:
    prompt = random_prompt(100)
    answer = rig.submit(prompt, transfer=RECEIVING, max_tokens=4)
    receive = rig.connector.wait_receive(TRANSFER_ID)
    rig.connector.tell_first_token(TRANSFER_ID, TINY_VOCABULARY_SIZE)
    assert answer.wait().tokens == plain_tokens(tiny_model_dir, prompt, 4)
    assert report_of(answer).receive_outcome == "mismatch"
    assert rig.connector.ended[0] == TRANSFER_ID
    rig.pool.drop(receive.blocks)


def test_blocks_are_given_back_to_what_runs(tiny_model_dir: Path) -> None:
    prompt = random_prompt(100)
    with Rig(tiny_model_dir, num_blocks=12, prefix_caching=False) as rig:
        may_go_on = threading.Event()
        older = rig.submit(random_prompt(60, 3), max_tokens=60, may_go_on=may_go_on)
        older.wait_tokens(1)
        answer = rig.submit(prompt, transfer=RECEIVING, max_tokens=3)
        may_go_on.set()
        assert len(older.wait().tokens) == 60
        assert report_of(older).num_preemptions == 0
        # Registered again, or computed here where that was not possible in time.
        if TRANSFER_ID not in rig.connector.ended:
            rig.connector.tell_first_token(TRANSFER_ID, 42)
            rig.connector.finish_receive(TRANSFER_ID, ReceiveOutcome.GONE)
        assert len(answer.wait().tokens) == 3
        assert report_of(answer).num_preemptions > 0


@pytest.mark.parametrize("mode", [Mode.PUSH, Mode.PULL])
def test_only_a_pull_tells_what_moving_costs(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> None:
    """A push lasts as long as its later chunks are computed."""
    moves: list[int] = []
    monkeypatch.setattr(
        RecomputeThreshold, "note_moved", lambda _, __, count, ___: moves.append(count)
    )
    with Rig(tiny_model_dir) as rig:
        transfer = msgspec.structs.replace(RECEIVING, mode=mode)
        answer = rig.submit(random_prompt(100), transfer=transfer, max_tokens=2)
        rig.connector.wait_receive(TRANSFER_ID)
        if mode is Mode.PUSH:
            rig.connector.tell_first_token(TRANSFER_ID, 42)
        rig.connector.finish_receive(TRANSFER_ID, ReceiveOutcome.RECEIVED)
        answer.wait()
    assert moves == ([] if mode is Mode.PUSH else [100])
