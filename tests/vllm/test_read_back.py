"""Read-back from a real decode instance's memory, by content."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from tests.vllm.asking import (
    Client,
    Json,
    Question,
    decode_params,
    hint,
    new_transfer_id,
    num_read_back,
    random_tokens,
    read_back_outcome,
)
from tests.vllm.conftest import Pair
from tests.vllm.serving import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
_BLOCK = 128


@pytest.mark.parametrize("num_turns", [1, 3])
async def test_a_conversation_is_read_back_streamed_or_not(
    prefill: VllmServer, decode: VllmServer, client: Client, num_turns: int
) -> None:
    question = Question(random_tokens(600, 70 + num_turns))
    for turn in range(num_turns):
        ask = client.tokens if turn % 2 else client.streamed_tokens
        answer = await ask(decode.url, question)
        num_held = _num_held(question, answer)
        question = question.continued(answer, 200, 80 + turn)
    expected = await client.tokens(prefill.url, question.again())
    offered = await client.prefill(prefill.url, question, history=hint(decode.peer()))
    assert num_read_back(offered) == num_held
    assert await client.tokens(decode.url, question, kv_transfer_params=offered) == expected


def _num_held(question: Question, answer: list[int]) -> int:
    """Return how many tokens a conversation's holder has: the answer's last one has no KV."""
    return len(question.tokens) + len(answer) - 1


async def _next_answer(
    client: Client, pair: Pair, question: Question, turn: int
) -> tuple[list[int], Json | None]:
    """Hand a turn over, by pull and by push in turns; prefill has lost its own cache."""
    prefill, decode = pair
    await client.reset_at_last(prefill.url)
    ask = client.streamed_tokens if turn % 3 else client.tokens
    history = hint(decode.peer())
    if turn % 2:
        offered = await client.prefill(prefill.url, question, history=history)
        return await ask(decode.url, question, kv_transfer_params=offered), offered
    transfer_id = new_transfer_id()
    params = decode_params(transfer_id, prefill.peer(), "push")
    offered, tokens = await asyncio.gather(
        client.prefill(prefill.url, question, transfer_id, mode="push", history=history),
        ask(decode.url, question, kv_transfer_params=params),
    )
    return tokens, offered


async def test_six_turns_with_a_fork_and_an_edit_give_the_tokens_of_a_plain_server(
    pair: Pair, client: Client
) -> None:
    prefill, _ = pair
    question, read_back = Question(random_tokens(300, 400)), []
    turns: list[tuple[Question, list[int]]] = []
    for turn in range(6):
        tokens, offered = await _next_answer(client, pair, question, turn)
        read_back.append(num_read_back(offered))
        turns.append((question, tokens))
        # The fourth turn goes on from the second one's answer, the sixth from an edited history.
        earlier, answer = turns[1] if turn == 2 else (question, tokens)
        question = earlier.continued(answer, 150, 401 + turn)
        if turn == 4:
            edited = (*question.tokens[:400], 5, *question.tokens[401:])
            question = dataclasses.replace(question, tokens=edited)
    held = [_num_held(*turn) for turn in turns]
    # What the fork has in common with the turn that came between, in whole blocks.
    shared = (held[1] + 1) // _BLOCK * _BLOCK
    assert read_back == [0, held[0], held[1], shared, held[3], 3 * _BLOCK]
    await client.reset_at_last(prefill.url)
    for question, tokens in turns:
        assert tokens == await client.tokens(prefill.url, question.again())


async def test_a_read_back_and_a_push_join_in_one_request(
    prefill: VllmServer, decode: VllmServer, client: Client
) -> None:
    first = Question(random_tokens(900, 95))
    answer = await client.tokens(decode.url, first)
    question = first.continued(answer, 300, 96)
    expected = await client.tokens(prefill.url, question.again())
    transfer_id = new_transfer_id()
    params = decode_params(transfer_id, prefill.peer(), "push")
    offered, tokens = await asyncio.gather(
        client.prefill(
            prefill.url, question, transfer_id, mode="push", history=hint(decode.peer())
        ),
        client.tokens(decode.url, question, kv_transfer_params=params),
    )
    assert tokens == expected
    assert num_read_back(offered) == _num_held(first, answer)


async def test_an_edited_history_is_read_back_up_to_the_edit(
    prefill: VllmServer, decode: VllmServer, client: Client
) -> None:
    question = Question(random_tokens(700, 90))
    await client.tokens(decode.url, question)
    edited = list(question.tokens)
    edited[300] = 5
    other = dataclasses.replace(question, tokens=tuple(edited))
    expected = await client.tokens(prefill.url, other.again())
    offered = await client.prefill(prefill.url, other, history=hint(decode.peer()))
    assert num_read_back(offered) == 2 * _BLOCK
    assert await client.tokens(decode.url, other, kv_transfer_params=offered) == expected


async def test_a_history_that_nobody_has_costs_a_recompute_only(
    prefill: VllmServer, decode: VllmServer, client: Client
) -> None:
    question = Question(random_tokens(400, 91))
    expected = await client.tokens(prefill.url, question.again())
    offered = await client.prefill(prefill.url, question, history=hint(decode.peer()))
    assert (num_read_back(offered), read_back_outcome(offered)) == (0, "gone")
    assert await client.tokens(decode.url, question, kv_transfer_params=offered) == expected


async def test_another_salt_finds_nothing(
    prefill: VllmServer, decode: VllmServer, client: Client
) -> None:
    question = Question(random_tokens(700, 92))
    expected = await client.tokens(decode.url, question)
    other = question.again()
    offered = await client.prefill(prefill.url, other, history=hint(decode.peer()))
    assert (num_read_back(offered), read_back_outcome(offered)) == (0, "gone")
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
    offered = await client.prefill(prefill.url, following, history=hint(decode.peer()))
    assert (num_read_back(offered), read_back_outcome(offered)) == (0, "gone")
