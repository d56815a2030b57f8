"""Pushes between real processes are exact, whenever decode registers its blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.deployment_client import (
    Client,
    body_of,
    fresh_prompt,
    new_transfer,
    salted,
)
from tests.integration.deployment_setup import Deployment, open_deployment
from tests.integration.push_legs import (
    CHUNK_OPTIONS,
    Push,
    num_registered,
    peer_of,
    wait_registered,
)
from tests.support.process_forks import ProcessForks

pytestmark = pytest.mark.slow

TRANSPORTS = {
    "nixl": ("--transport", "nixl"),
    "shm": ("--transport", "shm"),
    "tcp": ("--transport", "nixl", "--ucx-tls", "tcp"),
}


@pytest.fixture(scope="module", params=list(TRANSPORTS))
def deployment(
    request: pytest.FixtureRequest,
    forks: ProcessForks,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Deployment]:
    options = (*TRANSPORTS[request.param], "--num-blocks", "600", "--max-held-share", "1")
    with open_deployment(tmp_path_factory.mktemp("push-exact"), forks) as deployment:
        deployment.add_engine("prefill", tiny_model, *options, *CHUNK_OPTIONS)
        deployment.add_engine("decode", tiny_model, *options)
        deployment.wait_ready()
        yield deployment


@pytest.mark.parametrize("num_tokens", [257, 2049])
@pytest.mark.parametrize("when", ["before", "middle", "after"])
async def test_tokens_are_those_of_one_instance(
    client: Client, deployment: Deployment, when: str, num_tokens: int
) -> None:
    prefill, decode = deployment["prefill"], deployment["decode"]
    body = body_of(fresh_prompt(num_tokens), 12)
    right = await client.plain(prefill, body)
    push = Push(client, salted(body), new_transfer(), await peer_of(client, prefill))
    since = prefill.log_size()
    match when:
        case "before":
            count = await num_registered(client, prefill)
            receiving = push.begin_decode(decode)
            await wait_registered(client, prefill, count + 1)
            sending = push.begin_prefill(prefill)
        case "middle":
            sending = push.begin_prefill(prefill)
            await client.wait_figure(prefill, "num_requests_running", 1)
            receiving = push.begin_decode(decode)
        case _:
            sending = push.begin_prefill(prefill)
            await sending
            receiving = push.begin_decode(decode)
    sent, answer = await asyncio.gather(sending, receiving)
    assert answer.token_ids == right
    assert sent.token_ids == right[:1]
    assert answer.outcome == "received"
    assert answer.report["num_received_tokens"] == num_tokens
    assert answer.report["num_computed_prompt_tokens"] == 0
    num_writes = prefill.log()[since:].count(f"blocks of {push.transfer_id}")
    if when == "after":
        assert num_writes == 1
    elif when == "before" or num_tokens > 2000:
        assert num_writes > 1


async def test_a_drawn_answer_is_that_of_one_instance(
    client: Client, deployment: Deployment
) -> None:
    prefill, decode = deployment["prefill"], deployment["decode"]
    body = body_of(fresh_prompt(300), 20, temperature=0.9, top_k=4, seed=11)
    right = await client.plain(prefill, body)
    push = Push(client, salted(body), new_transfer(), await peer_of(client, prefill))
    receiving, sending = push.begin_decode(decode), push.begin_prefill(prefill)
    assert (await receiving).token_ids == right
    assert (await sending).token_ids == right[:1]
