"""What clients, peers and strangers may send: refused by name or recomputed, never another's KV."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvferry.protocol.codec import encode
from kvferry.protocol.messages import InstanceQuery
from tests.integration.deployment_client import (
    PATH,
    Client,
    Json,
    body_of,
    fresh_prompt,
    new_transfer,
    salted,
)
from tests.integration.deployment_setup import (
    Deployment,
    Program,
    open_deployment,
)
from tests.own_key import prove_own_key
from tests.support.process_forks import ProcessForks
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.slow

NUM_TOKENS = 130
OPTIONS = ("--transport", "shm", "--num-blocks", "200", "--max-model-len", "2048")


@pytest.fixture(scope="module")
def deployment(
    forks: ProcessForks, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    other_model = make_tiny_model(tmp_path_factory.mktemp("other") / "model", seed=1)
    with open_deployment(tmp_path_factory.mktemp("requests"), forks) as deployment:
        prefill = deployment.add_engine("prefill", tiny_model, *OPTIONS)
        decode = deployment.add_engine("decode", tiny_model, *OPTIONS)
        deployment.add_engine("other", other_model, *OPTIONS)
        deployment.wait_ready()
        deployment.add_router([prefill], [decode])
        yield deployment


async def after_first_token(client: Client, program: Program, body: Json, token: int) -> list[int]:
    """What ``program`` itself answers once ``token`` is the answer's first."""
    max_tokens = body["max_tokens"] - 1
    forced = body | {"prompt": [*body["prompt"], token], "max_tokens": max_tokens}
    return [token, *await client.plain(program, forced)]


async def test_another_model_reads_nothing_and_goes_on_by_itself(
    client: Client, deployment: Deployment
) -> None:
    other = deployment["other"]
    body = salted(body_of(fresh_prompt(NUM_TOKENS)))
    first = await client.prefill(deployment["prefill"], body)
    since = other.log_size()
    answer = await client.decode(other, body, first.offered)
    token = first.token_ids[0]
    assert answer.outcome == "incompatible"
    assert answer.report["num_received_bytes"] == 0
    assert answer.token_ids == await after_first_token(client, other, body, token)
    await other.wait_log("incompatible weights_digest differs", since)
    outcome = {"mode": "pull", "outcome": "incompatible"}
    assert await client.metric(other, "kvferry_receives_total", **outcome) == 1


MALFORMED = {
    "no JSON": b'{"prompt": [1, 2',
    "an array": b"[1, 2, 3]",
    "nothing": b"",
    "not UTF-8": b'{"prompt": "\xff\xfe"}',
    "nested deeply": b'{"prompt": ' + b"[" * 5000,
}


@pytest.mark.parametrize("name", list(MALFORMED))
async def test_malformed_bodies_are_400(client: Client, deployment: Deployment, name: str) -> None:
    answer = await client.post(deployment["router"], MALFORMED[name])
    assert answer.status == 400
    assert answer.error is not None
    assert answer.error["type"] == "invalid_request_error"


WRONG_FIELDS: list[tuple[str, Json, int]] = [
    ("model", {"model": "unknown"}, 404),
    ("temperature", {"temperature": -1}, 400),
    ("temperature", {"temperature": "hot"}, 400),
    ("top_p", {"top_p": 2}, 400),
    ("max_tokens", {"max_tokens": "many"}, 400),
    ("max_tokens", {"max_tokens": 0}, 400),
    ("max_tokens", {"max_tokens": 100_000}, 400),
    ("n", {"n": 0}, 400),
    ("logprobs", {"logprobs": 1000}, 400),
    ("stream", {"stream": "yes"}, 400),
    ("prompt", {"prompt": []}, 400),
    ("prompt", {"prompt": [5, 1_000_000]}, 400),
    ("prompt", {"prompt": None}, 400),
    ("prompt", {"prompt": {"a": 1}}, 400),
    ("stop_token_ids", {"stop_token_ids": [-1]}, 400),
]


@pytest.mark.parametrize(("param", "fields", "status"), WRONG_FIELDS)
async def test_wrong_fields_are_refused_by_name(
    client: Client, deployment: Deployment, param: str, fields: Json, status: int
) -> None:
    body = {"prompt": fresh_prompt(NUM_TOKENS), "max_tokens": 4} | fields
    for program in (deployment["router"], deployment["decode"]):
        answer = await client.post(program, body)
        assert answer.status == status, answer.json
        assert answer.error is not None
        assert param in f"{answer.error['param']} {answer.error['message']}"


async def test_an_unknown_path_is_404(client: Client, deployment: Deployment) -> None:
    answer = await client.post(deployment["router"], {"prompt": "a"}, path="/v1/nothing")
    assert answer.status == 404
    assert answer.error is not None


async def test_a_clients_own_transfer_params_reach_no_instance(
    client: Client, deployment: Deployment
) -> None:
    body = salted(body_of(fresh_prompt(NUM_TOKENS)))
    right = await client.plain(deployment["decode"], body)
    forged = {"transfer_id": "stolen", "role": "decode", "peer": {"instance_id": "x"}}
    answer = await client.post(deployment["router"], body | {"kv_transfer_params": forged})
    assert answer.token_ids == right
    assert answer.outcome == "received"
    assert "kv_transfer_params" not in answer.json


# -- parameters that were not made by this deployment's router -------------------------------


def dead_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def with_peer(offered: Json, **fields: object) -> Json:
    changed = copy.deepcopy(offered)
    changed["peer"] |= fields
    return changed


@pytest.mark.parametrize("what", ["unknown id", "wrong epoch", "dead port", "other name"])
async def test_a_forged_origin_is_recomputed(
    client: Client, deployment: Deployment, what: str
) -> None:
    prefill, decode = deployment["prefill"], deployment["decode"]
    body = salted(body_of(fresh_prompt(NUM_TOKENS)))
    right = await client.plain(decode, body)
    offered = (await client.prefill(prefill, body)).offered
    match what:
        case "unknown id":
            forged, outcome = offered | {"transfer_id": new_transfer()}, "gone"
        case "wrong epoch":
            forged, outcome = with_peer(offered, epoch=offered["peer"]["epoch"] ^ 1), "gone"
        case "dead port":
            forged, outcome = with_peer(offered, control_address=dead_address()), "unreachable"
        case _:
            forged, outcome = with_peer(offered, instance_id="other"), "gone"
    answer = await client.decode(decode, body, forged)
    assert answer.token_ids == right
    assert answer.outcome == outcome


async def test_an_id_with_another_prompt_is_recomputed(
    client: Client, deployment: Deployment
) -> None:
    prefill, decode = deployment["prefill"], deployment["decode"]
    theirs = salted(body_of(fresh_prompt(NUM_TOKENS)))
    offered = (await client.prefill(prefill, theirs)).offered
    del offered["first_token"]
    for prompt in (fresh_prompt(NUM_TOKENS), fresh_prompt(NUM_TOKENS + 1), theirs["prompt"][:-1]):
        ours = theirs | {"prompt": prompt}
        right = await client.plain(decode, ours)
        answer = await client.decode(decode, ours, offered)
        assert answer.token_ids == right
        assert answer.outcome in ("mismatch", "gone")


async def test_another_salt_is_a_mismatch(client: Client, deployment: Deployment) -> None:
    body = salted(body_of(fresh_prompt(NUM_TOKENS)))
    offered = (await client.prefill(deployment["prefill"], body)).offered
    answer = await client.decode(deployment["decode"], salted(body), offered)
    assert answer.outcome == "mismatch"
    assert answer.token_ids == await client.plain(deployment["decode"], body)


REFUSED: list[tuple[str, Json]] = [
    ("cluster key", {"peer": {"control_address": "tcp://192.0.2.1:5555"}}),
    ("control_address", {"peer": {"control_address": "http://127.0.0.1"}}),
    ("peer", {"peer": None}),
    ("vocabulary", {"first_token": {"token_id": 4_000_000, "seed": 1}}),
    ("token_id", {"first_token": {"token_id": -5, "seed": 1}}),
    ("role", {"role": "both"}),
    ("the nearest is 'retention_s'", {"retentions_s": 1}),
]


@pytest.mark.parametrize(("named", "changes"), REFUSED)
async def test_odd_parameters_are_refused_by_name(
    client: Client, deployment: Deployment, named: str, changes: Json
) -> None:
    body = salted(body_of(fresh_prompt(NUM_TOKENS)))
    offered = (await client.prefill(deployment["prefill"], body)).offered
    peer = changes.get("peer", {})
    forged = with_peer(offered, **peer) if peer is not None else offered
    forged |= {key: value for key, value in changes.items() if key != "peer" or value is None}
    answer = await client.decode(deployment["decode"], body, forged)
    await client.withdraw(deployment["prefill"], offered)
    assert answer.status == 400, answer.json
    assert answer.error is not None
    assert named in answer.error["message"]


@pytest.mark.parametrize("transfer_id", ["a,b", "x" * 1000])
async def test_what_nobody_can_sign_is_not_obeyed(
    client: Client, deployment: Deployment, transfer_id: str
) -> None:
    decode = deployment["decode"]
    body = salted(body_of(fresh_prompt(NUM_TOKENS)))
    right = await client.plain(decode, body)
    offered = (await client.prefill(deployment["prefill"], body)).offered
    unsigned = await client.metric(decode, "kvferry_unsigned_params_total")
    answer = await client.decode(decode, body, offered | {"transfer_id": transfer_id})
    await client.withdraw(deployment["prefill"], offered)
    assert (answer.token_ids, answer.outcome) == (right, "")
    assert await client.metric(decode, "kvferry_unsigned_params_total") == unsigned + 1


async def test_a_withdrawn_offer_is_recomputed(client: Client, deployment: Deployment) -> None:
    prefill, decode = deployment["prefill"], deployment["decode"]
    body = salted(body_of(fresh_prompt(NUM_TOKENS)))
    right = await client.plain(decode, body)
    offered = (await client.prefill(prefill, body)).offered
    await client.withdraw(prefill, offered)
    await client.wait_whole(prefill)
    answer = await client.decode(decode, body, offered)
    assert answer.token_ids == right
    assert answer.outcome == "gone"


async def test_a_decode_leg_sent_twice_at_once_is_refused_once(
    client: Client, deployment: Deployment
) -> None:
    """Prefill is stopped, so that the first is still being received when the second arrives."""
    prefill, decode = deployment["prefill"], deployment["decode"]
    body = salted(body_of(fresh_prompt(NUM_TOKENS)))
    right = await client.plain(decode, body)
    offered = (await client.prefill(prefill, body)).offered
    prefill.pause()
    leg = asyncio.create_task(client.decode(decode, body, offered))
    await client.wait_figure(decode, "num_receives", 1)
    second = await client.decode(decode, body, offered)
    prefill.resume()
    assert second.status == 409
    assert second.error is not None
    assert (await leg).token_ids == right


async def test_a_decode_leg_sent_again_later_is_right(
    client: Client, deployment: Deployment
) -> None:
    body = salted(body_of(fresh_prompt(NUM_TOKENS)))
    offered = (await client.prefill(deployment["prefill"], body)).offered
    answers = [await client.decode(deployment["decode"], body, offered) for _ in range(2)]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].outcome == "received"


async def test_a_prefill_leg_with_a_used_id_is_an_error(
    client: Client, deployment: Deployment
) -> None:
    body = salted(body_of(fresh_prompt(NUM_TOKENS)))
    transfer_id = new_transfer()
    assert (await client.prefill(deployment["prefill"], body, transfer_id)).status == 200
    again = await client.prefill(deployment["prefill"], body, transfer_id)
    assert again.error is not None
    assert transfer_id in again.error["message"]
    assert again.status >= 400


# -- the ports -----------------------------------------------------------------------------


def send_garbage(address: str, rng: random.Random) -> None:
    """Raw bytes, and well-framed messages that are random, truncated or oversized."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    for size in (1, 64, 5000):
        with socket.create_connection((host, int(port)), timeout=5) as raw:
            raw.sendall(rng.randbytes(size))
    good = encode(1, InstanceQuery())
    context = zmq.Context()
    socket_ = context.socket(zmq.DEALER)
    socket_.setsockopt(zmq.LINGER, 1000)
    prove_own_key(socket_)
    socket_.connect(address)
    for end in range(len(good)):
        socket_.send(good[:end])
    for _ in range(50):
        socket_.send(rng.randbytes(rng.randint(0, 300)))
    socket_.send_multipart([b"", rng.randbytes(8), good])
    socket_.send(os.urandom(8 * 1024 * 1024))
    socket_.close()
    context.term()


@pytest.mark.parametrize("name", ["prefill", "decode"])
async def test_garbage_on_the_control_port_disturbs_nothing(
    client: Client, deployment: Deployment, name: str
) -> None:
    target = deployment[name]
    counted = await client.metric(target, "kvferry_control_malformed_total")
    garbage = asyncio.create_task(
        asyncio.to_thread(send_garbage, target.control_address, random.Random(5))
    )
    num_right = 0
    while not garbage.done() or num_right < 3:
        body = salted(body_of(fresh_prompt(NUM_TOKENS)))
        right = await client.plain(deployment["decode"], body)
        answer = await client.post(deployment["router"], body)
        assert answer.token_ids == right
        assert answer.outcome == "received"
        num_right += 1
    await garbage
    async with asyncio.timeout(15):
        while await client.metric(target, "kvferry_control_malformed_total") < counted + 50:
            await asyncio.sleep(0.02)


async def test_garbage_on_the_http_port_disturbs_nothing(
    client: Client, deployment: Deployment
) -> None:
    rng = random.Random(6)
    for program in (deployment["router"], deployment["decode"]):
        host, _, port = program.url.removeprefix("http://").rpartition(":")
        cut = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{{".encode()
        for data in (rng.randbytes(3000), cut, b"GET / HTTP/9.9\r\n\r\n", b"\r\n" * 100):
            with socket.create_connection((host, int(port)), timeout=5) as raw:
                raw.sendall(data)
    body = salted(body_of(fresh_prompt(NUM_TOKENS)))
    right = await client.plain(deployment["decode"], body)
    answer = await client.post(deployment["router"], json.dumps(body).encode())
    assert answer.token_ids == right
