"""Handoffs between two real vLLM servers: the tokens are those of one plain server."""

from __future__ import annotations

import asyncio

import pytest

from tests.vllm.asking import Client, ask_instance, decode_params, new_transfer_id
from tests.vllm.conftest import Answers
from tests.vllm.serving import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
_HITS = "vllm:external_prefix_cache_hits_total"
_MIN_MOVED_TOKENS = 64


def _num_moved(answers: Answers) -> int:
    lengths = [len(question.tokens) for question, _ in answers]
    return sum(length for length in lengths if length >= _MIN_MOVED_TOKENS)


async def test_a_pull_gives_the_tokens_of_a_plain_server(
    prefill: VllmServer, decode: VllmServer, client: Client, plain_answers: Answers
) -> None:
    hits_before = decode.metrics()[_HITS]
    for question, expected in plain_answers:
        fresh = question.again()
        offered = await client.prefill(prefill.url, fresh)
        assert offered is not None
        assert await client.tokens(decode.url, fresh, kv_transfer_params=offered) == expected
    assert decode.metrics()[_HITS] - hits_before == _num_moved(plain_answers)


async def test_pulls_of_four_at_a_time_do_too(
    prefill: VllmServer, decode: VllmServer, client: Client, plain_answers: Answers
) -> None:
    slots = asyncio.Semaphore(4)

    async def answer(index: int) -> bool:
        question, expected = plain_answers[index]
        fresh = question.again()
        async with slots:
            offered = await client.prefill(prefill.url, fresh)
            tokens = await client.streamed_tokens(decode.url, fresh, kv_transfer_params=offered)
            return tokens == expected

    indices = range(len(plain_answers))
    assert all(await asyncio.gather(*(answer(index) for index in indices)))


@pytest.mark.parametrize("first", ["decode", "prefill", "prefill alone"])
async def test_a_push_does_whenever_decode_registers(
    prefill: VllmServer, decode: VllmServer, client: Client, plain_answers: Answers, first: str
) -> None:
    hits_before = decode.metrics()[_HITS]
    for question, expected in plain_answers:
        fresh, transfer_id = question.again(), new_transfer_id()
        params = decode_params(transfer_id, prefill.peer(), "push")
        prefill_leg = client.prefill(prefill.url, fresh, transfer_id, mode="push")
        decode_leg = client.tokens(decode.url, fresh, kv_transfer_params=params)
        if first == "prefill alone":
            await prefill_leg
            tokens = await decode_leg
        elif first == "prefill":
            _, tokens = await asyncio.gather(prefill_leg, decode_leg)
        else:
            tokens, _ = await asyncio.gather(decode_leg, prefill_leg)
        assert tokens == expected
    assert decode.metrics()[_HITS] - hits_before == _num_moved(plain_answers)


async def test_the_same_prompt_again_needs_nothing_of_the_peer(
    prefill: VllmServer, decode: VllmServer, client: Client, plain_answers: Answers
) -> None:
    question, expected = plain_answers[-1]
    fresh = question.again()
    offered = await client.prefill(prefill.url, fresh)
    assert await client.tokens(decode.url, fresh, kv_transfer_params=offered) == expected
    hits_before = decode.metrics()[_HITS]
    offered = await client.prefill(prefill.url, fresh)
    assert await client.tokens(decode.url, fresh, kv_transfer_params=offered) == expected
    # All but the partial tail is cached; the tail is moved if it is worth it.
    tail = len(fresh.tokens) % 128
    assert decode.metrics()[_HITS] - hits_before == (tail if tail >= _MIN_MOVED_TOKENS else 0)


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
