"""The client leaves at each point of a routed request: both legs end, every block comes back."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.deployment_client import (
    PATH,
    Client,
    body_of,
    fresh_prompt,
    salted,
)
from tests.integration.deployment_setup import (
    BOUND_S,
    Deployment,
    open_deployment,
)
from tests.support.process_forks import ProcessForks

pytestmark = pytest.mark.slow

OPTIONS = ("--transport", "nixl", "--ucx-tls", "tcp", "--num-blocks", "64", "--max-held-share", "1")
NUM_TOKENS = 320
MANY_TOKENS = 960
"""Takes prefill so long that the client leaves meanwhile, on a busy machine too."""
LEAVE_BOUND_S = 20.0
"""Well before the lease ends: the instances are told, they need not find out."""


@pytest.fixture(scope="module")
def deployment(
    forks: ProcessForks, wide_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    with open_deployment(tmp_path_factory.mktemp("clients"), forks) as deployment:
        prefill = deployment.add_engine("prefill", wide_model, *OPTIONS, "--handoff-lease-s", "60")
        decode = deployment.add_engine("decode", wide_model, *OPTIONS)
        deployment.wait_ready()
        deployment.add_router([prefill], [decode])
        yield deployment


async def leave_when(
    client: Client,
    deployment: Deployment,
    is_there: Callable[[], Awaitable[object]],
    *,
    streams: bool,
    max_tokens: int = 8,
    num_tokens: int = NUM_TOKENS,
) -> None:
    """Send a routed request and close its connection as soon as ``is_there`` returns."""
    body = salted(body_of(fresh_prompt(num_tokens), max_tokens, stream=streams))
    request = asyncio.create_task(client.post(deployment["router"], body, bound_s=60.0))
    await is_there()
    assert not request.done()
    request.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await request


async def gone(client: Client, deployment: Deployment) -> dict[str, float]:
    name = "kvferry_router_requests_total"
    outcomes = ("before_prefill_done", "after_prefill", "streaming")
    return {
        outcome: await client.metric(deployment["router"], name, outcome=f"client_gone_{outcome}")
        for outcome in outcomes
    }


@pytest.mark.parametrize("streams", [False, True])
async def test_leaves_while_prefill_computes(
    client: Client, deployment: Deployment, *, streams: bool
) -> None:
    before = await gone(client, deployment)
    running = lambda: client.wait_figure(deployment["prefill"], "num_requests_running", 1)  # noqa: E731
    await leave_when(client, deployment, running, streams=streams, num_tokens=MANY_TOKENS)
    await client.wait_whole(*deployment.instances, timeout_s=LEAVE_BOUND_S)
    after = await gone(client, deployment)
    assert after["before_prefill_done"] == before["before_prefill_done"] + 1


async def test_leaves_between_prefill_and_decode(client: Client, deployment: Deployment) -> None:
    """Decode is stopped, so that its leg has not arrived when the client leaves."""
    before = await gone(client, deployment)
    prefill, decode = deployment["prefill"], deployment["decode"]
    decode.pause()

    async def is_sent() -> None:
        """Once the router has prefill's answer; prefill's own figures change before that."""
        labels = {"instance": decode.url, "role": "decode"}
        async with asyncio.timeout(BOUND_S):
            while not await client.metric(
                deployment["router"], "kvferry_router_instance_inflight", **labels
            ):
                await asyncio.sleep(0.002)

    await leave_when(client, deployment, is_sent, streams=True)
    await client.wait_whole(prefill, timeout_s=LEAVE_BOUND_S)
    decode.resume()
    await client.wait_whole(decode)
    after = await gone(client, deployment)
    assert after["after_prefill"] == before["after_prefill"] + 1


@pytest.mark.parametrize("streams", [False, True])
async def test_leaves_during_the_read(
    client: Client, deployment: Deployment, *, streams: bool
) -> None:
    decode = deployment["decode"]
    since = decode.log_size()
    reading = lambda: decode.wait_log("reading .* of xfer-", since)  # noqa: E731
    await leave_when(client, deployment, reading, streams=streams, max_tokens=200)
    await client.wait_whole(*deployment.instances)


@pytest.mark.parametrize("streams", [False, True])
async def test_leaves_while_decode_computes(
    client: Client, deployment: Deployment, *, streams: bool
) -> None:
    running = lambda: client.wait_figure(deployment["decode"], "num_requests_running", 1)  # noqa: E731
    await leave_when(client, deployment, running, streams=streams, max_tokens=400)
    await client.wait_whole(*deployment.instances, timeout_s=LEAVE_BOUND_S)


async def test_leaves_after_some_streamed_tokens(client: Client, deployment: Deployment) -> None:
    before = await gone(client, deployment)
    body = salted(body_of(fresh_prompt(NUM_TOKENS), 400, stream=True))
    router = deployment["router"]
    async with client.session.post(router.url + PATH, data=json.dumps(body)) as response:
        for _ in range(4):
            await response.content.readuntil(b"\n\n")
        response.close()
    await client.wait_whole(*deployment.instances, timeout_s=LEAVE_BOUND_S)
    after = await gone(client, deployment)
    assert after["streaming"] == before["streaming"] + 1


async def test_a_prefill_legs_client_leaves(client: Client, deployment: Deployment) -> None:
    """Whoever asked for a handoff is gone before it is offered: nothing is held for nobody."""
    prefill = deployment["prefill"]
    leg = asyncio.create_task(client.prefill(prefill, salted(body_of(fresh_prompt(NUM_TOKENS)))))
    await client.wait_figure(prefill, "num_requests_running", 1)
    leg.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await leg
    await client.wait_whole(prefill, timeout_s=LEAVE_BOUND_S)


async def test_a_request_after_all_that_is_right(client: Client, deployment: Deployment) -> None:
    body = salted(body_of(fresh_prompt(NUM_TOKENS), 5))
    right = await client.plain(deployment["decode"], body)
    answer = await client.post(deployment["router"], body | {"stream": True})
    assert answer.is_done
    assert answer.token_ids == right
    assert answer.outcome == "received"
