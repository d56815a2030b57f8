"""More pushes wait for one prefill instance than anybody counted on, and it goes: all must end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.integration.deployment_client import (
    Client,
    Json,
    body_of,
    fresh_prompt,
    new_transfer,
    prompt_of,
)
from tests.integration.deployment_setup import BOUND_S, Deployment, Program, open_deployment
from tests.integration.push_legs import Push, peer_of
from tests.support.process_forks import ProcessForks

pytestmark = pytest.mark.slow

NUM_PUSHES = 1100
OPTIONS = ("--transport", "shm", "--num-blocks", "512", "--recompute-threshold-tokens", "0")
WHOLE_S = 60.0


@pytest.fixture(scope="module")
def deployment(
    forks: ProcessForks, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    with open_deployment(tmp_path_factory.mktemp("push-crowd"), forks) as deployment:
        for name in ("prefill", "decode"):
            deployment.add_engine(name, tiny_model, *OPTIONS)
        deployment.wait_ready()
        yield deployment


async def decode_leg(client: Client, deployment: Deployment, peer: Json, number: int) -> str:
    params = {
        "transfer_id": new_transfer(), "role": "decode", "mode": "push", "peer": peer,
    }  # fmt: skip
    body = body_of(prompt_of(20, 10_000 + number), 1) | {"kv_transfer_params": params}
    answer = await client.post(deployment["decode"], body, bound_s=WHOLE_S)
    assert answer.status == 200, answer.json
    return answer.outcome


async def wait_waiting(client: Client, decode: Program) -> None:
    async with asyncio.timeout(WHOLE_S):
        while (await client.instance(decode))["exchange"]["num_receives"] < NUM_PUSHES:
            await asyncio.sleep(0.05)


async def test_every_push_of_a_killed_prefill_ends(client: Client, deployment: Deployment) -> None:
    prefill, decode = deployment["prefill"], deployment["decode"]
    peer = await peer_of(client, prefill)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        crowd = Client(session)
        legs = [
            asyncio.create_task(decode_leg(crowd, deployment, peer, number))
            for number in range(NUM_PUSHES)
        ]
        await wait_waiting(client, decode)
        prefill.kill()
        outcomes = await asyncio.gather(*legs)
    assert set(outcomes) == {"unreachable"}
    await client.wait_whole(decode)
    prefill.restore()
    body = body_of(fresh_prompt(200))
    expected = await client.plain(prefill, body)
    async with asyncio.timeout(BOUND_S):  # what a peer that was lost rests for is over by itself
        while True:
            push = Push(client, body, new_transfer(), await peer_of(client, prefill))
            sent, received = push.begin_prefill(prefill), push.begin_decode(decode)
            answer = await received
            await sent
            assert answer.token_ids == expected
            if answer.outcome == "received":
                return
