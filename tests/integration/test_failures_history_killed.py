"""The holder of a history, or its reader, is killed at each point of a read-back.

Right tokens in time, and whole pools. The KV is wide and moves over TCP, so that a fault hits a
READ that is under way for certain.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.integration.deployment_client import Answer, Client, Json
from tests.integration.deployment_setup import BOUND_S, Deployment, open_deployment
from tests.integration.history_legs import (
    Talk,
    Turn,
    begin_asking,
    begin_reading,
    begin_talk,
    known_talk,
    num_leases,
    num_read_backs,
    read_back,
    restart_in_place,
)
from tests.integration.push_legs import peer_of
from tests.support.process_forks import ProcessForks

pytestmark = pytest.mark.slow

NUM_TOKENS, NUM_NEW_TOKENS = 320, 70
MAX_ATTEMPTS = 5
READ_BACK_TIMEOUT_S = 3.0
"""More than what a peer has for an answer, so that a silent one counts as unreachable."""
OPTIONS = (
    "--transport", "nixl", "--ucx-tls", "tcp", "--num-blocks", "64", "--max-held-share", "1",
    "--read-back-timeout-s", str(READ_BACK_TIMEOUT_S),
)  # fmt: skip


@pytest.fixture(scope="module")
def deployment(
    forks: ProcessForks, wide_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    with open_deployment(tmp_path_factory.mktemp("history-killed"), forks) as deployment:
        for name in ("prefill", "decode", "decode-other"):
            deployment.add_engine(name, wide_model, *OPTIONS)
        deployment.wait_ready()
        yield deployment


@pytest.fixture
async def talk(client: Client, deployment: Deployment, known_talks: list[Talk]) -> Talk:
    """A conversation whose first turn decode has just answered."""
    if not known_talks:
        other = deployment["decode-other"]
        known_talks.append(await known_talk(client, other, NUM_TOKENS, NUM_NEW_TOKENS))
    talk = known_talks[0].again()
    await begin_talk(client, deployment["decode"], talk)
    return talk


@pytest.fixture
async def history(client: Client, deployment: Deployment) -> Json:
    """What a router knows of the holder before anything happens to it."""
    return await peer_of(client, deployment["decode"])


def elsewhere(
    client: Client, deployment: Deployment, talk: Talk, history: Json, mode: str = "pull"
) -> Turn:
    """The next turn, decoded by another instance than the one that holds the history."""
    prefill, other = deployment["prefill"], deployment["decode-other"]
    return Turn(client, prefill, other, talk.second, history, mode)


async def finish(turn: Turn, prefill: Answer) -> Answer:
    return await (await turn.begin_decode(prefill))


async def test_holder_killed_between_the_turns(
    client: Client, deployment: Deployment, talk: Talk, history: Json
) -> None:
    prefill = deployment["prefill"]
    num_unreachable = await num_read_backs(client, prefill, "unreachable")
    deployment["decode"].kill()
    answer = await elsewhere(client, deployment, talk, history).run()
    assert answer.token_ids == talk.second_right
    assert read_back(answer) == ("unreachable", 0)
    assert await num_read_backs(client, prefill, "unreachable") == num_unreachable + 1
    await client.wait_whole(prefill, deployment["decode-other"])


async def test_holder_restarted_in_its_place_between_the_turns(
    client: Client, deployment: Deployment, talk: Talk, history: Json
) -> None:
    """Nothing of its earlier start is there, whatever the router knows; the next turn is."""
    prefill, decode = deployment["prefill"], deployment["decode"]
    restart_in_place(decode)
    present = await peer_of(client, decode)
    assert present["control_address"] == history["control_address"]
    assert present["epoch"] != history["epoch"]
    answer = await Turn(client, prefill, decode, talk.second, history).run()
    assert answer.token_ids == talk.second_right
    assert read_back(answer) == ("gone", 0)
    again = talk.again()
    await begin_talk(client, decode, again)
    await client.wait_whole(prefill)
    answer = await Turn(client, prefill, decode, again.second, present).run()
    assert answer.token_ids == talk.second_right
    assert read_back(answer) == ("received", talk.num_held_tokens)


async def test_holder_killed_while_it_is_asked(
    client: Client, deployment: Deployment, talk: Talk, history: Json
) -> None:
    decode = deployment["decode"]
    turn = elsewhere(client, deployment, talk, history)
    decode.pause()
    leg = await begin_asking(turn)
    decode.kill()
    prefill = await leg
    assert prefill.elapsed_s < BOUND_S
    assert read_back(prefill) == ("unreachable", 0)
    answer = await finish(turn, prefill)
    assert answer.token_ids == talk.second_right


@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_holder_killed_during_the_read(
    client: Client, deployment: Deployment, talk: Talk, history: Json, mode: str
) -> None:
    prefill, decode = deployment["prefill"], deployment["decode"]
    for _ in range(MAX_ATTEMPTS):
        turn = elsewhere(client, deployment, talk, history, mode)
        receiving = await turn.begin_decode(None) if mode == "push" else None
        leg = await begin_reading(turn)
        decode.kill()
        first = await leg
        outcome = read_back(first)[0]
        answer = await (receiving or await turn.begin_decode(first))
        assert answer.token_ids == talk.second_right
        await client.wait_whole(prefill, turn.decode)
        decode.restore()
        if outcome != "received":
            break
        talk = talk.again()
        await begin_talk(client, decode, talk)
        history = await peer_of(client, decode)
    assert outcome in ("failed", "slow", "unreachable")
    assert await num_read_backs(client, prefill, outcome) >= 1


async def test_reader_killed_during_the_read(
    client: Client, deployment: Deployment, talk: Talk, history: Json
) -> None:
    """The holder's blocks come back when the lease ends, and the reader may come back at once."""
    prefill, decode = deployment["prefill"], deployment["decode"]
    for _ in range(MAX_ATTEMPTS):
        num_expired = await num_leases(client, decode, "expired")
        leg = await begin_reading(elsewhere(client, deployment, talk, history))
        prefill.kill()
        with pytest.raises(aiohttp.ClientError):
            await leg
        prefill.restore()
        answer = await elsewhere(client, deployment, talk, history).run()
        assert answer.token_ids == talk.second_right
        assert read_back(answer) == ("received", talk.num_held_tokens)
        await client.wait_whole(decode)
        if await num_leases(client, decode, "expired") > num_expired:
            return
    pytest.fail("every READ ended before the kill")


async def test_a_hint_at_an_earlier_start_while_the_present_one_is_read(
    client: Client, deployment: Deployment, talk: Talk, history: Json
) -> None:
    """It may cost the other its READ, never its tokens; soon all is as before."""
    prefill, decode = deployment["prefill"], deployment["decode"]
    turn = elsewhere(client, deployment, talk, history)
    leg = await begin_reading(turn)
    stale = elsewhere(client, deployment, talk.again(), history | {"epoch": 12345})
    answer = await stale.run()
    assert answer.token_ids == talk.second_right
    assert read_back(answer) == ("gone", 0)
    answer = await finish(turn, await leg)
    assert answer.token_ids == talk.second_right
    await client.wait_whole(prefill, decode)
    again = talk.again()
    await begin_talk(client, decode, again)
    answer = await elsewhere(client, deployment, again, history).run()
    assert answer.token_ids == talk.second_right
    assert read_back(answer) == ("received", talk.num_held_tokens)
