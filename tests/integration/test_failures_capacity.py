"""Pools that are too small or momentarily full, and prompts beyond the context."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.deployment_client import (
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

NUM_PREFILL_BLOCKS, NUM_DECODE_BLOCKS, NUM_LARGE_BLOCKS = 64, 24, 256
MAX_MODEL_LEN = 4096
LEASE_S = 1.5


@pytest.fixture(scope="module")
def deployment(
    forks: ProcessForks, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    common = (
        *("--transport", "shm", "--max-model-len", str(MAX_MODEL_LEN)),
        *("--max-held-share", "1", "--handoff-lease-s", str(LEASE_S)),
    )
    sizes = {
        "prefill": NUM_PREFILL_BLOCKS,
        "decode": NUM_DECODE_BLOCKS,
        "large": NUM_LARGE_BLOCKS,
        "large-prefill": NUM_LARGE_BLOCKS,
    }
    with open_deployment(tmp_path_factory.mktemp("capacity"), forks) as deployment:
        for name, num_blocks in sizes.items():
            deployment.add_engine(name, tiny_model, *common, "--num-blocks", str(num_blocks))
        deployment.wait_ready()
        deployment.add_router([deployment["prefill"]], [deployment["decode"]])
        yield deployment


@pytest.mark.parametrize("streams", [False, True])
async def test_a_prompt_beyond_decodes_pool_is_refused_with_both_numbers(
    client: Client, deployment: Deployment, *, streams: bool
) -> None:
    body = body_of(fresh_prompt(500), 8, stream=streams)
    answer = await client.post(deployment["router"], body)
    assert answer.status == 400
    assert answer.error is not None
    assert answer.error["code"] == "kv_pool_too_small"
    assert "needs 32 KV blocks" in answer.error["message"]
    assert f"has {NUM_DECODE_BLOCKS}" in answer.error["message"]
    await client.wait_whole(deployment["prefill"], timeout_s=2.0)


async def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(
    client: Client, deployment: Deployment
) -> None:
    for program in (deployment["router"], deployment["prefill"], deployment["decode"]):
        answer = await client.post(program, body_of(fresh_prompt(MAX_MODEL_LEN + 3)))
        assert answer.status == 400
        assert answer.error is not None
        assert answer.error["code"] == "context_length_exceeded"
        assert str(MAX_MODEL_LEN) in answer.error["message"]
        assert str(MAX_MODEL_LEN + 3) in answer.error["message"]


async def test_a_handoff_waits_for_a_full_decode_longer_than_its_lease(
    client: Client, deployment: Deployment
) -> None:
    """Heartbeats keep prefill's hold while decode has no blocks for it."""
    prefill, large = deployment["large-prefill"], deployment["large"]
    body = body_of(fresh_prompt(2700))
    right = await client.plain(prefill, body)
    other = body_of(fresh_prompt(1500), 2500)
    occupant = asyncio.create_task(client.post(large, other, bound_s=60.0))
    await client.wait_figure(large, "num_requests_running", 1)
    first = await client.prefill(prefill, body)
    leg = asyncio.create_task(client.decode(large, body, first.offered, bound_s=3 * BOUND_S))
    await client.wait_figure(large, "num_requests_waiting", 1)
    await asyncio.sleep(LEASE_S + 0.5)  # Longer than an unrenewed hold lasts.
    assert not occupant.done()
    assert (await client.instance(prefill))["exchange"]["num_handoffs_held"] == 1
    occupant.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await occupant
    answer = await leg
    assert answer.token_ids == right
    assert answer.outcome == "received"


async def test_requests_wait_for_a_momentarily_full_decode(
    client: Client, deployment: Deployment
) -> None:
    bodies = [body_of(fresh_prompt(250), 40) for _ in range(4)]
    right = [await client.plain(deployment["prefill"], body) for body in bodies]
    answers = await asyncio.gather(
        *(client.post(deployment["router"], body, bound_s=2 * BOUND_S) for body in bodies)
    )
    assert [answer.token_ids for answer in answers] == right


async def test_prefill_full_of_handoffs_gives_up_the_oldest(
    client: Client, deployment: Deployment
) -> None:
    prefill, decode = deployment["prefill"], deployment["decode"]
    bodies = [salted(body_of(fresh_prompt(300))) for _ in range(4)]
    right = [await client.plain(decode, body) for body in bodies]
    legs = [await client.prefill(prefill, body) for body in bodies]
    answers = [
        await client.decode(decode, body, leg.offered)
        for body, leg in zip(bodies, legs, strict=True)
    ]
    assert [answer.token_ids for answer in answers] == right
    assert [answer.outcome for answer in answers] == ["declined", *["received"] * 3]


async def test_preemption_after_a_handoff_keeps_the_tokens(
    client: Client, deployment: Deployment
) -> None:
    bodies = [body_of(fresh_prompt(100), 60, seed=7, temperature=0.8, top_k=4) for _ in range(3)]
    right = [await client.plain(deployment["prefill"], body) for body in bodies]
    answers = await asyncio.gather(
        *(client.post(deployment["router"], body, bound_s=2 * BOUND_S) for body in bodies)
    )
    assert [answer.token_ids for answer in answers] == right
    assert sum(answer.report["num_preemptions"] for answer in answers) > 0
