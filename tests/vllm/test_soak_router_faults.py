"""An instance behind the router is told to end, killed or stopped while it answers clients.

Each of them gets the right tokens, or a clear error soon; then all goes on as before.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from tests.vllm.asking import Client, Question, random_tokens
from tests.vllm.conftest import Pair
from tests.vllm.routing import RoutedAnswer, RunningRouter, routing
from tests.vllm.serving import VllmServer
from tests.vllm.settling import BOUND_S, have_all_run, wait_for, wait_whole

pytestmark = [pytest.mark.vllm, pytest.mark.soak, pytest.mark.timeout(600)]
PAIR_CONFIG = {"retention_s": 0, "handoff_lease_s": 3.0}
_ERROR_S = 10.0
"""From the fault to the end of an answer that cannot be completed."""
_NAMED_ERRORS = {"decode_failed", "prefill_failed", "no_instance", "500"}
"""The last is vLLM's own, from a server whose engine is gone before it; nobody is left to try."""
_WAYS = [(mode, is_stream) for mode in ("pull", "push") for is_stream in (False, True)]
_RUNNING = "vllm:num_requests_running"


@pytest.fixture
async def router(pair: Pair, client: Client, tmp_path: Path) -> AsyncIterator[RunningRouter]:
    prefill, decode = pair
    options = ["--prefill", prefill.url, "--decode", decode.url]
    for server in pair:
        options += ["--control", f"{server.url}=tcp://127.0.0.1:{server.control_port}"]
    async with routing(tmp_path, *options) as running:
        yield running
    await have_all_run(*pair)
    await wait_whole(client, *pair)


async def _ask(
    router: RunningRouter, question: Question, mode: str, is_stream: bool
) -> RoutedAnswer:
    return await router.ask(question, {"X-KVFerry-Mode": mode}, stream=is_stream)


async def _right_again(router: RunningRouter, question: Question, expected: list[int]) -> None:
    """Wait until the router has found out that all is well, and answers."""
    deadline_s = time.monotonic() + BOUND_S
    while (answer := await _ask(router, question.again(), "push", is_stream=True)).error_code:
        assert time.monotonic() < deadline_s, answer
        await asyncio.sleep(0.2)
    assert answer.tokens == expected


def _inflict(fault: str, server: VllmServer) -> None:
    match fault:
        case "told to end":
            server.process.send(signal.SIGTERM)
        case "killed":
            server.kill()
        case _:
            server.send(signal.SIGSTOP)


def _assert_right_or_clear(
    answers: Sequence[RoutedAnswer], expected: list[int], began_s: float, plain_s: float
) -> None:
    for answer in answers:
        took_s = answer.ended_s - began_s
        if answer.error_code:
            assert answer.error_code in _NAMED_ERRORS
            assert answer.tokens == expected[: len(answer.tokens)]
            assert took_s < _ERROR_S
        else:
            assert answer.tokens == expected
            # The one that is left computes them all.
            assert took_s < _ERROR_S + 2 * len(answers) * plain_s


@pytest.mark.parametrize("fault", ["told to end", "killed", "stopped"])
@pytest.mark.parametrize("victim", ["prefill", "decode"])
async def test_clients_get_right_tokens_or_a_clear_error_soon(
    pair: Pair, client: Client, router: RunningRouter, victim: str, fault: str
) -> None:
    lost = pair[0] if victim == "prefill" else pair[1]
    question = Question(random_tokens(1200, 901), max_tokens=100)
    asked_s = time.monotonic()
    expected = await client.tokens(pair[1].url, question.again())
    plain_s = time.monotonic() - asked_s
    asked = [
        asyncio.create_task(_ask(router, question.again(), mode, is_stream))
        for mode, is_stream in _WAYS
    ]
    await wait_for(lambda: lost.metric(_RUNNING) >= (1 if victim == "prefill" else 2))
    began_s = time.monotonic()
    _inflict(fault, lost)
    answers = await asyncio.gather(*asked)
    _assert_right_or_clear(answers, expected, began_s, plain_s)
    if victim == "prefill":
        assert not any(answer.error_code for answer in answers)
    if fault == "told to end":
        await asyncio.to_thread(lost.stop)
    await have_all_run(lost)
    await _right_again(router, question, expected)
