"""A push's sender in another pid namespace of the same host, as in another container, is stopped.

Its pid tells nothing to decode. The blocks that it may still write into are nobody's until it goes
on and says that it is done, or until it is dead.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.integration.deployment_client import Client, body_of, fresh_prompt, salted
from tests.integration.deployment_setup import Deployment, Program, open_deployment
from tests.integration.pid_namespace import NamespaceForks
from tests.integration.push_legs import CHUNK_OPTIONS
from tests.integration.test_failures_push_stopped import (
    NUM_BLOCKS,
    NUM_TOKENS,
    expect_push,
    stop_in_mid_write,
)
from tests.support.process_forks import ProcessForks

pytestmark = pytest.mark.slow

WATCHED_S = 3.0
OPTIONS = ("--transport", "nixl", "--max-held-share", "1")
"""Over TCP alone nothing lands that decode does not take in: there is nothing to wait for."""


@pytest.fixture(scope="module")
def deployment(
    forks: ProcessForks, wide_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("push-namespaces")
    with closing(NamespaceForks()) as containers, open_deployment(folder, containers) as deployment:
        deployment.add_engine("prefill", wide_model, *OPTIONS, *CHUNK_OPTIONS, "--num-blocks", "64")
        deployment.forks = forks
        deployment.add_engine("decode", wide_model, *OPTIONS, "--num-blocks", str(NUM_BLOCKS))
        deployment.wait_ready()
        yield deployment


async def num_quarantined(client: Client, program: Program) -> int:
    shown = await client.instance(program)
    return int(shown["exchange"]["num_blocks_quarantined"])


@pytest.mark.parametrize("end", ["goes on", "is killed"])
async def test_blocks_of_a_stopped_sender_stay_in_quarantine(
    client: Client, deployment: Deployment, end: str
) -> None:
    prefill, decode = deployment["prefill"], deployment["decode"]
    body = body_of(fresh_prompt(NUM_TOKENS), 6)
    right = await client.post(decode, salted(body))
    _, sending, receiving = await stop_in_mid_write(client, deployment, body)
    answer = await receiving
    assert (answer.token_ids, answer.outcome) == (right.token_ids, "unreachable")
    watched_s = time.monotonic()
    while time.monotonic() - watched_s < WATCHED_S:
        assert await num_quarantined(client, decode) > 0
        await asyncio.sleep(0.05)
    assert await client.metric(decode, "kvferry_blind_links") == 0, "its end will be noticed"
    if end == "goes on":
        prefill.resume()
        assert (await sending).status == 200
    else:
        prefill.kill()
        await asyncio.gather(sending, return_exceptions=True)
    await client.wait_whole(decode)
    prefill.restore()
    await expect_push(client, deployment, body, right.token_ids)
