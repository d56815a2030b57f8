"""A reader is stopped (SIGSTOP) between a lease and its end, and goes on when that is over.

What it then reads, or has read in part, may be other prompts' KV: it is thrown away.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.deployment_client import Client
from tests.integration.deployment_setup import Deployment, open_deployment
from tests.integration.history_legs import (
    Talk,
    begin_reading,
    begin_talk,
    fill,
    known_talk,
    read_back,
    second_turn,
)
from tests.support.process_forks import ProcessForks

pytestmark = pytest.mark.slow

NUM_TOKENS, NUM_NEW_TOKENS = 320, 70
MAX_ATTEMPTS = 5
NUM_BLOCKS = 64
TRANSPORTS = {
    "tcp": ("--transport", "nixl", "--ucx-tls", "tcp"),
    "direct": ("--transport", "nixl"),
    "shm": ("--transport", "shm"),
}


# Over TCP the READ is served no more, and hangs instead: slow to see, and seen elsewhere.
@pytest.fixture(
    scope="module", params=["direct", "shm", pytest.param("tcp", marks=pytest.mark.soak)]
)
def deployment(
    request: pytest.FixtureRequest,
    forks: ProcessForks,
    wide_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Deployment]:
    options = (
        *TRANSPORTS[request.param], "--num-blocks", str(NUM_BLOCKS), "--max-held-share", "1",
        "--read-back-timeout-s", "1",
    )  # fmt: skip
    with open_deployment(tmp_path_factory.mktemp("history-late"), forks) as deployment:
        for name in ("prefill", "decode"):
            deployment.add_engine(name, wide_model, *options)
        deployment.wait_ready()
        yield deployment


async def test_what_is_read_after_the_lease_is_thrown_away(
    client: Client, deployment: Deployment, known_talks: list[Talk]
) -> None:
    prefill, decode = deployment["prefill"], deployment["decode"]
    known_talks.append(await known_talk(client, prefill, NUM_TOKENS, NUM_NEW_TOKENS))
    for _ in range(MAX_ATTEMPTS):
        talk = known_talks[0].again()
        await begin_talk(client, decode, talk)
        turn = await second_turn(client, prefill, decode, talk)
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
    assert read_back(first)[0] in ("expired", "slow", "failed")
    again = talk.again()
    await begin_talk(client, decode, again)
    answer = await (await second_turn(client, prefill, decode, again)).run()
    assert answer.token_ids == talk.second_right
