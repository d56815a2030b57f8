"""Read-back from a real decode instance's memory, by content."""

from __future__ import annotations

import asyncio
import dataclasses

import msgspec
import pytest

from tests.vllm.asking import (
    Client,
    Json,
    Question,
    decode_params,
    new_transfer_id,
    random_tokens,
)
from tests.vllm.serving import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
_BLOCK = 128


def _hint(server: VllmServer) -> Json:
    fields: Json = msgspec.to_builtins(server.peer())
    return fields


def _read_back(offered: Json | None) -> int:
    assert offered is not None
    tokens: int = offered["prefill_report"].get("num_read_back_tokens", 0)
    return tokens


def _outcome(offered: Json | None) -> str:
    assert offered is not None
    outcome: str = offered["prefill_report"].get("read_back_outcome", "")
    return outcome


@pytest.mark.parametrize("num_turns", [1, 3])
async def test_a_conversation_is_read_back_streamed_or_not(
    prefill: VllmServer, decode: VllmServer, client: Client, num_turns: int
) -> None:
    question = Question(random_tokens(600, 70 + num_turns))
    for turn in range(num_turns):
        ask = client.tokens if turn % 2 else client.streamed_tokens
        answer = await ask(decode.url, question)
        num_held = (len(question.tokens) + len(answer) - 1) // _BLOCK * _BLOCK
        question = question.continued(answer, 200, 80 + turn)
    expected = await client.tokens(prefill.url, question.again())
    offered = await client.prefill(prefill.url, question, history=_hint(decode))
    assert _read_back(offered) == num_held
    assert await client.tokens(decode.url, question, kv_transfer_params=offered) == expected


async def test_a_read_back_and_a_push_join_in_one_request(
    prefill: VllmServer, decode: VllmServer, client: Client
) -> None:
    first = Question(random_tokens(900, 95))
    question = first.continued(await client.tokens(decode.url, first), 300, 96)
    expected = await client.tokens(prefill.url, question.again())
    transfer_id = new_transfer_id()
    params = decode_params(transfer_id, prefill.peer(), "push")
    offered, tokens = await asyncio.gather(
        client.prefill(prefill.url, question, transfer_id, mode="push", history=_hint(decode)),
        client.tokens(decode.url, question, kv_transfer_params=params),
    )
    assert tokens == expected
    assert _read_back(offered) == 7 * _BLOCK


async def test_an_edited_history_is_read_back_up_to_the_edit(
    prefill: VllmServer, decode: VllmServer, client: Client
) -> None:
    question = Question(random_tokens(700, 90))
    await client.tokens(decode.url, question)
    edited = list(question.tokens)
    edited[300] = 5
    other = dataclasses.replace(question, tokens=tuple(edited))
    expected = await client.tokens(prefill.url, other.again())
    offered = await client.prefill(prefill.url, other, history=_hint(decode))
    assert _read_back(offered) == 2 * _BLOCK
    assert await client.tokens(decode.url, other, kv_transfer_params=offered) == expected


async def test_a_history_that_nobody_has_costs_a_recompute_only(
    prefill: VllmServer, decode: VllmServer, client: Client
) -> None:
    question = Question(random_tokens(400, 91))
    expected = await client.tokens(prefill.url, question.again())
    offered = await client.prefill(prefill.url, question, history=_hint(decode))
    assert (_read_back(offered), _outcome(offered)) == (0, "gone")
    assert await client.tokens(decode.url, question, kv_transfer_params=offered) == expected


async def test_another_salt_finds_nothing(
    prefill: VllmServer, decode: VllmServer, client: Client
) -> None:
    question = Question(random_tokens(700, 92))
    expected = await client.tokens(decode.url, question)
    other = question.again()
    offered = await client.prefill(prefill.url, other, history=_hint(decode))
    assert (_read_back(offered), _outcome(offered)) == (0, "gone")
    assert await client.tokens(decode.url, other, kv_transfer_params=offered) == expected


async def test_a_conversation_that_was_ended_is_not_retained(
    prefill: VllmServer, decode: VllmServer, client: Client
) -> None:
    question = Question(random_tokens(700, 93))
    offered = await client.prefill(prefill.url, question)
    assert offered is not None
    answer = await client.tokens(
        decode.url, question, kv_transfer_params={**offered, "retention_s": 0}
    )
    following = question.continued(answer, 600, 94)
    offered = await client.prefill(prefill.url, following, history=_hint(decode))
    assert (_read_back(offered), _outcome(offered)) == (0, "gone")
