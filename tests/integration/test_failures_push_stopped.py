"""A push's sender is stopped (SIGSTOP) in mid write and goes on later.

Decode recomputes in other blocks. Those that the sender may still write into are nobody's until it
is proven quiet; once they are another request's, nothing of the old push reaches them.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.deployment_client import (
    Answer,
    Client,
    Json,
    body_of,
    fresh_prompt,
    new_transfer,
    salted,
)
from tests.integration.deployment_setup import BOUND_S, Deployment, Program, open_deployment
from tests.integration.push_legs import (
    CHUNK_OPTIONS,
    Push,
    num_registered,
    peer_of,
    wait_registered,
)
from tests.support.process_forks import ProcessForks

pytestmark = pytest.mark.slow

NUM_TOKENS = 320
NUM_EARLY_TOKENS = 190
"""12 blocks: the share of decode's pool that may wait for a prefill's admission."""
NUM_BLOCKS = 48
"""Of decode's pool: room for the push's 20 and one more request, and no third."""
ANSWER_BOUND_S = 5.0
MAX_IDLE_SHARE = 0.05
"""Of a core, for a decode that waits for a stopped peer's proof."""
TRANSPORTS = {
    "tcp": ("--transport", "nixl", "--ucx-tls", "tcp"),
    "direct": ("--transport", "nixl"),
    "shm": ("--transport", "shm"),
}


@pytest.fixture(
    scope="module",
    # The two that write past decode's own end of the connection differ little.
    params=["tcp", pytest.param("direct", marks=pytest.mark.soak), "shm"],
)
def deployment(
    request: pytest.FixtureRequest,
    forks: ProcessForks,
    wide_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Deployment]:
    options = (*TRANSPORTS[request.param], "--max-held-share", "1")
    with open_deployment(tmp_path_factory.mktemp("push-stopped"), forks) as deployment:
        few = ("--num-blocks", str(NUM_BLOCKS))
        deployment.add_engine("prefill", wide_model, *options, *CHUNK_OPTIONS, "--num-blocks", "64")
        deployment.add_engine("decode", wide_model, *options, *few)
        deployment.wait_ready()
        yield deployment


async def known_requests(client: Client, decode: Program, count: int) -> list[tuple[Json, Answer]]:
    """Requests and their right answers; decode has forgotten them as far as it can."""
    known = []
    for _ in range(count):
        body = body_of(fresh_prompt(NUM_TOKENS), 6)
        known.append((body, await client.post(decode, salted(body))))
    return known


async def stop_in_mid_write(
    client: Client, deployment: Deployment, body: Json
) -> tuple[Push, asyncio.Task[Answer], asyncio.Task[Answer]]:
    """Begin a push and stop its sender as soon as a WRITE is posted; return it and both legs."""
    prefill, decode = deployment["prefill"], deployment["decode"]
    push = Push(client, salted(body), new_transfer(), await peer_of(client, prefill))
    since = prefill.log_size()
    sending, receiving = push.begin_prefill(prefill), push.begin_decode(decode)
    await push.wait_writing(prefill, since)
    prefill.pause()
    assert not receiving.done()
    return push, sending, receiving


async def expect_push(client: Client, deployment: Deployment, body: Json, right: list[int]) -> None:
    """Pushes give the right tokens, and soon move KV: a lost peer is left alone for a second."""
    prefill, decode = deployment["prefill"], deployment["decode"]
    for _ in range(20):
        push = Push(client, salted(body), new_transfer(), await peer_of(client, prefill))
        legs = push.begin_prefill(prefill), push.begin_decode(decode)
        answer = await legs[1]
        assert answer.token_ids[: len(right)] == right
        await legs[0]
        if answer.outcome == "received":
            return
        await asyncio.sleep(0.2)
    pytest.fail(f"no push moves KV any more: {answer.outcome}")


def used_s(program: Program) -> float:
    """Processor time so far, in seconds."""
    fields = Path(f"/proc/{program.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def test_others_want_the_blocks_of_a_stopped_sender(
    client: Client, deployment: Deployment
) -> None:
    prefill, decode = deployment["prefill"], deployment["decode"]
    (body, right), *others = await known_requests(client, decode, 5)
    _, sending, receiving = await stop_in_mid_write(client, deployment, body)
    stopped_s = time.monotonic()
    answer = await receiving
    assert time.monotonic() - stopped_s < ANSWER_BOUND_S
    assert answer.token_ids == right.token_ids
    assert answer.outcome == "unreachable"
    answers = await asyncio.gather(*(client.post(decode, other) for other, _ in others))
    assert [a.token_ids for a in answers] == [r.token_ids for _, r in others]
    begun_s, begun_used_s = time.monotonic(), used_s(decode)
    await asyncio.sleep(1.0)
    share = (used_s(decode) - begun_used_s) / (time.monotonic() - begun_s)
    assert share < MAX_IDLE_SHARE
    prefill.resume()
    assert (await sending).status == 200
    await expect_push(client, deployment, body, right.token_ids)
    await client.wait_whole(prefill, decode)
    for other, before in others[-2:]:
        again = await client.post(decode, other)
        assert again.token_ids == before.token_ids


@pytest.mark.parametrize("deployment", ["tcp"], indirect=True)
async def test_the_sender_goes_on_after_decode_has_connected_anew(
    client: Client, deployment: Deployment
) -> None:
    """What it has computed since is for blocks that are other prompts' by now."""
    prefill, decode = deployment["prefill"], deployment["decode"]
    known = await known_requests(client, decode, 3)
    body, right = known.pop()
    short_body = body_of(fresh_prompt(70), 2)
    short_right = await client.plain(decode, short_body)
    push, sending, receiving = await stop_in_mid_write(client, deployment, body)
    assert (await receiving).token_ids == right.token_ids
    cached = [await client.post(decode, other) for other, _ in known]
    assert [a.token_ids for a in cached] == [r.token_ids for _, r in known]
    short, second, since = await wait_for_the_stopped_one(client, decode, short_body, push.peer)
    prefill.resume()
    assert (await sending).status == 200
    assert (await short.begin_prefill(prefill)).status == 200
    answer = await second
    assert answer.token_ids == short_right
    # Where quarantine lasts until the stopped one is heard of, it may be full at that moment.
    assert answer.outcome in ("received", "declined")
    assert "lost prefill" not in decode.log()[since:]
    again = [await client.post(decode, other) for other, _ in known]
    assert [a.token_ids for a in again] == [r.token_ids for _, r in known]
    assert sum(a.report["num_cached_tokens"] for a in again) > NUM_TOKENS / 2
    await expect_push(client, deployment, body, right.token_ids)


async def wait_for_the_stopped_one(
    client: Client, decode: Program, body: Json, peer: Json
) -> tuple[Push, asyncio.Task[Answer], int]:
    """Begin a receive whose handshake waits for the stopped peer. A lost peer is left alone for a
    second, and whoever comes meanwhile is told at once. Also returns the log's size before."""
    async with asyncio.timeout(BOUND_S):
        while True:
            since = decode.log_size()
            short = Push(client, salted(body), new_transfer(), peer)
            second = short.begin_decode(decode)
            while not second.done():
                if (await client.instance(decode))["exchange"]["num_receives"]:
                    return short, second, since
                await asyncio.sleep(0.002)
            await second
            await asyncio.sleep(0.1)


async def test_a_registration_from_before_a_reconnection_is_not_written_to(
    client: Client, deployment: Deployment
) -> None:
    """Its prefill leg comes late: decode has recomputed, and has other prompts in the blocks."""
    prefill, decode = deployment["prefill"], deployment["decode"]
    known = await known_requests(client, decode, 2)
    body = body_of(fresh_prompt(NUM_EARLY_TOKENS), 2)
    right = await client.plain(decode, body)
    early = Push(client, salted(body), new_transfer(), await peer_of(client, prefill))
    count = await num_registered(client, prefill)
    receiving = early.begin_decode(decode)
    await wait_registered(client, prefill, count + 1)
    prefill.pause()
    answer = await receiving
    assert (answer.token_ids, answer.outcome) == (right, "unreachable")
    await asyncio.sleep(1.1)  # A lost peer is left alone for a second.
    later = Push(client, salted(body), new_transfer(), early.peer)
    receiving = later.begin_decode(decode)
    await client.wait_figure(decode, "num_receives", 1)
    prefill.resume()
    assert (await later.begin_prefill(prefill)).status == 200
    assert (await receiving).token_ids == right
    await client.wait_whole(decode)
    cached = [await client.post(decode, other) for other, _ in known]
    assert [a.token_ids for a in cached] == [r.token_ids for _, r in known]
    assert (await early.begin_prefill(prefill)).status == 200
    # Over TCP a WRITE lands no sooner than decode serves the link.
    await expect_push(client, deployment, body_of(fresh_prompt(80), 4), [])
    again = [await client.post(decode, other) for other, _ in known]
    assert [a.token_ids for a in again] == [r.token_ids for _, r in known]
    assert sum(a.report["num_cached_tokens"] for a in again) > NUM_TOKENS
