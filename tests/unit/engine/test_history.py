"""What an engine does with a hint where a conversation's KV is, and what it keeps of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvferry.connector.ports import ReceiveOutcome
from kvferry.engine.request import FinishReason
from kvferry.protocol.hashing import block_hashes, chain_root
from kvferry.protocol.ids import TransferId
from kvferry.protocol.messages import PartialBlock
from kvferry.protocol.params import KvTransferParams, Mode, Role
from kvferry.protocol.prefill_result import PrefillReport
from tests.unit.engine.rig import PEER, Answer, Rig
from tests.unit.engine.test_handoff import random_prompt, report_of

SENDING = KvTransferParams(transfer_id=TransferId("turn-2"), role=Role.PREFILL, history=PEER)
FAILURES = [outcome for outcome in ReceiveOutcome if outcome is not ReceiveOutcome.RECEIVED]


@pytest.fixture
def rig(tiny_model_dir: Path) -> Iterator[Rig]:
    with Rig(tiny_model_dir, prefill_chunk_tokens=32) as rig:
        yield rig


@pytest.fixture
def holder(tiny_model_dir: Path) -> Iterator[Rig]:
    with Rig(tiny_model_dir) as rig:
        yield rig


def converse(holder: Rig, num_prompt: int, num_new: int) -> list[int]:
    """Have ``holder`` answer a prompt; return what the next turn's prompt is."""
    prompt = random_prompt(num_prompt)
    answer = holder.submit(prompt, max_tokens=21).wait()
    return [*prompt, *answer.tokens, *random_prompt(num_new, 9)]


def first_token(holder: Rig, prompt: list[int]) -> list[int]:
    """Return what an instance samples that finds nothing of ``prompt`` anywhere."""
    return holder.submit(prompt, max_tokens=1, salt="nobody else's").wait().tokens


def bring(rig: Rig, holder: Rig, *, at_most: int = 1000) -> int:
    """Copy what ``holder`` has of what ``rig`` asked for; return how many tokens that were."""
    history_id, asked = rig.connector.wait_history()
    history_request = asked.history_request
    found = holder.pool.acquire_cached(history_request.hashes[:at_most])
    num_full = len(found)
    partials = holder.pool.acquire_partials(history_request.hashes[num_full - 1], 8)
    offered = [PartialBlock(b, c.num_tokens, c.block_hash) for c, b in partials]
    partial = history_request.fitting(num_full, offered)
    blocks = [*found, partial.block] if partial is not None else found
    for mine, theirs in zip(history_request.blocks, blocks, strict=False):
        rig.cache.blocks[mine].copy_(holder.cache.blocks[theirs])
    holder.pool.drop([*found, *(block for _, block in partials)])
    num_partial = partial.num_tokens if partial is not None else 0
    rig.connector.finish_history(history_id, ReceiveOutcome.RECEIVED, len(blocks), num_partial)
    return 16 * num_full + num_partial


def prefill_of(answer: Answer) -> PrefillReport:
    prefill = report_of(answer).prefill
    assert prefill is not None
    return prefill


@pytest.mark.parametrize("mode", list(Mode))
def test_what_the_holder_has_is_read_and_the_rest_computed(
    rig: Rig, holder: Rig, mode: Mode
) -> None:
    prompt = converse(holder, 150, 30)
    right = first_token(holder, prompt)
    answer = rig.submit(prompt, transfer=msgspec.structs.replace(SENDING, mode=mode))
    num_tokens = bring(rig, holder)
    assert num_tokens == 150 + 21 - 1  # the answer's last token has no KV
    assert answer.wait().tokens == right
    assert rig.connector.contacted == [PEER]
    report = prefill_of(answer)
    assert report.num_read_back_tokens == 170
    assert report.num_computed_tokens == len(prompt) - 170
    assert (report.read_back_outcome, report.read_back_s) == ("received", 0.5)
    assert report.compute_s > 0
    handoff = answer.outputs[-1].handoff
    assert handoff is not None
    assert handoff.prefill_report == report, "decode's usage counts by it, whoever asks for more"


def test_a_history_is_read_beyond_what_is_cached_here(rig: Rig, holder: Rig) -> None:
    prompt = converse(holder, 150, 30)
    rig.submit(prompt[:40], max_tokens=1).wait()
    answer = rig.submit(prompt, transfer=SENDING)
    _, asked = rig.connector.wait_history()
    assert len(asked.history_request.hashes) == (len(prompt) - 1) // 16 - 2
    bring(rig, holder)
    assert answer.wait().tokens == first_token(holder, prompt)
    report = prefill_of(answer)
    assert (report.num_cached_tokens, report.num_read_back_tokens) == (32, 138)


def test_part_of_a_history_is_as_good_as_it_goes(rig: Rig, holder: Rig) -> None:
    prompt = converse(holder, 150, 30)
    answer = rig.submit(prompt, transfer=SENDING)
    assert bring(rig, holder, at_most=5) == 80
    assert answer.wait().tokens == first_token(holder, prompt)
    assert prefill_of(answer).num_computed_tokens == len(prompt) - 80


def test_what_was_read_is_cached_from_then_on(rig: Rig, holder: Rig) -> None:
    prompt = converse(holder, 150, 30)
    first = rig.submit(prompt, transfer=SENDING)
    bring(rig, holder)
    first.wait()
    again = msgspec.structs.replace(SENDING, transfer_id=TransferId("turn-2-again"))
    second = rig.submit(prompt, transfer=again).wait()
    assert len(rig.connector.histories) == 1, "nothing is worth asking for"
    assert second.tokens == first.tokens
    assert prefill_of(second).num_cached_tokens == (len(prompt) - 1) // 16 * 16


@pytest.mark.parametrize("outcome", FAILURES)
def test_any_failure_is_a_recompute(rig: Rig, holder: Rig, outcome: ReceiveOutcome) -> None:
    prompt = converse(holder, 150, 30)
    answer = rig.submit(prompt, transfer=SENDING)
    history_id, asked = rig.connector.wait_history()
    rig.pool.hold(asked.history_request.blocks)  # as if a READ might still land in them
    rig.connector.finish_history(history_id, outcome)
    assert answer.wait().tokens == first_token(holder, prompt)
    assert set(answer_blocks(rig)).isdisjoint(asked.history_request.blocks)
    rig.pool.drop(asked.history_request.blocks)
    report = prefill_of(answer)
    assert (report.read_back_outcome, report.num_computed_tokens) == (outcome.value, len(prompt))
    assert rig.connector.ended == [history_id]


def answer_blocks(rig: Rig) -> tuple[int, ...]:
    return rig.connector.offers[SENDING.transfer_id]


# The last token is always computed, so a prompt of n tokens has (n - 1) // 16 blocks to read.
@pytest.mark.parametrize(("num_tokens", "asks"), [(63, False), (64, False), (65, True)])
def test_below_the_threshold_nobody_is_asked(rig: Rig, num_tokens: int, asks: bool) -> None:
    answer = rig.submit(random_prompt(num_tokens), transfer=SENDING)
    if asks:
        history_id, asked = rig.connector.wait_history()
        assert asked.history_request.min_blocks == 4
        rig.connector.finish_history(history_id, ReceiveOutcome.GONE)
    answer.wait()
    assert len(rig.connector.histories) == asks


def test_a_hint_that_is_not_allowed_is_ignored(rig: Rig) -> None:
    rig.connector.refuses_contact = True
    answer = rig.submit(random_prompt(100), transfer=SENDING).wait()
    assert answer.reason is FinishReason.LENGTH
    assert rig.connector.histories == {}


def test_others_go_on_while_a_history_is_read(rig: Rig, holder: Rig) -> None:
    prompt = converse(holder, 150, 30)
    answer = rig.submit(prompt, transfer=SENDING)
    rig.connector.wait_history()
    other = rig.submit(random_prompt(40, 3), max_tokens=5).wait()
    assert len(other.tokens) == 5
    assert not answer.is_finished
    bring(rig, holder)
    answer.wait()


def test_an_abort_in_mid_read_tells_the_connector(rig: Rig) -> None:
    answer = rig.submit(random_prompt(100), transfer=SENDING)
    history_id, _ = rig.connector.wait_history()
    rig.engine.abort(answer.request_id)
    assert answer.wait().reason is FinishReason.ABORT
    assert rig.connector.ended == [history_id]
    rig.connector.finish_history(history_id, ReceiveOutcome.RECEIVED, 6)  # too late to matter


PUSHING = msgspec.structs.replace(SENDING, mode=Mode.PUSH)


def test_a_push_that_is_not_needed_reads_no_history(rig: Rig) -> None:
    rig.connector.unwanted.add(PUSHING.transfer_id)
    answer = rig.submit(random_prompt(100), transfer=PUSHING)
    assert answer.wait().reason is FinishReason.NOT_NEEDED
    assert rig.connector.histories == {}


def test_a_push_that_is_needed_no_more_ends_its_read(rig: Rig) -> None:
    answer = rig.submit(random_prompt(100), transfer=PUSHING)
    history_id, asked = rig.connector.wait_history()
    rig.connector.unwanted.add(PUSHING.transfer_id)
    rig.engine.wake()
    assert answer.wait().reason is FinishReason.NOT_NEEDED
    assert rig.connector.ended == [history_id]
    rig.pool.drop(asked.history_request.blocks)  # the connector's


# -- retention --------------------------------------------------------------------------------


def hashes_of(rig: Rig, tokens: list[int]) -> list[bytes]:
    root = chain_root(rig.engine.model.layout(16).fingerprint())
    return list(block_hashes(root, tokens, 16))


def test_prompt_and_answer_are_retained_where_they_were_generated(rig: Rig) -> None:
    prompt = random_prompt(50)
    rig.submit(prompt, max_tokens=31).wait()
    assert rig.engine.retention.num_blocks == -(-(50 + 31 - 1) // 16)


def test_an_answer_that_was_cut_off_is_retained_as_far_as_it_goes(rig: Rig) -> None:
    answer = rig.submit(random_prompt(50), max_tokens=400)
    answer.wait_tokens(20)
    rig.engine.abort(answer.request_id)
    num_tokens = 50 + len(answer.wait().tokens)
    assert rig.engine.retention.num_blocks == -(-(num_tokens - 1) // 16)


def test_a_prefill_retains_nothing(rig: Rig) -> None:
    transfer = msgspec.structs.replace(SENDING, history=None)
    rig.submit(random_prompt(50), transfer=transfer).wait()
    assert rig.engine.retention.num_blocks == 0


def test_the_client_may_end_its_conversation(rig: Rig) -> None:
    rig.submit(random_prompt(50), max_tokens=5).wait()
    assert rig.engine.retention.num_blocks == 4
    last = KvTransferParams(
        transfer_id=TransferId("turn-3"), role=Role.DECODE, peer=PEER, retention_s=0.0
    )
    rig.submit([*random_prompt(50), 5, 6, 7], transfer=last, max_tokens=5).wait()
    assert rig.engine.retention.num_blocks == 0


def test_retained_blocks_outlive_others(tiny_model_dir: Path) -> None:
    with Rig(tiny_model_dir, num_blocks=20) as rig:
        prompt = random_prompt(100)
        answer = rig.submit(prompt, max_tokens=5).wait()
        assert rig.engine.retention.num_blocks == 7
        for seed in range(5, 10):
            sending = KvTransferParams(transfer_id=TransferId(f"other-{seed}"), role=Role.PREFILL)
            rig.submit(random_prompt(200, seed), transfer=sending).wait()
            rig.connector.withdraw(sending.transfer_id)
        again = rig.submit([*prompt, *answer.tokens], max_tokens=1).wait()
        assert report_of(again).num_cached_tokens == 96


def test_a_reset_forgets_what_was_retained(rig: Rig) -> None:
    rig.submit(random_prompt(50), max_tokens=5).wait()
    rig.engine.reset_prefix_cache()
    assert rig.engine.retention.num_blocks == 0
    again = rig.submit(random_prompt(50), max_tokens=1).wait()
    assert report_of(again).num_cached_tokens == 0
