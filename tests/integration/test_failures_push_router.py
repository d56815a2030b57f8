"""Pushes through the router whose instances are killed or stopped, or whose client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.integration.deployment_client import (
    Answer,
    Client,
    Json,
    open_client,
    salted,
    wait_healthy,
)
from tests.integration.deployment_setup import Deployment, Program, open_deployment
from tests.integration.push_legs import CHUNK_OPTIONS, WIDE_OPTIONS, leave
from tests.support.process_forks import ProcessForks

pytestmark = pytest.mark.slow

NUM_TOKENS = 320
OPTIONS = ("--transport", "nixl", "--ucx-tls", "tcp", *WIDE_OPTIONS)
ROUTERS = ("decode", "error", "retry")
LEAVE_BOUND_S = 7.0
"""The instances are told; a WRITE that runs may take until its link is torn down."""


@pytest.fixture(scope="module")
def deployment(
    forks: ProcessForks, wide_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    with open_deployment(tmp_path_factory.mktemp("push-router"), forks) as deployment:
        prefill = [
            deployment.add_engine(f"prefill-{n}", wide_model, *OPTIONS, *CHUNK_OPTIONS)
            for n in range(2)
        ]
        decode = [deployment.add_engine(f"decode-{n}", wide_model, *OPTIONS) for n in range(2)]
        deployment.wait_ready()
        for policy in ROUTERS:
            deployment.add_router(
                prefill, decode, "--mode", "push", "--request-timeout-s", "12",
                "--on-prefill-failure", policy, name=f"router-{policy}",
            )  # fmt: skip
        yield deployment


@pytest.fixture
async def client(deployment: Deployment) -> AsyncIterator[Client]:
    """A client; every instance is well before and whole afterwards."""
    async with open_client() as client:
        for policy in ROUTERS:
            await wait_healthy(client, deployment[f"router-{policy}"], 4)
        yield client
        deployment.restore()
        await client.wait_whole(*deployment.instances)


def begin(client: Client, router: Program, body: Json) -> asyncio.Task[Answer]:
    return asyncio.create_task(client.post(router, body))


async def first_that_writes(programs: list[Program], sizes: list[int]) -> Program:
    """Return the first whose log says, after these sizes, that it has posted a WRITE."""
    waits = {
        asyncio.create_task(program.wait_log("writing .* of xfer-", size)): program
        for program, size in zip(programs, sizes, strict=True)
    }
    done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    return waits[done.pop()]


async def first_that_has(client: Client, programs: list[Program], figure: str) -> Program:
    """Return the first program whose figure is above zero."""
    async with asyncio.timeout(10):
        while True:
            for program in programs:
                shown = await client.instance(program)
                if {**shown, **shown["exchange"]}[figure] > 0:
                    return program
            await asyncio.sleep(0.002)


def prefills(deployment: Deployment) -> list[Program]:
    return [deployment["prefill-0"], deployment["prefill-1"]]


def decodes(deployment: Deployment) -> list[Program]:
    return [deployment["decode-0"], deployment["decode-1"]]


def survivors(deployment: Deployment) -> list[Program]:
    return [program for program in deployment.instances if program.is_alive]


@pytest.mark.parametrize(
    ("policy", "streams"), [("decode", True), ("error", False), ("error", True), ("retry", True)]
)
async def test_prefill_killed_in_mid_write(
    client: Client,
    deployment: Deployment,
    case: tuple[Json, list[int]],
    policy: str,
    *,
    streams: bool,
) -> None:
    body, right = case
    sizes = [program.log_size() for program in prefills(deployment)]
    request = begin(client, deployment[f"router-{policy}"], body | {"stream": streams})
    (await first_that_writes(prefills(deployment), sizes)).kill()
    answer = await request
    if policy == "error":
        assert answer.error is not None
        assert answer.token_ids == right[: len(answer.token_ids)]
    else:
        assert answer.error is None
        assert answer.token_ids == right
    await client.wait_whole(*survivors(deployment))


@pytest.mark.parametrize("policy", ROUTERS)
async def test_prefill_stopped_in_mid_write(
    client: Client, deployment: Deployment, case: tuple[Json, list[int]], policy: str
) -> None:
    body, right = case
    sizes = [program.log_size() for program in prefills(deployment)]
    request = begin(client, deployment[f"router-{policy}"], body)
    stopped = await first_that_writes(prefills(deployment), sizes)
    stopped.pause()
    answer = await request
    assert answer.error is not None or answer.token_ids == right
    await client.wait_whole(*decodes(deployment))
    stopped.resume()


@pytest.mark.parametrize("streams", [False, True])
async def test_decode_killed_before_its_first_byte(
    client: Client, deployment: Deployment, case: tuple[Json, list[int]], *, streams: bool
) -> None:
    body, right = case
    for sender in prefills(deployment):
        sender.pause()  # So that decode waits to be written to when it is found.
    request = begin(client, deployment["router-decode"], body | {"stream": streams})
    (await first_that_has(client, decodes(deployment), "num_receives")).kill()
    for sender in prefills(deployment):
        sender.resume()
    answer = await request
    assert answer.error is None
    assert answer.token_ids == right
    await client.wait_whole(*survivors(deployment))


async def test_both_decodes_killed_before_the_first_byte(
    client: Client, deployment: Deployment, case: tuple[Json, list[int]]
) -> None:
    sizes = [program.log_size() for program in prefills(deployment)]
    request = begin(client, deployment["router-decode"], case[0])
    await first_that_writes(prefills(deployment), sizes)
    for program in decodes(deployment):
        program.kill()
    answer = await request
    assert answer.status in (502, 503)
    assert answer.error is not None
    await client.wait_whole(*survivors(deployment))


@pytest.mark.parametrize("at", ["computing", "writing", "streaming"])
async def test_client_leaves(
    client: Client, deployment: Deployment, case: tuple[Json, list[int]], at: str
) -> None:
    sizes = [program.log_size() for program in prefills(deployment)]
    body = case[0] | {"max_tokens": 300, "stream": True}
    request = begin(client, deployment["router-retry"], body)
    match at:
        case "computing":
            await first_that_has(client, prefills(deployment), "num_requests_running")
        case "writing":
            await first_that_writes(prefills(deployment), sizes)
        case _:
            await first_that_has(client, decodes(deployment), "num_requests_running")
    await leave(request)
    await client.wait_whole(*deployment.instances, timeout_s=LEAVE_BOUND_S)


async def test_requests_after_all_that_are_pushed(
    client: Client, deployment: Deployment, case: tuple[Json, list[int]]
) -> None:
    async with asyncio.timeout(20):
        for policy in ROUTERS:
            outcome = ""
            while outcome != "received":
                answer = await client.post(deployment[f"router-{policy}"], salted(case[0]))
                assert answer.token_ids == case[1]
                outcome = answer.outcome
                await asyncio.sleep(0.1)
