"""The holder of a history is stopped (SIGSTOP) during a read-back, then goes on.

The reader recovers within its bounds, and no block ever shows what a READ brought too late. Clients
that leave at the same points have the same to be undone. The KV is wide and moves over TCP, so that
a fault hits a READ that is under way for certain.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.deployment_client import (
    Client,
    Json,
    body_of,
    fresh_prompt,
    salted,
)
from tests.integration.deployment_setup import BOUND_S, Deployment, Program, open_deployment
from tests.integration.history_legs import (
    Talk,
    begin_asking,
    begin_reading,
    begin_talk,
    known_talk,
    read_back,
    restart_in_place,
    second_turn,
)
from tests.integration.push_legs import leave
from tests.support.process_forks import ProcessForks

pytestmark = pytest.mark.slow

NUM_TOKENS, NUM_NEW_TOKENS = 320, 70
MAX_ATTEMPTS = 5
NUM_BLOCKS = 64
Case = tuple[Json, list[int]]
OPTIONS = (
    "--transport", "nixl", "--ucx-tls", "tcp", "--num-blocks", str(NUM_BLOCKS),
    "--max-held-share", "1", "--read-back-timeout-s", "3",
)  # fmt: skip


@pytest.fixture(scope="module")
def deployment(
    forks: ProcessForks, wide_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    with open_deployment(tmp_path_factory.mktemp("history-stopped"), forks) as deployment:
        for name in ("prefill", "decode"):
            deployment.add_engine(name, wide_model, *OPTIONS)
        deployment.wait_ready()
        yield deployment


@pytest.fixture
async def talk(client: Client, deployment: Deployment, known_talks: list[Talk]) -> Talk:
    """A conversation whose first turn decode has just answered."""
    if not known_talks:
        known_talks.append(
            await known_talk(client, deployment["prefill"], NUM_TOKENS, NUM_NEW_TOKENS)
        )
    return await begun(client, deployment, known_talks[0])


@pytest.fixture(scope="module")
def known_cases() -> list[Case]:
    return []


@pytest.fixture
async def others(client: Client, deployment: Deployment, known_cases: list[Case]) -> list[Case]:
    """Prompts of nobody's conversation that together fill a pool, and what is right for each."""
    while len(known_cases) < 3:
        body = body_of(fresh_prompt(NUM_TOKENS), 3)
        known_cases.append((body, await client.plain(deployment["prefill"], body)))
    return resalted(known_cases)


def resalted(cases: list[Case]) -> list[Case]:
    return [(salted(body), right) for body, right in cases]


async def begun(client: Client, deployment: Deployment, known: Talk) -> Talk:
    talk = known.again()
    await begin_talk(client, deployment["decode"], talk)
    return talk


async def expect_read_back(client: Client, deployment: Deployment, talk: Talk) -> None:
    """Once both are whole, a turn is read back as if nothing had been."""
    await client.wait_whole(*deployment.instances)
    talk = await begun(client, deployment, talk)
    prefill, decode = deployment["prefill"], deployment["decode"]
    answer = await (await second_turn(client, prefill, decode, talk)).run()
    assert answer.token_ids == talk.second_right
    assert read_back(answer) == ("received", talk.num_held_tokens)


async def expect_answers(
    client: Client, program: Program, cases: list[Case], *, is_cached: bool = False
) -> None:
    for body, right in cases:
        answer = await client.post(program, body)
        assert answer.token_ids == right
        assert answer.report["num_cached_tokens"] > 0 or not is_cached


@pytest.mark.parametrize(
    "is_known",
    [pytest.param(False, marks=pytest.mark.soak, id="handshake"), pytest.param(True, id="acquire")],
)
async def test_holder_stopped_before_it_is_asked(
    client: Client, deployment: Deployment, talk: Talk, *, is_known: bool
) -> None:
    """One client waits and another leaves; what is granted afterwards is for nobody, and ends."""
    prefill, decode = deployment["prefill"], deployment["decode"]
    if is_known:
        await expect_read_back(client, deployment, talk)
    else:
        restart_in_place(decode)
    turns = [await second_turn(client, prefill, decode, each) for each in (talk, talk.again())]
    decode.pause()
    asking, left = [turn.begin_prefill() for turn in turns]
    await client.wait_figure(prefill, "num_receives", 2)
    await leave(left)
    first = await asking
    assert read_back(first) == ("unreachable", 0)
    assert first.elapsed_s < BOUND_S
    decode.resume()
    answer = await (await turns[0].begin_decode(first))
    assert answer.token_ids == talk.second_right
    await expect_read_back(client, deployment, talk)


async def test_holder_stopped_for_a_moment_while_it_is_asked(
    client: Client, deployment: Deployment, talk: Talk
) -> None:
    decode = deployment["decode"]
    turn = await second_turn(client, deployment["prefill"], decode, talk)
    decode.pause()
    leg = await begin_asking(turn)
    decode.resume()
    answer = await (await turn.begin_decode(await leg))
    assert answer.token_ids == talk.second_right
    assert read_back(answer)[0] in ("received", "unreachable")


async def test_holder_stopped_during_the_read(
    client: Client, deployment: Deployment, talk: Talk, others: list[Case]
) -> None:
    """The READ hangs, and may go on at any time: its blocks are nobody's until it cannot."""
    prefill, decode = deployment["prefill"], deployment["decode"]
    for _ in range(MAX_ATTEMPTS):
        turn = await second_turn(client, prefill, decode, talk)
        leg = await begin_reading(turn)
        decode.pause()
        first = await leg
        assert first.elapsed_s < BOUND_S
        if read_back(first)[0] != "received":
            break
        decode.resume()
        talk = await begun(client, deployment, talk)
    assert read_back(first) == ("slow", 0)
    await expect_answers(client, prefill, others)
    await client.withdraw(prefill, first.offered)
    await client.wait_whole(prefill)
    others = resalted(others)
    await expect_answers(client, prefill, others)
    decode.resume()
    await client.wait_whole(decode)
    await expect_answers(client, prefill, others, is_cached=True)
    await expect_read_back(client, deployment, talk)


async def test_holder_filled_with_other_prompts_during_the_read(
    client: Client, deployment: Deployment, talk: Talk, others: list[Case]
) -> None:
    """They get every block but those that a lease keeps; the reader stands still meanwhile."""
    prefill, decode = deployment["prefill"], deployment["decode"]
    turn = await second_turn(client, prefill, decode, talk)
    leg = await begin_reading(turn)
    prefill.pause()
    await expect_answers(client, decode, others)
    prefill.resume()
    answer = await (await turn.begin_decode(await leg))
    assert answer.token_ids == talk.second_right
    # The lease may be over first, where others take long.
    assert read_back(answer)[0] in ("received", "expired", "slow")


@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_client_leaves_during_the_read(
    client: Client, deployment: Deployment, talk: Talk, others: list[Case], mode: str
) -> None:
    """The READ goes on all the same once the holder does, in blocks that nobody else has."""
    prefill, decode = deployment["prefill"], deployment["decode"]
    turn = await second_turn(client, prefill, decode, talk, mode)
    leg = await begin_reading(turn)
    decode.pause()
    leg.cancel()
    await asyncio.gather(leg, return_exceptions=True)
    await expect_answers(client, prefill, others[:2])
    decode.resume()
    await client.wait_whole(prefill, decode)
    await expect_answers(client, prefill, others[:2], is_cached=True)
    await expect_read_back(client, deployment, talk)
