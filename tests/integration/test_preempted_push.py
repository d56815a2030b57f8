"""A prefill that is preempted before decode registers is pushed from its new blocks, never the old.

Three older generations take the blocks that it had computed into, and write them over; only then
decode's leg comes, as it does where decode was chosen late, stood still or had no room. What was
ready before the preemption is another request's by now.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.clear_answers import Judge
from tests.integration.deployment_client import (
    PATH,
    Client,
    Json,
    body_of,
    new_transfer,
    prompt_of,
    salted,
)
from tests.integration.deployment_setup import BOUND_S, Deployment, Program, open_deployment
from tests.integration.push_legs import Push, num_registered, peer_of, wait_registered
from tests.support.process_forks import ProcessForks
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

NUM_TOKENS, NUM_ANSWERED = 600, 40
NUM_WARM_TOKENS = 226
"""Decode knows the beginning of the prompt, and registers from its block 14 on."""
NUM_OLDER, NUM_OLDER_TOKENS, NUM_OLDER_ANSWERED = 3, 240, 560
NUM_ANSWERED_BEFORE = 8
"""By each of the older ones: then the prefill gets its blocks."""
NUM_ANSWERED_SINCE = 784
"""By all: then they have the prefill's blocks, and have filled them."""
LONG_BOUND_S = 8 * BOUND_S


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose steps take long enough to see what happens in between."""
    return make_tiny_model(tmp_path_factory.mktemp("deep") / "model", num_layers=8)


@pytest.fixture
def deployment(forks: ProcessForks, deep_model: Path, tmp_path: Path) -> Iterator[Deployment]:
    small = ("--num-blocks", "102", "--max-num-seqs", "8", "--max-num-batched-tokens", "10")
    with open_deployment(tmp_path, forks) as deployment:
        deployment.add_engine("prefill", deep_model, *small)
        deployment.add_engine("decode", deep_model, "--num-blocks", "200")
        deployment.wait_ready()
        yield deployment


@dataclass(slots=True)
class Older:
    """A plain generation on the prefill instance: how many tokens it has answered so far."""

    body: Json
    num_answered: int = 0

    async def run(self, client: Client, program: Program) -> None:
        """Count its tokens as they come."""
        url = program.url + PATH
        async with (
            asyncio.timeout(LONG_BOUND_S),
            client.session.post(url, json=self.body | {"stream": True}) as response,
        ):
            async for line in response.content:
                if line.startswith(b"data: {"):
                    choices = json.loads(line.removeprefix(b"data: ")).get("choices", [])
                    self.num_answered += sum(len(c.get("token_ids") or []) for c in choices)


async def wait_answered(olders: list[Older], each: int, together: int) -> None:
    """Return once the older generations are so far."""
    async with asyncio.timeout(LONG_BOUND_S):
        while (
            min(older.num_answered for older in olders) < each
            or sum(older.num_answered for older in olders) < together
        ):
            await asyncio.sleep(0.002)


async def num_waiting(client: Client, program: Program) -> int:
    """Requests without blocks."""
    return int((await client.instance(program))["num_requests_waiting"])


@pytest.mark.parametrize("is_warm", [True, False], ids=["warm", "cold"])
async def test_a_preempted_prefill_is_pushed_from_its_new_blocks(
    client: Client, deployment: Deployment, deep_model: Path, is_warm: bool
) -> None:
    prefill, decode = deployment["prefill"], deployment["decode"]
    body = body_of(prompt_of(NUM_TOKENS, 4242), NUM_ANSWERED)
    right = await client.plain(decode, body)
    # Beyond a tie, another division into chunks may rightly answer another token.
    right = right[: Judge(deep_model).num_clear(body, right)]
    body |= {"max_tokens": len(right)}
    if is_warm:
        await client.post(decode, body_of(body["prompt"][:NUM_WARM_TOKENS], 1))
    olders = [
        Older(salted(body_of(prompt_of(NUM_OLDER_TOKENS, 77 + n), NUM_OLDER_ANSWERED)))
        for n in range(NUM_OLDER)
    ]
    running = [asyncio.create_task(older.run(client, prefill)) for older in olders]
    await wait_answered(olders, NUM_ANSWERED_BEFORE, 0)
    peer = await peer_of(client, prefill)
    push = Push(client, body, new_transfer(), peer, bound_s=LONG_BOUND_S)
    sending = push.begin_prefill(prefill)
    await wait_answered(olders, 0, NUM_ANSWERED_SINCE)
    count = await num_registered(client, prefill)
    receiving = push.begin_decode(decode)
    await wait_registered(client, prefill, count + 1)
    # Otherwise it was registered before the prefill was preempted, or after it was done.
    assert await num_waiting(client, prefill) > 0
    assert not sending.done()
    sent, answer = await asyncio.gather(sending, receiving)
    await asyncio.gather(*running)
    assert answer.token_ids == right
    assert answer.outcome == "received"
    assert sent.token_ids == right[:1]
    # What decode keeps of the prompt is the prompt's, for whoever comes next.
    assert (await client.post(decode, body)).token_ids == right
