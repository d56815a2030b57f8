"""Handoffs between two real vLLM servers: the tokens are those of one plain server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.vllm.asking import (
    Client,
    Json,
    Question,
    ask_instance,
    decode_params,
    new_transfer_id,
)
from tests.vllm.conftest import Answers
from tests.vllm.serving import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
_HITS = "vllm:external_prefix_cache_hits_total"
_MIN_MOVED_TOKENS = 64


_AT_ONCE = 4
Leg = Callable[[str, Question, Json | None], Awaitable[list[int]]]


def _num_moved(answers: Answers) -> int:
    lengths = [len(question.tokens) for question, _ in answers]
    return sum(length for length in lengths if length >= _MIN_MOVED_TOKENS)


async def _wrong(
    answers: Answers, client: Client, answer: Callable[[Question, Leg], Awaitable[list[int]]]
) -> list[int]:
    """Ask all, every other one streamed; return the lengths whose tokens are not the plain ones."""
    slots = asyncio.Semaphore(_AT_ONCE)

    async def is_right(index: int) -> bool:
        question, expected = answers[index]
        ask = client.streamed_tokens if index % 2 else client.tokens

        async def leg(url: str, question: Question, params: Json | None) -> list[int]:
            return await ask(url, question, kv_transfer_params=params)

        async with slots:
            return await answer(question.again(), leg) == expected

    right = await asyncio.gather(*(is_right(index) for index in range(len(answers))))
    return [len(q.tokens) for (q, _), is_it in zip(answers, right, strict=True) if not is_it]


async def test_pulls_of_four_at_a_time_give_the_tokens_of_a_plain_server(
    prefill: VllmServer, decode: VllmServer, client: Client, plain_answers: Answers
) -> None:
    async def answer(question: Question, leg: Leg) -> list[int]:
        offered = await client.prefill(prefill.url, question)
        assert offered is not None
        return await leg(decode.url, question, offered)

    hits_before = decode.metric(_HITS)
    assert await _wrong(plain_answers, client, answer) == []
    assert decode.metric(_HITS) - hits_before == _num_moved(plain_answers)


@pytest.mark.parametrize("first", ["decode", "prefill", "prefill alone"])
async def test_pushes_of_four_at_a_time_do_whenever_decode_registers(
    prefill: VllmServer, decode: VllmServer, client: Client, plain_answers: Answers, first: str
) -> None:
    async def answer(question: Question, leg: Leg) -> list[int]:
        transfer_id = new_transfer_id()
        params = decode_params(transfer_id, prefill.peer(), "push")
        prefill_leg = client.prefill(prefill.url, question, transfer_id, mode="push")
        decode_leg = leg(decode.url, question, params)
        if first == "prefill alone":
            await prefill_leg
            return await decode_leg
        if first == "prefill":
            _, tokens = await asyncio.gather(prefill_leg, decode_leg)
        else:
            tokens, _ = await asyncio.gather(decode_leg, prefill_leg)
        return tokens

    hits_before = decode.metric(_HITS)
    assert await _wrong(plain_answers, client, answer) == []
    assert decode.metric(_HITS) - hits_before == _num_moved(plain_answers)


async def test_the_same_prompt_again_needs_nothing_of_the_peer(
    prefill: VllmServer, decode: VllmServer, client: Client, plain_answers: Answers
) -> None:
    question, expected = plain_answers[-1]
    fresh = question.again()
    offered = await client.prefill(prefill.url, fresh)
    assert await client.tokens(decode.url, fresh, kv_transfer_params=offered) == expected
    hits_before = decode.metric(_HITS)
    offered = await client.prefill(prefill.url, fresh)
    assert await client.tokens(decode.url, fresh, kv_transfer_params=offered) == expected
    # All but the partial tail is cached; the tail is moved if it is worth it.
    tail = len(fresh.tokens) % 128
    assert decode.metric(_HITS) - hits_before == (tail if tail >= _MIN_MOVED_TOKENS else 0)


async def test_metrics_tell_what_was_moved(
    prefill: VllmServer, decode: VllmServer, client: Client, plain_answers: Answers
) -> None:
    fresh = plain_answers[-1][0].again()
    received = {"mode": "pull", "outcome": "received"}
    num_before = decode.figure("kvferry_receives_total", **received)
    bytes_before = decode.figure("kvferry_transfer_bytes_total", mode="pull")
    offered = await client.prefill(prefill.url, fresh)
    await client.tokens(decode.url, fresh, kv_transfer_params=offered)
    assert decode.figure("kvferry_receives_total", **received) == num_before + 1
    moved = decode.figure("kvferry_transfer_bytes_total", mode="pull") - bytes_before
    assert (
        moved == -(-len(fresh.tokens) // 128) * ask_instance(decode.control_port).layout.block_bytes
    )


async def test_an_instance_tells_the_router_who_it_is(
    prefill: VllmServer, decode: VllmServer
) -> None:
    assert prefill.peer() == prefill.peer()
    assert prefill.peer().instance_id != decode.peer().instance_id
    assert prefill.peer().control_address.endswith(str(prefill.control_port))
