"""A server whose cache is reset keeps nothing of what it had, and gives nothing of it to a peer."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.vllm.asking import (
    Client,
    Question,
    decode_params,
    hint,
    new_transfer_id,
    num_read_back,
    random_tokens,
    read_back_outcome,
)
from tests.vllm.serving import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
_BOUND_S = 30.0
_USAGE = "vllm:kv_cache_usage_perc"


async def _wait_running(server: VllmServer) -> None:
    deadline_s = time.monotonic() + _BOUND_S
    while not server.metric("vllm:num_requests_running"):
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/pause"])
async def test_what_was_retained_before_is_never_read_back(
    prefill: VllmServer, decode: VllmServer, client: Client, path: str
) -> None:
    question = Question(random_tokens(600, 500))
    following = question.continued(await client.tokens(decode.url, question), 100, 501)
    answer = await client.post(decode.url, path)
    assert answer.get("success", True), "the first call succeeds although blocks are retained"
    if path == "/pause":  # before an update of weights
        await client.post(decode.url, "/resume")
    offered = await client.prefill(prefill.url, following, history=hint(decode.peer()))
    assert (num_read_back(offered), read_back_outcome(offered)) == (0, "gone")
    expected = await client.tokens(prefill.url, following.again())
    assert await client.tokens(decode.url, following, kv_transfer_params=offered) == expected
    # What is computed since is retained, and read back, as ever.
    last = following.continued(expected, 100, 502)
    offered = await client.prefill(prefill.url, last, history=hint(decode.peer()))
    await client.reset_at_last(prefill.url)
    offered = await client.prefill(prefill.url, last, history=hint(decode.peer()))
    assert num_read_back(offered) == len(following.tokens) + len(expected) - 1


async def test_a_handoff_that_nobody_has_fetched_is_given_up(
    prefill: VllmServer, decode: VllmServer, client: Client
) -> None:
    question = Question(random_tokens(600, 510))
    expected = await client.tokens(decode.url, question.again())
    offered = await client.prefill(prefill.url, question)
    await client.reset_at_last(prefill.url)
    received_before = decode.figure("kvferry_receives_total", outcome="received")
    assert await client.tokens(decode.url, question, kv_transfer_params=offered) == expected
    assert decode.figure("kvferry_receives_total", outcome="received") == received_before


async def test_a_push_that_runs_ends_and_decode_computes(
    prefill: VllmServer, decode: VllmServer, client: Client
) -> None:
    question, transfer_id = Question(random_tokens(3000, 520)), new_transfer_id()
    params = decode_params(transfer_id, prefill.peer(), "push")
    legs = asyncio.gather(
        client.tokens(decode.url, question, kv_transfer_params=params),
        client.complete(
            prefill.url,
            question,
            kv_transfer_params={"transfer_id": transfer_id, "role": "prefill", "mode": "push"},
        ),
    )
    await _wait_running(prefill)
    assert await client.reset(prefill.url, reset_running_requests="true")
    tokens, _ = await legs
    assert tokens == await client.tokens(prefill.url, question.again())
    await client.reset_at_last(prefill.url)
    await client.tokens(prefill.url, Question((1, 2, 3), max_tokens=1))
    assert prefill.metric(_USAGE) == 0
