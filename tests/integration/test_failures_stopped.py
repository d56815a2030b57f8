"""Prefill or decode is stopped (SIGSTOP) for longer than its lease, then goes on.

The other recovers within its bounds, and the stopped one is whole afterwards: what a READ brought
too late is thrown away, since the holder's blocks were another prompt's by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.integration.deployment_client import (
    Client,
    Json,
    body_of,
    fresh_prompt,
    open_client,
    salted,
    wait_healthy,
)
from tests.integration.deployment_setup import (
    BOUND_S,
    HANDOFF_LEASE_S,
    Deployment,
    open_deployment,
)
from tests.support.process_forks import ProcessForks

pytestmark = pytest.mark.slow

NUM_TOKENS = 320
MAX_ATTEMPTS = 5
TRANSPORTS = {
    "tcp": ("--transport", "nixl", "--ucx-tls", "tcp"),
    "direct": ("--transport", "nixl"),
    "shm": ("--transport", "shm"),
}
on_tcp = pytest.mark.parametrize("deployment", ["tcp"], indirect=True)
STOPPED_BOUND_S = 2 * BOUND_S
"""Of an answer by a process that was stopped meanwhile."""


@pytest.fixture(scope="module", params=list(TRANSPORTS))
def deployment(
    request: pytest.FixtureRequest,
    forks: ProcessForks,
    wide_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Deployment]:
    options = (*TRANSPORTS[request.param], "--num-blocks", "64", "--max-held-share", "1")
    with open_deployment(tmp_path_factory.mktemp("stopped"), forks) as deployment:
        prefill = deployment.add_engine("prefill", wide_model, *options)
        decode = deployment.add_engine("decode", wide_model, *options)
        deployment.wait_ready()
        timeouts = ("--prefill-timeout-s", "4", "--request-timeout-s", "9")
        deployment.add_router([prefill], [decode], *timeouts)
        yield deployment


@pytest.fixture
async def client(deployment: Deployment) -> AsyncIterator[Client]:
    """A client; afterwards both instances hold nothing, and a handoff works."""
    async with open_client() as client:
        yield client
        deployment.restore()
        await client.wait_whole(*deployment.instances)
        await wait_healthy(client, deployment["router"], 2)


async def expect_handoff(
    client: Client, deployment: Deployment, case: tuple[Json, list[int]]
) -> None:
    """Handoffs give the right tokens, and soon move KV: a lost peer is left alone for a second."""
    for _ in range(10):
        body = salted(case[0])
        first = await client.prefill(deployment["prefill"], body)
        answer = await client.decode(deployment["decode"], body, first.offered)
        assert answer.token_ids == case[1]
        if answer.outcome == "received":
            return
        await asyncio.sleep(0.2)
    pytest.fail(f"no handoff moves KV any more: {answer.outcome}")


async def refill(client: Client, deployment: Deployment, num_blocks: int = 64) -> None:
    """Have every block of prefill's pool hold another prompt's KV."""
    for _ in range(num_blocks // 20 + 1):
        answer = await client.post(deployment["prefill"], body_of(fresh_prompt(NUM_TOKENS), 1))
        assert answer.status == 200


async def test_decode_stopped_from_grant_until_the_blocks_are_other_prompts(
    client: Client, deployment: Deployment, case: tuple[Json, list[int]]
) -> None:
    body, right = case
    prefill, decode = deployment["prefill"], deployment["decode"]
    for _ in range(MAX_ATTEMPTS):
        body = salted(body)
        first = await client.prefill(prefill, body)
        since = decode.log_size()
        leg = asyncio.create_task(
            client.decode(decode, body, first.offered, bound_s=STOPPED_BOUND_S)
        )
        await decode.wait_log("reading .* of xfer-", since)
        decode.pause()
        # The lease of the reader is longer than a hold: it is what keeps the blocks.
        await client.wait_whole(prefill)
        await refill(client, deployment)
        decode.resume()
        answer = await leg
        assert answer.token_ids == right
        if answer.outcome != "received":
            break
    assert answer.outcome in ("expired", "slow", "failed")
    await client.wait_whole(prefill, decode)
    await expect_handoff(client, deployment, case)


@on_tcp
async def test_decode_stopped_before_its_leg(
    client: Client, deployment: Deployment, case: tuple[Json, list[int]]
) -> None:
    body, right = case
    prefill, decode = deployment["prefill"], deployment["decode"]
    first = await client.prefill(prefill, body)
    decode.pause()
    leg = asyncio.create_task(client.decode(decode, body, first.offered, bound_s=STOPPED_BOUND_S))
    await client.wait_whole(prefill)
    decode.resume()
    answer = await leg
    assert answer.token_ids == right
    assert answer.outcome == "expired"
    await expect_handoff(client, deployment, case)


@on_tcp
async def test_prefill_stopped_before_the_acquire(
    client: Client, deployment: Deployment, case: tuple[Json, list[int]]
) -> None:
    body, right = case
    prefill, decode = deployment["prefill"], deployment["decode"]
    first = await client.prefill(prefill, body)
    prefill.pause()
    answer = await client.decode(decode, body, first.offered)
    assert answer.token_ids == right
    assert answer.outcome == "unreachable"
    await client.wait_whole(decode)
    await asyncio.sleep(max(0.0, HANDOFF_LEASE_S - answer.elapsed_s))
    prefill.resume()
    await client.wait_whole(prefill)
    await expect_handoff(client, deployment, case)


async def test_prefill_stopped_during_the_read(
    client: Client, deployment: Deployment, case: tuple[Json, list[int]]
) -> None:
    """Over TCP the READ hangs; where the reader copies by itself, it ends all the same."""
    body, right = case
    prefill, decode = deployment["prefill"], deployment["decode"]
    first = await client.prefill(prefill, body)
    leg = await client.decode_until_reading(decode, body, first.offered)
    prefill.pause()
    answer = await leg
    assert answer.token_ids == right
    assert answer.outcome in ("received", "slow")
    await client.wait_whole(decode)  # Quarantine ends while the holder is still stopped.
    others = [body_of(fresh_prompt(NUM_TOKENS), 3) for _ in range(3)]
    answers = [await client.post(decode, other) for other in others]
    prefill.resume()
    await client.wait_whole(prefill)
    for other, before in zip(others, answers, strict=True):
        again = await client.post(decode, other)
        assert again.report["num_cached_tokens"] > 0
        assert again.token_ids == before.token_ids
    await expect_handoff(client, deployment, case)


@on_tcp
async def test_prefill_stopped_while_it_computes_a_routed_request(
    client: Client, deployment: Deployment, case: tuple[Json, list[int]]
) -> None:
    body, right = case
    prefill = deployment["prefill"]
    request = asyncio.create_task(client.post(deployment["router"], body))
    await client.wait_figure(prefill, "num_requests_running", 1)
    prefill.pause()
    answer = await request
    assert answer.error is not None or answer.token_ids == right
    await client.wait_whole(deployment["decode"])
    prefill.resume()
    await client.wait_whole(prefill)
    await expect_handoff(client, deployment, case)


@on_tcp
async def test_decode_stopped_while_it_streams_through_the_router(
    client: Client, deployment: Deployment, case: tuple[Json, list[int]]
) -> None:
    body, right = case
    decode = deployment["decode"]
    since = decode.log_size()
    routed = client.post(
        deployment["router"], body | {"stream": True, "max_tokens": 400}, bound_s=BOUND_S
    )
    request = asyncio.create_task(routed)
    await decode.wait_log("reading .* of xfer-", since)
    decode.pause()
    answer = await request
    assert answer.error is not None
    assert answer.token_ids[: len(right)] == right[: len(answer.token_ids)]
    await client.wait_whole(deployment["prefill"])
    decode.resume()
    await client.wait_whole(decode)
    await expect_handoff(client, deployment, case)
