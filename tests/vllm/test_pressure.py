"""Pools that are too small for what is asked: requests wait or are preempted, and end right."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from tests.vllm.asking import Client, Question, decode_params, new_transfer_id, random_tokens
from tests.vllm.conftest import Pair
from tests.vllm.serving import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
PAIR_ARGUMENTS = ("--num-gpu-blocks-override", "32", "--max-model-len", "2048")
PAIR_CONFIG = {"prefill_timeout_s": 60.0}
_AT_ONCE = 6
_BOUND_S = 45.0
"""Less than prefill_timeout_s."""


def _questions() -> list[Question]:
    lengths = (130, 250, 380, 500, 640, 770, 900, 1030)
    return [Question(random_tokens(n, 200 + n), max_tokens=40) for n in lengths]


async def _handed_over(
    client: Client, prefill: VllmServer, decode: VllmServer, question: Question, mode: str
) -> list[int]:
    history = msgspec.to_builtins(decode.peer())
    if mode == "pull":
        offered = await client.prefill(prefill.url, question, history=history)
        return await client.tokens(decode.url, question, kv_transfer_params=offered)
    transfer_id = new_transfer_id()
    params = decode_params(transfer_id, prefill.peer(), "push")
    tokens, _ = await asyncio.gather(
        client.tokens(decode.url, question, kv_transfer_params=params),
        client.prefill(prefill.url, question, transfer_id, mode="push", history=history),
    )
    return tokens


async def test_pushes_that_never_come_leave_the_pool_to_others(
    prefill: VllmServer, decode: VllmServer, client: Client
) -> None:
    plain = Question(random_tokens(1500, 250), max_tokens=4)
    legs = [
        asyncio.create_task(
            client.tokens(
                decode.url,
                Question(random_tokens(640, 251 + index)),
                kv_transfer_params=decode_params(new_transfer_id(), prefill.peer(), "push"),
            )
        )
        for index in range(_AT_ONCE)
    ]
    async with asyncio.timeout(_BOUND_S):
        while decode.metric("vllm:num_requests_waiting") < _AT_ONCE:
            await asyncio.sleep(0.1)
        # All of them together would take 30 of 32 blocks until prefill_timeout_s.
        expected = await client.tokens(prefill.url, plain)
        assert await client.tokens(decode.url, plain) == expected
    assert not any(leg.done() for leg in legs)
    for leg in legs:
        leg.cancel()
    await asyncio.wait(legs)


async def _answered(
    client: Client, server: VllmServer, asked: list[tuple[Question, list[int]]]
) -> list[list[int]]:
    return [await client.tokens(server.url, question.again()) for question, _ in asked]


@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_conversations_beyond_the_pools_end_with_the_right_tokens(
    pair: Pair, client: Client, mode: str
) -> None:
    prefill, decode = pair
    slots = asyncio.Semaphore(_AT_ONCE)

    async def converse(question: Question) -> None:
        async with slots:
            first = await _handed_over(client, prefill, decode, question, mode)
            following = question.continued(first, 60, 300)
            second = await _handed_over(client, prefill, decode, following, mode)
        answers.append((question, first))
        answers.append((following, second))

    answers: list[tuple[Question, list[int]]] = []
    questions = _questions()
    await asyncio.gather(*(converse(question.again()) for question in questions))
    assert len(answers) == 2 * len(questions)
    # One at a time on each.
    expected = await asyncio.gather(
        *(_answered(client, server, answers[index::2]) for index, server in enumerate(pair))
    )
    assert [tokens for _, tokens in answers[0::2]] == expected[0]
    assert [tokens for _, tokens in answers[1::2]] == expected[1]
