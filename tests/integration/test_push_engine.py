"""Pushes between two engines in one process: tokens are a plain engine's, pools end whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from kvferry.engine.request import FinishReason
from kvferry.protocol.ids import TransferId
from kvferry.protocol.params import KvTransferParams, Mode, OnFailure, Role
from tests.integration.push_rig import (
    CHUNK_TOKENS,
    Side,
    random_prompt,
    report_of,
    sides,
    wait_until,
    wait_whole,
)
from tests.support.tiny_model import make_tiny_model
from tests.unit.engine.rig import Answer

NUM_TOKENS = 8
Pair = tuple[Side, Side]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def both(folder: Path) -> Iterator[Pair]:
    with sides(folder, {}, {}) as (prefill, decode):
        yield prefill, decode


@pytest.fixture
def pair(both: Pair) -> Iterator[Pair]:
    """Two idle sides with empty caches; they must be idle again in the end."""
    for side in both:
        side.forget()
    yield both
    for side in both:
        side.gate.allow(float("inf"))
    wait_whole(*both)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[Side]:
    with sides(folder, {"prefix_caching": False}) as (side,):
        yield side


def expected(plain: Side, prompt: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
    return plain.submit(prompt, max_tokens=num_tokens).wait().tokens


@pytest.mark.parametrize("when", ["before", "middle", "after"])
@pytest.mark.parametrize("length", [96, 100, 113, 257])
def test_registered_at_any_time(pair: Pair, plain: Side, when: str, length: int) -> None:
    prefill, decode = pair
    prompt, name = random_prompt(length, length), f"{when}-{length}"
    if when == "before":
        answer = decode.take_from(prefill, prompt, name, max_tokens=NUM_TOKENS)
        wait_until(lambda: prefill.exchange.port.snapshot().num_handoffs_held == 1)
        sent = prefill.send(prompt, name)
    elif when == "middle":
        prefill.gate.allow(2)
        sent = prefill.send(prompt, name)
        prefill.gate.wait_used_up()
        answer = decode.take_from(prefill, prompt, name, max_tokens=NUM_TOKENS)
        decode.wait_written()
        assert not sent.is_finished
        assert answer.tokens == []
        prefill.gate.allow(float("inf"))
    else:
        sent = prefill.send(prompt, name).wait()
        answer = decode.take_from(prefill, prompt, name, max_tokens=NUM_TOKENS)
    assert answer.wait().tokens == expected(plain, prompt)
    assert sent.wait().tokens == answer.tokens[:1]
    report = report_of(answer)
    assert (report.receive_outcome, report.transport) == ("received", "shm")
    assert (report.num_received_tokens, report.num_computed_prompt_tokens) == (length, 0)
    assert report.num_received_bytes == -(-length // 16) * decode.block_bytes
    assert report.prefill_end_s == report_of(sent).prefill_end_s
    assert report.first_token_s is not None
    assert report.kv_ready_s is not None


def test_a_drawn_seed_travels_with_the_first_token(pair: Pair, plain: Side) -> None:
    prefill, decode = pair
    prompt = random_prompt(100, 1)
    options: dict[str, Any] = {"temperature": 1.0, "max_tokens": NUM_TOKENS, "logprobs": 2}
    answer = decode.take_from(prefill, prompt, "seeded", **options)
    handoff = prefill.send(prompt, "seeded", **options).wait().outputs[-1].handoff
    assert handoff is not None
    assert handoff.first_token is not None
    assert answer.wait().outputs[0].logprob == handoff.first_token.logprob is not None
    seed = handoff.first_token.seed
    assert answer.tokens == plain.submit(prompt, seed=seed, **options).wait().tokens


def test_a_handed_over_token_and_a_push_together(pair: Pair, plain: Side) -> None:
    prefill, decode = pair
    prompt = random_prompt(100, 2)
    handoff = prefill.send(prompt, "retry").wait().outputs[-1].handoff
    assert handoff is not None
    answer = decode.submit(prompt, handoff, max_tokens=NUM_TOKENS)
    assert answer.tokens, "answered before submit returns"
    assert answer.wait().tokens == expected(plain, prompt)
    assert report_of(answer).receive_outcome == "received"


def test_only_what_decode_lacks_is_written(pair: Pair, plain: Side) -> None:
    prefill, decode = pair
    prompt = random_prompt(200, 3)
    decode.submit(prompt[:70], max_tokens=1).wait()
    answer = decode.take_from(prefill, prompt, "suffix", max_tokens=NUM_TOKENS)
    prefill.send(prompt, "suffix")
    assert answer.wait().tokens == expected(plain, prompt)
    report = report_of(answer)
    assert (report.num_cached_tokens, report.num_received_tokens) == (64, 136)
    assert report.num_received_bytes == 9 * decode.block_bytes


def test_prefill_stops_where_decode_has_everything(pair: Pair, plain: Side) -> None:
    prefill, decode = pair
    prompt = random_prompt(200, 4)
    decode.submit(prompt, max_tokens=1).wait()
    prefill.gate.allow(1)
    sent = prefill.send(prompt, "full")
    prefill.gate.wait_used_up()
    answer = decode.take_from(prefill, prompt, "full", max_tokens=NUM_TOKENS)
    assert answer.wait().tokens == expected(plain, prompt)
    assert report_of(answer).receive_outcome == ""
    # The release is on its way; each step may be the one before which it arrives.
    while not sent.is_finished and prefill.gate.num_done < 10_000:
        prefill.gate.allow(1)
        if report_of_progress(prefill, sent):
            break
    assert sent.wait().reason is FinishReason.NOT_NEEDED
    assert sent.outputs[-1].handoff is None


def report_of_progress(prefill: Side, sent: Answer) -> bool:
    """Wait for the step just allowed or for the end."""
    done = prefill.gate.num_done
    wait_until(lambda: sent.is_finished or prefill.gate.num_done > done)
    return sent.is_finished


@pytest.mark.parametrize("num_steps", [0, 1, 3])
@pytest.mark.parametrize("on_failure", list(OnFailure))
def test_abort_of_the_prefill(
    pair: Pair, plain: Side, num_steps: int, on_failure: OnFailure
) -> None:
    prefill, decode = pair
    prompt, name = random_prompt(130, num_steps), f"abort-p-{num_steps}-{on_failure}"
    prefill.gate.allow(num_steps)
    sent = prefill.send(prompt, name)
    prefill.gate.wait_used_up()
    answer = decode.take_from(prefill, prompt, name, on_failure=on_failure, max_tokens=NUM_TOKENS)
    if num_steps:
        decode.wait_written()
    prefill.engine.abort(sent.request_id)
    prefill.gate.allow(float("inf"))
    answer.wait()
    if sent.wait().reason is not FinishReason.ABORT:
        assert answer.tokens == expected(plain, prompt)
    elif on_failure is OnFailure.ERROR:
        assert answer.reason is FinishReason.ERROR
        assert "did not come" in (answer.outputs[-1].error or "")
    else:
        assert answer.tokens == expected(plain, prompt)
        assert report_of(answer).num_computed_prompt_tokens == 130


def test_abort_of_a_prefill_that_was_never_admitted(pair: Pair, plain: Side) -> None:
    prefill, decode = pair
    prompt = random_prompt(130, 9)
    held = prefill.pool.allocate(prefill.pool.num_free)
    sent = prefill.send(prompt, "unadmitted")
    answer = decode.take_from(prefill, prompt, "unadmitted", max_tokens=NUM_TOKENS)
    prefill.engine.abort(sent.request_id)
    assert answer.wait().tokens == expected(plain, prompt)
    assert sent.wait().reason is FinishReason.ABORT
    prefill.pool.drop(held)


@pytest.mark.parametrize("num_steps", [0, 1, 3, 5])
def test_abort_of_the_decode_leg(pair: Pair, num_steps: int) -> None:
    prefill, decode = pair
    prompt, name = random_prompt(130, num_steps), f"abort-d-{num_steps}"
    prefill.gate.allow(num_steps)
    sent = prefill.send(prompt, name)
    prefill.gate.wait_used_up()
    answer = decode.take_from(prefill, prompt, name, max_tokens=500)
    if num_steps:
        decode.wait_written()
    decode.engine.abort(answer.request_id)
    assert answer.wait().reason is FinishReason.ABORT
    prefill.gate.allow(float("inf"))
    assert sent.wait().reason in (FinishReason.NOT_NEEDED, FinishReason.LENGTH)


def test_the_prefill_is_preempted(folder: Path, plain: Side) -> None:
    slowly = {"prefill_chunk_tokens": 5, "max_num_sequences": 4}
    tiny = {"num_blocks": 14, "prefix_caching": False} | slowly
    with sides(folder, tiny, {}) as (prefill, decode):
        older_prompt, prompt = random_prompt(60, 20), random_prompt(140, 21)
        prefill.gate.allow(1)
        older = prefill.submit(older_prompt, max_tokens=60)
        prefill.gate.wait_used_up()
        answer = decode.take_from(prefill, prompt, "preempted", max_tokens=NUM_TOKENS)
        sent = prefill.send(prompt, "preempted")
        prefill.gate.allow(float("inf"))
        assert answer.wait().tokens == expected(plain, prompt)
        assert older.wait().tokens == expected(plain, older_prompt, 60)
        assert sent.wait().reason is FinishReason.LENGTH
        assert report_of(sent).num_preemptions > 0
        assert report_of(answer).receive_outcome == "received"


def test_a_receive_gives_way_to_what_runs(folder: Path, plain: Side) -> None:
    tiny = {"num_blocks": 14, "prefix_caching": False}
    with sides(folder, {}, tiny) as (prefill, decode):
        prompt, other_prompt = random_prompt(130, 30), random_prompt(60, 31)
        prefill.gate.allow(2)
        sent = prefill.send(prompt, "gives-way")
        prefill.gate.wait_used_up()
        other = decode.submit(other_prompt, max_tokens=100)
        other.wait_tokens(1)
        answer = decode.take_from(prefill, prompt, "gives-way", max_tokens=NUM_TOKENS)
        assert other.wait().tokens == expected(plain, other_prompt, 100)
        assert report_of(other).num_preemptions == 0
        prefill.gate.allow(float("inf"))
        assert answer.wait().tokens == expected(plain, prompt)
        assert sent.wait().reason in (FinishReason.NOT_NEEDED, FinishReason.LENGTH)


def test_registrations_without_a_prefill_hold_nobody_up(folder: Path, plain: Side) -> None:
    small = {"num_blocks": 40, "prefix_caching": False}
    with sides(folder, {}, small) as (prefill, decode):
        prompts = [random_prompt(130, 40 + index) for index in range(4)]
        answers = [
            decode.take_from(prefill, prompt, f"early-{index}", max_tokens=NUM_TOKENS)
            for index, prompt in enumerate(prompts)
        ]
        other = random_prompt(300, 50)
        assert decode.submit(other, max_tokens=NUM_TOKENS).wait().tokens == expected(plain, other)
        for index, prompt in reversed(list(enumerate(prompts))):
            prefill.send(prompt, f"early-{index}")
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.wait().tokens == expected(plain, prompt)
            assert report_of(answer).receive_outcome == "received"


@pytest.mark.parametrize("num_blocks", [11, 100])
def test_many_pushes_in_both_directions(folder: Path, plain: Side, num_blocks: int) -> None:
    """Pools small enough for one request and a bit, and large ones."""
    options = {"num_blocks": num_blocks, "prefix_caching": False}
    with sides(folder, options, options) as (left, right):
        prompts = [random_prompt(length, length) for length in (140, 90, 65, 128, 145, 33, 64, 110)]
        answers, sent = [], []
        for index, prompt in enumerate(prompts):
            source, target = (left, right) if index % 2 else (right, left)
            name = f"many-{index}"
            if index % 3:
                sent.append(source.send(prompt, name))
            answers.append(target.take_from(source, prompt, name, max_tokens=NUM_TOKENS))
            if index % 3 == 0:
                sent.append(source.send(prompt, name))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.wait().tokens == expected(plain, prompt)
        for answer in sent:
            assert answer.wait().reason in (FinishReason.NOT_NEEDED, FinishReason.LENGTH)


def test_a_transfer_id_is_used_once(pair: Pair) -> None:
    prefill, _ = pair
    first = prefill.send(random_prompt(20, 60), "twice").wait()
    again = prefill.send(random_prompt(20, 61), "twice").wait()
    assert (first.reason, again.reason) == (FinishReason.LENGTH, FinishReason.ERROR)
    prefill.exchange.port.withdraw(TransferId("twice"))


def test_the_handoff_names_the_mode(pair: Pair) -> None:
    prefill, _ = pair
    answer = prefill.send(random_prompt(CHUNK_TOKENS, 62), "named").wait()
    handoff = answer.outputs[-1].handoff
    assert isinstance(handoff, KvTransferParams)
    assert (handoff.role, handoff.mode) == (Role.DECODE, Mode.PUSH)
    assert handoff.peer == prefill.exchange.address
    prefill.exchange.port.withdraw(TransferId("named"))
