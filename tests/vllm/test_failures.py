"""Whatever fails, a request ends with the right tokens and the pools are whole afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator

import pytest

from tests.vllm.asking import Client, Question, decode_params, new_transfer_id, random_tokens
from tests.vllm.conftest import Answers
from tests.vllm.serving import VllmServer
from tests.vllm.settling import BOUND_S, wait_whole

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
PAIR_CONFIG = {"retention_s": 0, "handoff_lease_s": 3.0, "control_timeout_s": 1.0}


@pytest.fixture
async def whole_afterwards(
    prefill: VllmServer, decode: VllmServer, client: Client
) -> AsyncIterator[None]:
    yield
    await wait_whole(client, prefill, decode)


@pytest.mark.usefixtures("whole_afterwards")
async def test_a_decode_leg_that_never_comes_costs_a_lease(
    prefill: VllmServer, client: Client, plain_answers: Answers
) -> None:
    assert await client.prefill(prefill.url, plain_answers[-1][0].again()) is not None


@pytest.mark.usefixtures("whole_afterwards")
async def test_a_decode_leg_after_the_lease_computes_its_prompt(
    prefill: VllmServer, decode: VllmServer, client: Client, plain_answers: Answers
) -> None:
    question, expected = plain_answers[-2]
    fresh = question.again()
    offered = await client.prefill(prefill.url, fresh)
    await wait_whole(client, prefill)
    assert await client.tokens(decode.url, fresh, kv_transfer_params=offered) == expected


@pytest.mark.usefixtures("whole_afterwards")
async def test_another_prompt_under_the_same_transfer_is_computed(
    prefill: VllmServer, decode: VllmServer, client: Client, plain_answers: Answers
) -> None:
    question, expected = plain_answers[-2]
    other = Question((7, *question.tokens[1:]))
    offered = await client.prefill(prefill.url, other)
    fresh = question.again()
    assert await client.tokens(decode.url, fresh, kv_transfer_params=offered) == expected


@pytest.mark.usefixtures("whole_afterwards")
async def test_a_transfer_id_that_is_used_twice_gives_right_tokens_twice(
    prefill: VllmServer, decode: VllmServer, client: Client, plain_answers: Answers
) -> None:
    question, expected = plain_answers[-2]
    fresh = question.again()
    offered = await client.prefill(prefill.url, fresh)
    legs = (client.tokens(decode.url, fresh, kv_transfer_params=offered) for _ in range(3))
    assert await asyncio.gather(*legs) == [expected] * 3


@pytest.mark.usefixtures("whole_afterwards")
@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_a_client_that_leaves_while_prefill_computes_leaves_nothing(
    prefill: VllmServer, client: Client, mode: str
) -> None:
    question = Question(random_tokens(3000, 5))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            await client.prefill(prefill.url, question, mode=mode)


@pytest.mark.usefixtures("whole_afterwards")
async def test_a_client_that_leaves_while_decode_waits_leaves_nothing(
    prefill: VllmServer, decode: VllmServer, client: Client
) -> None:
    question = Question(random_tokens(1000, 6))
    params = decode_params(new_transfer_id(), prefill.peer(), "push")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2.0):
            await client.tokens(decode.url, question, kv_transfer_params=params)


@pytest.mark.usefixtures("whole_afterwards")
async def test_a_prefill_that_is_aborted_under_a_push_is_computed_by_decode(
    prefill: VllmServer, decode: VllmServer, client: Client
) -> None:
    question = Question(random_tokens(2000, 8))
    expected = await client.tokens(decode.url, question.again())
    transfer_id = new_transfer_id()
    params = decode_params(transfer_id, prefill.peer(), "push")
    leg = asyncio.create_task(client.tokens(decode.url, question, kv_transfer_params=params))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.5):
            await client.prefill(prefill.url, question, transfer_id, mode="push")
    async with asyncio.timeout(BOUND_S):
        assert await leg == expected


@pytest.mark.usefixtures("whole_afterwards")
async def test_a_stopped_prefill_instance_delays_decode_for_a_bounded_time(
    prefill: VllmServer, decode: VllmServer, client: Client, plain_answers: Answers
) -> None:
    question, expected = plain_answers[-2]
    fresh = question.again()
    offered = await client.prefill(prefill.url, fresh)
    prefill.send(signal.SIGSTOP)
    try:
        async with asyncio.timeout(BOUND_S):
            tokens = await client.tokens(decode.url, fresh, kv_transfer_params=offered)
    finally:
        prefill.send(signal.SIGCONT)
    assert tokens == expected


async def test_a_killed_prefill_instance_costs_a_recompute_until_it_is_back(
    prefill: VllmServer, decode: VllmServer, client: Client, plain_answers: Answers
) -> None:
    question, expected = plain_answers[-2]
    fresh = question.again()
    offered = await client.prefill(prefill.url, fresh)
    prefill.kill()
    async with asyncio.timeout(BOUND_S):
        assert await client.tokens(decode.url, fresh, kv_transfer_params=offered) == expected
    prefill.begin()
    prefill.wait_ready()
    again = question.again()
    offered = await client.prefill(prefill.url, again)
    assert await client.tokens(decode.url, again, kv_transfer_params=offered) == expected
    await wait_whole(client, prefill, decode)


async def test_a_killed_decode_instance_lets_prefill_free_its_blocks(
    prefill: VllmServer, decode: VllmServer, client: Client
) -> None:
    question = Question(random_tokens(1500, 9), max_tokens=200)
    offered = await client.prefill(prefill.url, question)
    leg = asyncio.create_task(client.tokens(decode.url, question, kv_transfer_params=offered))
    await asyncio.sleep(0.5)
    decode.kill()
    with contextlib.suppress(Exception):
        await leg
    await wait_whole(client, prefill)
