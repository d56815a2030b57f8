"""The holder of a history, or its reader, is stopped (SIGSTOP) during a read-back, then goes on.

The other recovers within its bounds, and no block ever shows what a READ brought too late. Clients
that leave at the same points have the same to be undone. The KV is wide and moves over TCP, so that
a fault hits a READ that is under way for certain.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvferry.testing.process_forks import ProcessForks
from tests.integration.deployment_client import (
    Answer,
    Client,
    Json,
    body_of,
    fresh_prompt,
    open_client,
    salted,
)
from tests.integration.deployment_setup import BOUND_S, Deployment, Program, open_deployment
from tests.integration.history_legs import (
    Talk,
    Turn,
    begin_asking,
    begin_reading,
    begin_talk,
    fill,
    known_talk,
    read_back,
    restart_in_place,
)
from tests.integration.push_legs import leave, peer_of

pytestmark = pytest.mark.slow

NUM_TOKENS, NUM_NEW_TOKENS = 320, 70
MAX_ATTEMPTS = 5
NUM_BLOCKS = 64
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
async def client(deployment: Deployment) -> AsyncIterator[Client]:
    """A client; afterwards everything runs again and holds nothing."""
    async with open_client() as client:
        yield client
        deployment.restore()
        await client.wait_whole(*deployment.instances)


@pytest.fixture
async def talk(client: Client, deployment: Deployment, known_talks: list[Talk]) -> Talk:
    """A conversation whose first turn decode has just answered."""
    if not known_talks:
        known_talks.append(
            await known_talk(client, deployment["prefill"], NUM_TOKENS, NUM_NEW_TOKENS)
        )
    return await begun(client, deployment, known_talks[0])


async def begun(client: Client, deployment: Deployment, known: Talk) -> Talk:
    talk = known.again()
    await begin_talk(client, deployment["decode"], talk)
    return talk


async def second_turn(client: Client, deployment: Deployment, talk: Talk) -> Turn:
    prefill, decode = deployment["prefill"], deployment["decode"]
    history = await peer_of(client, decode)
    return Turn(client, prefill, decode, talk.second, history, bound_s=2 * BOUND_S)


async def expect_read_back(client: Client, deployment: Deployment, talk: Talk) -> None:
    """Once both are whole, a turn is read back as if nothing had been."""
    await client.wait_whole(*deployment.instances)
    talk = await begun(client, deployment, talk)
    answer = await (await second_turn(client, deployment, talk)).run()
    assert answer.token_ids == talk.second_right
    assert read_back(answer) == ("received", talk.num_held_tokens)


async def answers_of(client: Client, program: Program, bodies: list[Json]) -> list[Answer]:
    return [await client.post(program, body) for body in bodies]


@pytest.mark.parametrize("is_known", [False, True], ids=["handshake", "acquire"])
async def test_holder_stopped_before_it_is_asked(
    client: Client, deployment: Deployment, talk: Talk, *, is_known: bool
) -> None:
    """One client waits and another leaves; what is granted afterwards is for nobody, and ends."""
    prefill, decode = deployment["prefill"], deployment["decode"]
    if is_known:
        await expect_read_back(client, deployment, talk)
    else:
        restart_in_place(decode)
    turns = [await second_turn(client, deployment, each) for each in (talk, talk.again())]
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
    turn = await second_turn(client, deployment, talk)
    decode.pause()
    leg = await begin_asking(turn)
    decode.resume()
    answer = await (await turn.begin_decode(await leg))
    assert answer.token_ids == talk.second_right
    assert read_back(answer)[0] in ("received", "unreachable")


async def test_holder_stopped_during_the_read(
    client: Client, deployment: Deployment, talk: Talk
) -> None:
    """The READ hangs, and may go on at any time: its blocks are nobody's until it cannot."""
    prefill, decode = deployment["prefill"], deployment["decode"]
    others = [salted(body_of(fresh_prompt(NUM_TOKENS), 3)) for _ in range(3)]
    rights = [await client.plain(prefill, body) for body in others]
    for _ in range(MAX_ATTEMPTS):
        turn = await second_turn(client, deployment, talk)
        leg = await begin_reading(turn)
        decode.pause()
        first = await leg
        assert first.elapsed_s < BOUND_S
        if read_back(first)[0] != "received":
            break
        decode.resume()
        talk = await begun(client, deployment, talk)
    assert read_back(first) == ("slow", 0)
    in_quarantine = await answers_of(client, prefill, others)
    await client.withdraw(prefill, first.offered)
    await client.wait_whole(prefill)
    afterwards = await answers_of(client, prefill, [salted(body) for body in others])
    assert [answer.token_ids for answer in [*in_quarantine, *afterwards]] == 2 * rights
    decode.resume()
    await client.wait_whole(decode)
    again = await answers_of(client, prefill, others)
    assert [answer.token_ids for answer in again] == rights
    answer = await second_turn(client, deployment, talk)
    assert (await answer.run()).token_ids == talk.second_right
    await expect_read_back(client, deployment, talk)


async def test_reader_stopped_until_the_blocks_are_other_prompts(
    client: Client, deployment: Deployment, talk: Talk
) -> None:
    prefill, decode = deployment["prefill"], deployment["decode"]
    for _ in range(MAX_ATTEMPTS):
        turn = await second_turn(client, deployment, talk)
        leg = await begin_reading(turn)
        prefill.pause()
        await client.wait_whole(decode)  # The lease is over.
        await fill(client, decode, NUM_BLOCKS // 20 + 1, NUM_TOKENS)
        prefill.resume()
        first = await leg
        answer = await (await turn.begin_decode(first))
        assert answer.token_ids == talk.second_right
        if read_back(first)[0] != "received":
            break
        talk = await begun(client, deployment, talk)
    assert read_back(first)[0] in ("expired", "slow", "failed")
    await expect_read_back(client, deployment, talk)


@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_client_leaves_during_the_read(
    client: Client, deployment: Deployment, talk: Talk, mode: str
) -> None:
    turn = await second_turn(client, deployment, talk)
    turn.mode = mode
    leg = await begin_reading(turn)
    await leave(leg)
    await expect_read_back(client, deployment, talk)
