"""Real instances that are stopped (SIGSTOP) under a router with its default timeouts.

Their connections stay open, so only the silence tells. Requests end within ten seconds, in the
right tokens or in an error that says what happened. An instance that is busy for longer than that
is waited for.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.integration.deployment_client import (
    Answer,
    Client,
    Json,
    body_of,
    fresh_prompt,
    open_client,
    salted,
    wait_healthy,
)
from tests.integration.deployment_setup import Deployment, Program, open_deployment
from tests.support.process_forks import ProcessForks
from tests.support.tiny_model import TinyShape, make_tiny_model

pytestmark = pytest.mark.soak

NUM_TOKENS = 80
NUM_ANSWER_TOKENS = 1500
"""Of an answer that is to be under way for a while."""
SLOW_NUM_TOKENS = 8000
SLOW_BOUND_S = 90.0
FOUND_S = 10.0
"""With the default timeouts, silence is noticed in less."""
DEFAULTS = (
    *("--prefill-timeout-s", "120", "--health-interval-s", "2", "--health-timeout-s", "2"),
    *("--connect-timeout-s", "5"),
)
SHAPE = TinyShape(num_heads=24, num_kv_heads=2, head_size=64, hidden_size=192)
"""Attention to a long prompt takes seconds, a short one milliseconds."""
FAILED = "kvferry_router_legs_failed_total"
both_modes = pytest.mark.parametrize("mode", ["pull", "push"])


@pytest.fixture(scope="module")
def deployment(
    forks: ProcessForks, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    model = make_tiny_model(tmp_path_factory.mktemp("slow") / "model", shape=SHAPE)
    options = ("--transport", "shm", "--num-blocks", "600", "--max-held-share", "1")
    with open_deployment(tmp_path_factory.mktemp("silent"), forks) as deployment:
        prefill, decode, spare = (
            deployment.add_engine(name, model, *options, "--max-num-batched-tokens", "8192")
            for name in ("prefill", "decode", "decode-spare")
        )
        deployment.wait_ready()
        deployment.add_router([prefill], [decode], *DEFAULTS)
        deployment.add_router([prefill], [decode, spare], *DEFAULTS, name="router-spare")
        yield deployment


@pytest.fixture
async def client(deployment: Deployment) -> AsyncIterator[Client]:
    """A client; afterwards all run again, hold nothing, and are well."""
    async with open_client() as client:
        yield client
        deployment.restore()
        await client.wait_whole(*deployment.instances)
        await wait_healthy(client, deployment["router"], 2)
        await wait_healthy(client, deployment["router-spare"], 3)


async def silent_legs(client: Client, router: Program, program: Program) -> float:
    return await client.metric(router, FAILED, instance=program.url, cause="silent")


async def ask_both_ways(client: Client, router: Program, body: Json, mode: str) -> list[Answer]:
    """The answers to a request, whole and streamed, asked for at once."""
    bodies = (salted(body), salted(body) | {"stream": True})
    return list(await asyncio.gather(*(client.post(router, b, mode=mode) for b in bodies)))


async def expect_handoffs(
    client: Client, deployment: Deployment, body: Json, right: list[int]
) -> None:
    """Handoffs give the right tokens, and soon move KV: a lost peer is left alone for a second."""
    for _ in range(20):
        answer = await client.post(deployment["router"], salted(body))
        assert answer.token_ids == right
        if answer.outcome == "received":
            return
        await asyncio.sleep(0.2)
    pytest.fail(f"no handoff moves KV any more: {answer.outcome}")


async def resume(client: Client, deployment: Deployment, program: Program) -> None:
    """Have it go on, until nothing of what it was asked is left."""
    program.resume()
    await client.wait_whole(*deployment.instances)
    await wait_healthy(client, deployment["router"], 2)


@both_modes
async def test_stopped_prefill_costs_a_request_seconds(
    client: Client, deployment: Deployment, case: tuple[Json, list[int]], mode: str
) -> None:
    body, right = case
    router, prefill = deployment["router"], deployment["prefill"]
    before = await silent_legs(client, router, prefill)
    prefill.pause()
    answers = await ask_both_ways(client, router, body, mode)
    assert [answer.token_ids for answer in answers] == [right, right]
    assert max(answer.elapsed_s for answer in answers) < FOUND_S
    # A push's receiver gives up a sender that answers no heartbeat, mostly before that.
    if mode == "pull":
        assert await silent_legs(client, router, prefill) == before + 2
    await resume(client, deployment, prefill)
    await expect_handoffs(client, deployment, body, right)


@both_modes
async def test_stopped_decode_is_a_clear_error_in_seconds(
    client: Client, deployment: Deployment, case: tuple[Json, list[int]], mode: str
) -> None:
    """It is stopped while it computes one answer and streams the other."""
    body, right = case
    router, decode = deployment["router"], deployment["decode"]
    before = await silent_legs(client, router, decode)
    long_body = body | {"max_tokens": NUM_ANSWER_TOKENS}
    asking = asyncio.create_task(ask_both_ways(client, router, long_body, mode))
    await client.wait_figure(decode, "num_requests_running", 2)
    decode.pause()
    whole, streamed = await asking
    for answer in (whole, streamed):
        assert answer.error is not None
        assert answer.error["code"] == "decode_failed"
        assert "silent" in answer.error["message"]
        assert answer.elapsed_s < FOUND_S
    assert whole.status == 502
    assert streamed.token_ids[: len(right)] == right[: len(streamed.token_ids)]
    assert await silent_legs(client, router, decode) == before + 2
    await resume(client, deployment, decode)
    await expect_handoffs(client, deployment, body, right)


@both_modes
async def test_another_instance_answers_for_a_stopped_decode(
    client: Client, deployment: Deployment, case: tuple[Json, list[int]], mode: str
) -> None:
    body, right = case
    router, decode = deployment["router-spare"], deployment["decode"]
    before = await silent_legs(client, router, decode)
    decode.pause()
    # In turn: of two requests one goes to the stopped instance first.
    answers = await ask_both_ways(client, router, body, mode)
    assert [answer.token_ids for answer in answers] == [right, right]
    assert max(answer.elapsed_s for answer in answers) < FOUND_S
    assert await silent_legs(client, router, decode) == before + 1
    await resume(client, deployment, decode)
    await expect_handoffs(client, deployment, body, right)


def slow_body() -> Json:
    return body_of(fresh_prompt(SLOW_NUM_TOKENS), 2)


async def test_busy_prefill_is_waited_for(client: Client, deployment: Deployment) -> None:
    router = deployment["router"]
    before = await client.metric(router, FAILED)
    # Each prompt is one step of some seconds, and there is room for one of them only.
    first = await client.post(router, slow_body(), bound_s=SLOW_BOUND_S)
    num_more = math.ceil(1.5 * FOUND_S / first.elapsed_s)
    asked = [client.post(router, slow_body(), bound_s=SLOW_BOUND_S) for _ in range(num_more)]
    answers = [first, *await asyncio.gather(*asked)]
    assert {answer.status for answer in answers} == {200}
    assert max(answer.elapsed_s for answer in answers) > FOUND_S
    assert await client.metric(router, FAILED) == before
