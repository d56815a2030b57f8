"""Real vLLM servers with the plugin behind the real router: the tokens are a plain server's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.vllm.asking import Client, Question, random_tokens
from tests.vllm.conftest import Answers
from tests.vllm.routing import RunningRouter, routing
from tests.vllm.serving import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
_LENGTHS = (5, 129, 300, 700, 1500)
_HANDOFFS = "kvferry_router_handoffs_total"
_RECEIVES = "kvferry_receives_total"
_ANSWER_TOKENS = 140
"""More than a block, so that decode has full blocks that prefill has never computed."""


@pytest.fixture
async def router(
    prefill: VllmServer, decode: VllmServer, tmp_path: Path
) -> AsyncIterator[RunningRouter]:
    control = [f"{s.url}=tcp://127.0.0.1:{s.control_port}" for s in (prefill, decode)]
    options = ["--prefill", prefill.url, "--decode", decode.url]
    for address in control:
        options += ["--control", address]
    async with routing(tmp_path, *options) as running:
        yield running


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_handoffs_give_the_tokens_of_a_plain_server(
    router: RunningRouter,
    decode: VllmServer,
    plain_answers: Answers,
    mode: str,
    is_stream: bool,
) -> None:
    chosen = [each for each in plain_answers if len(each[0].tokens) in _LENGTHS]
    received_before = decode.figure(_RECEIVES, mode=mode, outcome="received")
    for question, expected in chosen:
        headers = {"X-KVFerry-Mode": mode}
        tokens = await router.tokens(question.again(), headers, stream=is_stream)
        assert tokens == expected
    assert await router.figure(_HANDOFFS, mode=mode) == len(chosen)
    num_moved = sum(len(question.tokens) >= 64 for question, _ in chosen)
    received = decode.figure(_RECEIVES, mode=mode, outcome="received") - received_before
    assert received == num_moved


async def test_four_at_a_time_with_the_keys_of_two_tenants(
    router: RunningRouter, plain_answers: Answers
) -> None:
    chosen = [each for each in plain_answers if len(each[0].tokens) in _LENGTHS]

    async def ask(index: int, question: Question) -> list[int]:
        # The router's salt for the tenant takes the place of the question's own.
        headers = {"Authorization": f"Bearer key-{index % 2}"}
        return await router.tokens(question.again(), headers, stream=bool(index % 2))

    asked = [ask(index, question) for index, (question, _) in enumerate(chosen)]
    assert await asyncio.gather(*asked) == [expected for _, expected in chosen]


async def test_a_conversation_is_read_back_without_any_id(
    router: RunningRouter, prefill: VllmServer, client: Client
) -> None:
    question = Question(random_tokens(500, 31), max_tokens=_ANSWER_TOKENS)
    turns: list[tuple[Question, list[int]]] = []
    read_before = prefill.figure(_RECEIVES, mode="history", outcome="received")
    for number in range(3):
        answer = await router.tokens(question, stream=number % 2 == 0)
        turns.append((question, answer))
        question = question.continued(answer, 100, 32 + number)
    plain = [client.tokens(prefill.url, question.again()) for question, _ in turns]
    assert [answer for _, answer in turns] == await asyncio.gather(*plain)
    assert await router.figure("kvferry_router_history_hints_total") == 2
    read = prefill.figure(_RECEIVES, mode="history", outcome="received") - read_before
    assert read == 2
