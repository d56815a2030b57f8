"""Hints at a history that are wrong, old, forged or malformed: right tokens in time, or a 400."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.deployment_client import Client, Json
from tests.integration.deployment_setup import Deployment, open_deployment
from tests.integration.history_legs import (
    CLOSED_PORT,
    Talk,
    Turn,
    begin_talk,
    known_talk,
    num_read_backs,
    read_back,
    run_all,
)
from tests.integration.push_legs import peer_of
from tests.support.process_forks import ProcessForks
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.slow

NUM_TOKENS, NUM_NEW_TOKENS = 150, 70
OPTIONS = ("--transport", "nixl", "--num-blocks", "400", "--max-held-share", "1")


@pytest.fixture(scope="module")
def deployment(
    forks: ProcessForks, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    other_model = make_tiny_model(tmp_path_factory.mktemp("other") / "model", seed=1)
    with open_deployment(tmp_path_factory.mktemp("history-hints"), forks) as deployment:
        deployment.add_engine("prefill", tiny_model, *OPTIONS, "--no-prefix-caching")
        deployment.add_engine("decode", tiny_model, *OPTIONS)
        deployment.add_engine("other", other_model, *OPTIONS)
        deployment.wait_ready()
        yield deployment


@pytest.fixture
async def talk(client: Client, deployment: Deployment, known_talks: list[Talk]) -> Talk:
    """A conversation whose first turn decode has just answered."""
    if not known_talks:
        plain = deployment["prefill"]
        known_talks.append(await known_talk(client, plain, NUM_TOKENS, NUM_NEW_TOKENS))
    talk = known_talks[0].again()
    await begin_talk(client, deployment["decode"], talk)
    return talk


@pytest.fixture
def silent_address() -> Iterator[str]:
    """Something listens there, and says nothing."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listening:
        yield f"tcp://127.0.0.1:{listening.getsockname()[1]}"


def address_of(url: str) -> str:
    return "tcp://" + url.rpartition("/")[2]


IGNORED_ADDRESSES = (
    "tcp://192.0.2.1:5555",
    "tcp://decode:5555",
    "ipc:///tmp/decode",
    "tcp://127.0.0.1",
    "tcp://127.0.0.1:http",
    "tcp://127.0.0.1:0",
    "tcp://127.0.0.1:65536",
    "tcp://127.0.0.1:\N{ARABIC-INDIC DIGIT THREE}",
)
"""Of another host, or none at all."""


async def test_wrong_addresses_cost_a_recompute(
    client: Client, deployment: Deployment, talk: Talk, silent_address: str
) -> None:
    """Nobody is there, or somebody else; meanwhile others are served."""
    prefill, decode = deployment["prefill"], deployment["decode"]
    silent = (CLOSED_PORT, "tcp://[::1]:1", silent_address, address_of(decode.url))
    num_unreachable = await num_read_backs(client, prefill, "unreachable")
    turns = []
    for number, address in enumerate([*IGNORED_ADDRESSES, *silent]):
        history = {"instance_id": f"decode-{number}", "epoch": 1, "control_address": address}
        turns.append(Turn(client, prefill, decode, talk.again().second, history))
    running = run_all(turns)
    await client.wait_figure(prefill, "num_receives", 1)
    answer = await Turn(client, prefill, decode, talk.again().second, None).run()
    assert answer.token_ids == talk.second_right
    answers = await running
    assert [answer.token_ids for answer in answers] == [talk.second_right] * len(turns)
    outcomes = [read_back(answer) for answer in answers]
    expected = [("", 0)] * len(IGNORED_ADDRESSES) + [("unreachable", 0)] * len(silent)
    assert outcomes == expected
    num_now = await num_read_backs(client, prefill, "unreachable")
    assert num_now == num_unreachable + len(silent)


WRONG_NAMES: dict[str, Json] = {
    "another name": {"instance_id": "decode-2"},
    "a strange name": {"instance_id": "../\N{SNOWMAN}\n" + "x" * 100},
    "an earlier start": {"epoch": 1},
}


@pytest.mark.parametrize("name", list(WRONG_NAMES))
async def test_another_name_or_start_at_the_right_address(
    client: Client, deployment: Deployment, talk: Talk, name: str
) -> None:
    prefill, decode = deployment["prefill"], deployment["decode"]
    history = await peer_of(client, decode) | WRONG_NAMES[name]
    answer = await Turn(client, prefill, decode, talk.second, history).run()
    assert answer.token_ids == talk.second_right
    assert read_back(answer) == ("gone", 0)


@pytest.mark.parametrize("what", ["itself", "own address", "another model"])
async def test_another_instance_is_in_the_holders_place(
    client: Client, deployment: Deployment, talk: Talk, what: str
) -> None:
    prefill, decode = deployment["prefill"], deployment["decode"]
    history, own = await peer_of(client, decode), await peer_of(client, prefill)
    hint, outcomes = {
        "itself": (own, {""}),
        "own address": (history | {"control_address": own["control_address"]}, {"gone"}),
        "another model": (await peer_of(client, deployment["other"]), {"incompatible"}),
    }[what]
    answer = await Turn(client, prefill, decode, talk.second, hint).run()
    assert answer.token_ids == talk.second_right
    assert read_back(answer)[0] in outcomes


async def test_a_right_hint_after_the_wrong_ones(
    client: Client, deployment: Deployment, talk: Talk
) -> None:
    """None of them has worn anything out."""
    prefill, decode = deployment["prefill"], deployment["decode"]
    history = await peer_of(client, decode)
    wrong = [history | {"instance_id": f"decode-{number}"} for number in range(40)]
    turns = [Turn(client, prefill, decode, talk.second | {"max_tokens": 1}, hint) for hint in wrong]
    answers = await run_all(turns)
    assert [answer.token_ids for answer in answers] == [talk.second_right[:1]] * len(wrong)
    await client.wait_whole(prefill, decode)
    again = talk.again()
    await begin_talk(client, decode, again)
    answer = await Turn(client, prefill, decode, again.second, history).run()
    assert answer.token_ids == talk.second_right
    assert read_back(answer) == ("received", talk.num_held_tokens)


MALFORMED: dict[str, object] = {
    "no object": "decode",
    "a list": [],
    "empty": {},
    "no epoch": {"epoch": None},
    "an epoch below 0": {"epoch": -1},
    "a huge epoch": {"epoch": 2**70},
    "an epoch as text": {"epoch": "1"},
    "no name": {"instance_id": ""},
    "a huge name": {"instance_id": "x" * 100_000},
    "no address": {"control_address": ""},
    "a huge address": {"control_address": "tcp://127.0.0.1:" + "1" * 100_000},
}


@pytest.mark.parametrize("name", list(MALFORMED))
async def test_a_malformed_hint_is_a_400(
    client: Client, deployment: Deployment, talk: Talk, name: str
) -> None:
    prefill, decode = deployment["prefill"], deployment["decode"]
    change = MALFORMED[name]
    history = change
    if isinstance(change, dict) and change:
        history = await peer_of(client, decode) | change
    ask = {"transfer_id": "xfer-malformed", "role": "prefill", "history": history}
    answer = await client.post(prefill, talk.second | {"kv_transfer_params": ask})
    assert answer.status == 400
    assert answer.error is not None
    assert answer.error["param"] == "kv_transfer_params"


async def test_a_hint_on_the_decode_leg_means_nothing(
    client: Client, deployment: Deployment, talk: Talk
) -> None:
    prefill, decode = deployment["prefill"], deployment["decode"]
    first = await Turn(client, prefill, decode, talk.second, None).begin_prefill()
    offered = first.offered | {"history": await peer_of(client, prefill)}
    answer = await client.decode(decode, talk.second, offered)
    assert answer.token_ids == talk.second_right
    assert answer.outcome == "received"
