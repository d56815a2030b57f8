"""Read-backs where pools are small: what is retained goes last, and nobody waits for nobody."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.integration.deployment_client import (
    Client,
    body_of,
    fresh_prompt,
    open_client,
    salted,
)
from tests.integration.deployment_setup import BOUND_S, Deployment, open_deployment
from tests.integration.history_legs import (
    Talk,
    begin_asking,
    begin_talk,
    fill,
    known_talk,
    read_back,
    reset_prefix_cache,
    run_all,
    second_turn,
)
from tests.support.process_forks import ProcessForks

pytestmark = pytest.mark.slow

NUM_TOKENS, NUM_NEW_TOKENS = 150, 70
NUM_HELD_BLOCKS = 10
"""The last of them is filled in part."""
HOLDER_BLOCKS = 60
RETENTION_S = 2.0
OPTIONS = ("--transport", "nixl", "--max-held-share", "1", "--enable-dev-endpoints")
NUM_OCCUPANTS = 3
MAX_ATTEMPTS = 5
POOLS = {
    # A prefill of a few hundred tokens takes many steps there.
    "prefill": ("--num-blocks", "95", "--max-num-seqs", "4", "--max-num-batched-tokens", "8"),
    "decode": ("--num-blocks", str(HOLDER_BLOCKS)),
    "brief": ("--num-blocks", str(HOLDER_BLOCKS), "--retention-s", str(RETENTION_S)),
    "left": ("--num-blocks", "40"),
    "right": ("--num-blocks", "40"),
}


@pytest.fixture(scope="module")
def deployment(
    forks: ProcessForks, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    with open_deployment(tmp_path_factory.mktemp("history-pressure"), forks) as deployment:
        for name, pool in POOLS.items():
            deployment.add_engine(name, tiny_model, *OPTIONS, *pool)
        deployment.wait_ready()
        yield deployment


@pytest.fixture
async def client(deployment: Deployment) -> AsyncIterator[Client]:
    """A client; no instance knows an earlier prompt, and afterwards everything is whole."""
    async with open_client() as client:
        for program in deployment.instances:
            await reset_prefix_cache(client, program)
        yield client
        deployment.restore()
        await client.wait_whole(*deployment.instances)


@pytest.fixture
async def talk(client: Client, deployment: Deployment, known_talks: list[Talk]) -> Talk:
    """A conversation that no instance knows."""
    if not known_talks:
        plain = deployment["prefill"]
        known_talks.append(await known_talk(client, plain, NUM_TOKENS, NUM_NEW_TOKENS))
    assert known_talks[0].num_held_blocks == NUM_HELD_BLOCKS
    return known_talks[0].again()


@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_prompts_that_fit_beside_it_leave_a_history_alone(
    client: Client, deployment: Deployment, talk: Talk, mode: str
) -> None:
    prefill, decode = deployment["prefill"], deployment["decode"]
    await begin_talk(client, decode, talk)
    await fill(client, decode, 6, 16 * (HOLDER_BLOCKS - NUM_HELD_BLOCKS - 1))
    answer = await (await second_turn(client, prefill, decode, talk, mode)).run()
    assert answer.token_ids == talk.second_right
    assert read_back(answer) == ("received", talk.num_held_tokens)


@pytest.mark.parametrize("num_lost", [1, 4, 6, 7, 9])
async def test_a_prompt_that_needs_its_blocks_takes_a_historys_tail(
    client: Client, deployment: Deployment, talk: Talk, num_lost: int
) -> None:
    """What is left is read back, unless that is less than the threshold."""
    prefill, decode = deployment["prefill"], deployment["decode"]
    await begin_talk(client, decode, talk)
    num_evicted = (await client.instance(decode))["retained"]["num_evicted"]
    await fill(client, decode, 1, 16 * (HOLDER_BLOCKS - NUM_HELD_BLOCKS + num_lost))
    shown = (await client.instance(decode))["retained"]
    assert shown["num_evicted"] == num_evicted + num_lost
    answer = await (await second_turn(client, prefill, decode, talk)).run()
    assert answer.token_ids == talk.second_right
    num_left = 16 * (NUM_HELD_BLOCKS - num_lost)
    assert read_back(answer) == (("received", num_left) if num_left >= 64 else ("gone", 0))


@pytest.mark.parametrize(("after_s", "is_over"), [(1.0, False), (3.0, True)])
async def test_a_turn_shortly_before_and_after_the_end_of_retention(
    client: Client, deployment: Deployment, talk: Talk, after_s: float, *, is_over: bool
) -> None:
    prefill, brief = deployment["prefill"], deployment["brief"]
    began_s = time.monotonic()
    await begin_talk(client, brief, talk)
    answered_s = time.monotonic()
    await asyncio.sleep((answered_s if is_over else began_s) + after_s - time.monotonic())
    await fill(client, brief, 3, 16 * (HOLDER_BLOCKS - NUM_HELD_BLOCKS - 1))
    answer = await (await second_turn(client, prefill, brief, talk)).run()
    assert answer.token_ids == talk.second_right
    if is_over:
        assert read_back(answer) == ("gone", 0)
        assert (await client.instance(brief))["retained"]["ends"]["expired"] >= 1
    elif time.monotonic() < began_s + RETENTION_S:
        assert read_back(answer) == ("received", talk.num_held_tokens)


async def test_a_prefill_preempted_after_its_read_back(
    client: Client, deployment: Deployment
) -> None:
    """Older requests grow into its blocks while it computes, for 140 steps, what is new."""
    prefill, decode = deployment["prefill"], deployment["decode"]
    talk = await known_talk(client, prefill, NUM_TOKENS, 700)
    occupant = body_of(fresh_prompt(100), 300)
    occupant_right = await client.plain(prefill, occupant)
    for _ in range(MAX_ATTEMPTS):
        talk = talk.again()
        await begin_talk(client, decode, talk)
        turn = await second_turn(client, prefill, decode, talk)
        occupants = [
            asyncio.create_task(client.post(prefill, salted(occupant), bound_s=2 * BOUND_S))
            for _ in range(NUM_OCCUPANTS)
        ]
        await client.wait_figure(prefill, "num_requests_running", NUM_OCCUPANTS)
        first = await turn.begin_prefill()
        answers = await asyncio.gather(*occupants)
        assert [answer.token_ids for answer in answers] == [occupant_right] * NUM_OCCUPANTS
        answer = await (await turn.begin_decode(first))
        assert answer.token_ids == talk.second_right
        if read_back(first)[0] == "received" and first.report["num_preemptions"] > 0:
            return
    pytest.fail(f"it was never preempted: {first.report}")


async def test_a_request_that_wants_the_blocks_of_a_read_back_under_way(
    client: Client, deployment: Deployment, talk: Talk
) -> None:
    """It waits for no longer than the holder may take to answer."""
    left, decode = deployment["left"], deployment["decode"]
    occupant = body_of(fresh_prompt(100), 500)
    occupant_right = await client.plain(left, occupant)
    await begin_talk(client, decode, talk)
    turn = await second_turn(client, left, decode, talk)
    decode.pause()
    occupying = asyncio.create_task(client.post(left, salted(occupant), bound_s=2 * BOUND_S))
    await client.wait_figure(left, "num_requests_running", 1)
    leg = await begin_asking(turn)
    first = await leg
    assert first.elapsed_s < BOUND_S
    assert read_back(first) == ("unreachable", 0)
    assert (await occupying).token_ids == occupant_right
    decode.resume()
    answer = await (await turn.begin_decode(first))
    assert answer.token_ids == talk.second_right


@pytest.mark.parametrize("modes", [("pull", "pull"), ("push", "push"), ("pull", "push")])
async def test_two_instances_read_each_others_histories_at_once(
    client: Client, deployment: Deployment, talk: Talk, modes: tuple[str, str]
) -> None:
    """Each prefills what the other holds; neither pool has room for all of its turns at once."""
    left, right = deployment["left"], deployment["right"]
    num_read_back = 0
    for _ in range(4):
        talks = [talk.again() for _ in range(6)]
        pairs = list(itertools.islice(itertools.cycle([(left, right), (right, left)]), len(talks)))
        for (_, holder), each in zip(pairs, talks, strict=True):
            await begin_talk(client, holder, each)
        turns = [
            await second_turn(client, reader, holder, each, mode)
            for (reader, holder), each, mode in zip(
                pairs, talks, itertools.cycle(modes), strict=False
            )
        ]
        answers = await run_all(turns)
        assert [answer.token_ids for answer in answers] == [talk.second_right] * len(talks)
        num_read_back += sum(read_back(answer)[0] == "received" for answer in answers)
        await client.wait_whole(left, right)
    assert num_read_back > 0
