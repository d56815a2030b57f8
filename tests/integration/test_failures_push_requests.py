"""Push legs that do not belong together, come twice, or cross: right tokens or a clear error."""

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
    new_transfer,
    salted,
)
from tests.integration.deployment_setup import Deployment, Program, open_deployment
from tests.integration.push_legs import CHUNK_OPTIONS, SHORT_LEASE, Push, leave, peer_of
from tests.support.process_forks import ProcessForks
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.slow

NUM_TOKENS = 130
NUM_LONG_TOKENS = 1500
"""A prefill that takes long enough to do something meanwhile."""
OPTIONS = (
    *("--transport", "shm", "--num-blocks", "400", "--max-model-len", "2048"),
    *SHORT_LEASE,
)


@pytest.fixture(scope="module")
def deployment(
    forks: ProcessForks, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    other_model = make_tiny_model(tmp_path_factory.mktemp("push-other") / "model", seed=1)
    with open_deployment(tmp_path_factory.mktemp("push-requests"), forks) as deployment:
        for name in ("prefill", "prefill-1"):
            deployment.add_engine(name, tiny_model, *OPTIONS, *CHUNK_OPTIONS)
        deployment.add_engine("decode", tiny_model, *OPTIONS)
        deployment.add_engine("decode-1", tiny_model, *OPTIONS, "--no-prefix-caching")
        deployment.add_engine("other", other_model, *OPTIONS)
        deployment.wait_ready()
        yield deployment


async def make_push(client: Client, prefill: Program, body: Json) -> Push:
    return Push(client, salted(body), new_transfer(), await peer_of(client, prefill))


# -- legs that do not belong together ---------------------------------------------------------


async def test_another_model_gets_nothing_and_computes_by_itself(
    client: Client, deployment: Deployment
) -> None:
    prefill, other = deployment["prefill"], deployment["other"]
    body = body_of(fresh_prompt(NUM_TOKENS))
    right = await client.plain(other, body)
    push = await make_push(client, prefill, body)
    sending, receiving = push.begin_prefill(prefill), push.begin_decode(other)
    answer = await receiving
    assert answer.token_ids == right
    assert answer.outcome == "incompatible"
    assert answer.report["num_received_bytes"] == 0
    assert (await sending).status == 200


@pytest.mark.parametrize("first", ["prefill", "decode"])
@pytest.mark.parametrize("num_more", [0, 1, -16])
async def test_another_prompt_under_the_same_id_is_recomputed(
    client: Client, deployment: Deployment, first: str, num_more: int
) -> None:
    """Decode gets neither the other prompt's KV nor the token that follows it."""
    prefill, decode = deployment["prefill"], deployment["decode"]
    theirs = await make_push(client, prefill, body_of(fresh_prompt(NUM_TOKENS)))
    ours = Push(
        client, body_of(fresh_prompt(NUM_TOKENS + num_more)), theirs.transfer_id, theirs.peer
    )
    right = await client.plain(decode, ours.body)
    if first == "prefill":
        assert (await theirs.begin_prefill(prefill)).status == 200
        answer = await ours.begin_decode(decode)
    else:
        receiving = ours.begin_decode(decode)
        await client.wait_figure(prefill, "num_handoffs_held", 1)
        assert (await theirs.begin_prefill(prefill)).status == 200
        answer = await receiving
    assert answer.token_ids == right
    assert answer.outcome == "mismatch"


@pytest.mark.parametrize("finds", ["another address", "the new address"])
async def test_prefill_restarts_between_the_legs(
    client: Client, deployment: Deployment, finds: str
) -> None:
    prefill, decode = deployment["prefill"], deployment["decode"]
    push = await make_push(client, prefill, body_of(fresh_prompt(NUM_TOKENS)))
    right = await client.plain(decode, push.body)
    assert (await push.begin_prefill(prefill)).status == 200
    prefill.kill()
    prefill.restore()
    if finds == "the new address":
        push.peer = push.peer | {"control_address": prefill.control_address}
    answer = await push.begin_decode(decode)
    assert answer.token_ids == right
    assert answer.outcome == ("gone" if finds == "the new address" else "unreachable")


async def test_prefill_restarts_after_decode_has_registered(
    client: Client, deployment: Deployment
) -> None:
    prefill, decode = deployment["prefill"], deployment["decode"]
    push = await make_push(client, prefill, body_of(fresh_prompt(NUM_TOKENS)))
    right = await client.plain(decode, push.body)
    receiving = push.begin_decode(decode)
    await client.wait_figure(prefill, "num_handoffs_held", 1)
    prefill.kill()
    prefill.restore()
    assert (await push.begin_prefill(prefill)).status == 200
    answer = await receiving
    assert answer.token_ids == right
    assert answer.outcome == "unreachable"


# -- legs that come twice -----------------------------------------------------------------------


async def test_a_decode_leg_sent_twice_at_once_is_refused_once(
    client: Client, deployment: Deployment
) -> None:
    prefill, decode = deployment["prefill"], deployment["decode"]
    push = await make_push(client, prefill, body_of(fresh_prompt(NUM_TOKENS)))
    right = await client.plain(decode, push.body)
    receiving = push.begin_decode(decode)
    await client.wait_figure(decode, "num_receives", 1)
    second = await push.begin_decode(decode)
    assert second.status == 409
    assert second.error is not None
    sent = await push.begin_prefill(prefill)
    answer = await receiving
    assert (answer.token_ids, answer.outcome) == (right, "received")
    assert sent.token_ids == right[:1]


async def test_a_decode_leg_sent_again_later_is_recomputed(
    client: Client, deployment: Deployment
) -> None:
    """It must not take the first one's end for its own: nothing was written to its blocks."""
    prefill, decode = deployment["prefill"], deployment["decode-1"]
    push = await make_push(client, prefill, body_of(fresh_prompt(NUM_TOKENS)))
    right = await client.plain(decode, push.body)
    sending, receiving = push.begin_prefill(prefill), push.begin_decode(decode)
    assert (await receiving).outcome == "received"
    assert (await sending).status == 200
    again = await push.begin_decode(decode)
    assert (again.token_ids, again.outcome) == (right, "gone")


@pytest.mark.parametrize("is_first_done", [False, True])
async def test_a_decode_leg_sent_again_to_another_instance(
    client: Client, deployment: Deployment, *, is_first_done: bool
) -> None:
    """What a router does whose first decode instance seems to have failed."""
    prefill, decode, another = (deployment[n] for n in ("prefill", "decode", "decode-1"))
    push = await make_push(client, prefill, body_of(fresh_prompt(NUM_LONG_TOKENS)))
    right = await client.plain(decode, push.body)
    first, sending = push.begin_decode(decode), push.begin_prefill(prefill)
    if is_first_done:
        assert (await first).outcome == "received"
    else:
        await client.wait_figure(prefill, "num_requests_running", 1)
    second = push.begin_decode(another)
    assert (await second).token_ids == right
    assert (await first).token_ids == right
    assert (await sending).status == 200


async def test_the_first_of_two_decode_instances_leaves(
    client: Client, deployment: Deployment
) -> None:
    prefill, decode, another = (deployment[n] for n in ("prefill", "decode", "decode-1"))
    push = await make_push(client, prefill, body_of(fresh_prompt(NUM_LONG_TOKENS)))
    right = await client.plain(decode, push.body)
    first = push.begin_decode(decode)
    await client.wait_figure(prefill, "num_handoffs_held", 1)
    second = push.begin_decode(another)
    await client.wait_figure(another, "num_receives", 1)
    await leave(first)
    await client.wait_whole(decode)
    sent = await push.begin_prefill(prefill)
    answer = await second
    assert answer.token_ids == right
    assert sent.status == 200


async def test_a_prefill_leg_sent_twice_at_once_is_refused_once(
    client: Client, deployment: Deployment
) -> None:
    prefill, decode = deployment["prefill"], deployment["decode"]
    push = await make_push(client, prefill, body_of(fresh_prompt(NUM_LONG_TOKENS)))
    right = await client.plain(decode, push.body)
    receiving, sending = push.begin_decode(decode), push.begin_prefill(prefill)
    await client.wait_figure(prefill, "num_requests_running", 1)
    second = await push.begin_prefill(prefill)
    assert second.status == 409
    assert (await sending).status == 200
    answer = await receiving
    assert (answer.token_ids, answer.outcome) == (right, "received")


async def test_a_prefill_leg_sent_again_later_is_an_error(
    client: Client, deployment: Deployment
) -> None:
    prefill, decode = deployment["prefill"], deployment["decode"]
    push = await make_push(client, prefill, body_of(fresh_prompt(NUM_TOKENS)))
    sending, receiving = push.begin_prefill(prefill), push.begin_decode(decode)
    assert (await receiving).outcome == "received"
    assert (await sending).status == 200
    again = await push.begin_prefill(prefill)
    assert again.status >= 400
    assert again.error is not None
    assert push.transfer_id in again.error["message"]


# -- several at once ----------------------------------------------------------------------------


async def test_one_sender_to_two_receivers_at_once(client: Client, deployment: Deployment) -> None:
    prefill = deployment["prefill"]
    receivers = [deployment["decode"], deployment["decode-1"]] * 3
    bodies = [body_of(fresh_prompt(500)) for _ in receivers]
    rights = [await client.plain(prefill, body) for body in bodies]
    pushes = [await make_push(client, prefill, body) for body in bodies]
    receiving = [p.begin_decode(to) for p, to in zip(pushes, receivers, strict=True)]
    sending = [push.begin_prefill(prefill) for push in pushes]
    answers = await asyncio.gather(*receiving)
    assert [answer.token_ids for answer in answers] == rights
    assert {answer.outcome for answer in answers} == {"received"}
    assert {answer.status for answer in await asyncio.gather(*sending)} == {200}


async def test_two_senders_to_one_receiver_at_once(client: Client, deployment: Deployment) -> None:
    decode = deployment["decode"]
    senders = [deployment["prefill"], deployment["prefill-1"]] * 3
    bodies = [body_of(fresh_prompt(500)) for _ in senders]
    rights = [await client.plain(decode, body) for body in bodies]
    pushes = [
        await make_push(client, sender, body) for sender, body in zip(senders, bodies, strict=True)
    ]
    sending = [p.begin_prefill(sender) for p, sender in zip(pushes, senders, strict=True)]
    answers = await asyncio.gather(*(push.begin_decode(decode) for push in pushes))
    assert [answer.token_ids for answer in answers] == rights
    assert {answer.outcome for answer in answers} == {"received"}
    assert {answer.status for answer in await asyncio.gather(*sending)} == {200}
