"""Prefill or decode is killed at each point of a handoff: right tokens or a clear error, in time.

The KV is wide and moves over TCP, so that a fault hits a READ that is under way for certain.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.integration.deployment_client import (
    Client,
    Json,
    open_client,
    salted,
    wait_healthy,
)
from tests.integration.deployment_setup import (
    Deployment,
    open_deployment,
)
from tests.support.process_forks import ProcessForks

pytestmark = pytest.mark.slow

NUM_TOKENS = 320
MAX_ATTEMPTS = 5
OPTIONS = ("--transport", "nixl", "--ucx-tls", "tcp", "--num-blocks", "64", "--max-held-share", "1")


@pytest.fixture(scope="module")
def deployment(
    forks: ProcessForks, wide_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    with open_deployment(tmp_path_factory.mktemp("killed"), forks) as deployment:
        prefill = deployment.add_engine("prefill", wide_model, *OPTIONS)
        decode = deployment.add_engine("decode", wide_model, *OPTIONS)
        deployment.wait_ready()
        deployment.add_router([prefill], [decode], "--request-timeout-s", "12")
        yield deployment


@pytest.fixture
async def client(deployment: Deployment) -> AsyncIterator[Client]:
    """A client; afterwards everything runs again, holds nothing, and hands over."""
    async with open_client() as client:
        yield client
        deployment.restore()
        await client.wait_whole(*deployment.instances)
        await wait_healthy(client, deployment["router"], 2)


async def handoffs_read(client: Client, deployment: Deployment) -> float:
    return await client.metric(deployment["prefill"], "kvferry_handoffs_total", outcome="read")


async def test_decode_killed_before_its_leg(
    client: Client, deployment: Deployment, case: tuple[Json, list[int]]
) -> None:
    body, right = case
    prefill, decode = deployment["prefill"], deployment["decode"]
    first = await client.prefill(prefill, body)
    decode.kill()
    with pytest.raises(aiohttp.ClientConnectorError):
        await client.decode(decode, body, first.offered)
    await client.wait_whole(prefill)
    decode.restore()
    answer = await client.decode(decode, body, first.offered)
    assert answer.token_ids == right
    assert answer.outcome == "expired"


@pytest.mark.parametrize("streams", [False, True])
async def test_decode_killed_before_a_routed_request(
    client: Client, deployment: Deployment, case: tuple[Json, list[int]], *, streams: bool
) -> None:
    body, _ = case
    deployment["decode"].kill()
    answer = await client.post(deployment["router"], body | {"stream": streams})
    assert answer.status in (502, 503)
    assert answer.error is not None
    assert "decode" in answer.error["message"]
    await client.wait_whole(deployment["prefill"])


async def test_decode_killed_during_the_read(
    client: Client, deployment: Deployment, case: tuple[Json, list[int]]
) -> None:
    body, right = case
    prefill, decode = deployment["prefill"], deployment["decode"]
    for _ in range(MAX_ATTEMPTS):
        body = salted(body)
        num_read = await handoffs_read(client, deployment)
        first = await client.prefill(prefill, body)
        leg = await client.decode_until_reading(decode, body, first.offered)
        decode.kill()
        with pytest.raises(aiohttp.ClientError):
            await leg
        decode.restore()
        await client.wait_whole(prefill, decode)
        if await handoffs_read(client, deployment) == num_read:
            break
    else:
        pytest.fail("every READ ended before the kill")
    body = salted(body)
    first = await client.prefill(prefill, body)
    answer = await client.decode(decode, body, first.offered)
    assert answer.token_ids == right
    assert answer.outcome == "received"


@pytest.mark.parametrize("streams", [False, True])
async def test_decode_killed_during_a_routed_read(
    client: Client, deployment: Deployment, case: tuple[Json, list[int]], *, streams: bool
) -> None:
    body, right = case
    decode = deployment["decode"]
    since = decode.log_size()
    routed = client.post(deployment["router"], body | {"stream": streams})
    request = asyncio.create_task(routed)
    await decode.wait_log("reading .* of xfer-", since)
    decode.kill()
    answer = await request
    assert answer.error is not None
    assert answer.error["code"] == "decode_failed"
    if streams:
        assert answer.status == 200
        assert answer.token_ids == right[: len(answer.token_ids)]
    else:
        assert answer.status in (502, 503)
    await client.wait_whole(deployment["prefill"])


async def test_decode_killed_after_the_read(
    client: Client, deployment: Deployment, case: tuple[Json, list[int]]
) -> None:
    body, right = case
    decode = deployment["decode"]
    received = {"mode": "pull", "outcome": "received"}
    num_received = await client.metric(decode, "kvferry_receives_total", **received)
    routed = client.post(deployment["router"], body | {"stream": True, "max_tokens": 400})
    request = asyncio.create_task(routed)
    async with asyncio.timeout(15):
        while await client.metric(decode, "kvferry_receives_total", **received) == num_received:
            await asyncio.sleep(0.005)
    decode.kill()
    answer = await request
    assert answer.error is not None
    assert answer.error["code"] == "decode_failed"
    assert answer.token_ids[: len(right)] == right[: len(answer.token_ids)]
    await client.wait_whole(deployment["prefill"])


async def test_prefill_killed_while_it_computes(
    client: Client, deployment: Deployment, case: tuple[Json, list[int]]
) -> None:
    body, right = case
    prefill = deployment["prefill"]
    request = asyncio.create_task(client.post(deployment["router"], body))
    await client.wait_figure(prefill, "num_requests_running", 1)
    prefill.kill()
    answer = await request
    assert answer.status == 200
    assert answer.token_ids == right
    assert answer.outcome == ""
    await client.wait_whole(deployment["decode"])


async def test_prefill_killed_before_the_acquire(
    client: Client, deployment: Deployment, case: tuple[Json, list[int]]
) -> None:
    body, right = case
    first = await client.prefill(deployment["prefill"], body)
    deployment["prefill"].kill()
    answer = await client.decode(deployment["decode"], body, first.offered)
    assert answer.token_ids == right
    assert answer.outcome == "unreachable"
    await client.wait_whole(deployment["decode"])


async def test_prefill_killed_during_the_read(
    client: Client, deployment: Deployment, case: tuple[Json, list[int]]
) -> None:
    body, right = case
    prefill, decode = deployment["prefill"], deployment["decode"]
    for _ in range(MAX_ATTEMPTS):
        body = salted(body)
        first = await client.prefill(prefill, body)
        leg = await client.decode_until_reading(decode, body, first.offered)
        prefill.kill()
        answer = await leg
        assert answer.token_ids == right
        await client.wait_whole(decode)
        prefill.restore()
        if answer.outcome != "received":
            break
    assert answer.outcome in ("failed", "slow")


async def test_a_prefill_that_came_back_is_used_again(
    client: Client, deployment: Deployment, case: tuple[Json, list[int]]
) -> None:
    body, right = case
    prefill, decode = deployment["prefill"], deployment["decode"]
    prefill.kill()
    prefill.restore()
    await wait_healthy(client, deployment["router"], 2)
    answer = await client.post(deployment["router"], body)
    assert answer.token_ids == right
    assert answer.outcome == "received"
    await client.wait_whole(prefill, decode)
