"""Instances with the user's key beside those of releases that know none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.protocol.keys import user_key_path
from tests.integration.deployment_client import Client, body_of, fresh_prompt, salted
from tests.integration.deployment_setup import Deployment, open_deployment
from tests.own_key import own_key
from tests.support.process_forks import ProcessForks

pytestmark = pytest.mark.slow

NUM_TOKENS = 130


@pytest.fixture(scope="module")
def deployment(
    forks: ProcessForks, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """One with the user's key, an older one, and an older one that was given the key's file."""
    options = ("--transport", "shm", "--num-blocks", "64")
    own_key()
    given = ("--cluster-key-file", str(user_key_path(os.environ)))
    with open_deployment(tmp_path_factory.mktemp("mixed"), forks) as deployment:
        keyed = deployment.add_engine("keyed", tiny_model, *options)
        older = deployment.add_engine("older", tiny_model, *options, "--no-user-key")
        also_keyed = deployment.add_engine("given", tiny_model, *options, *given)
        deployment.wait_ready()
        deployment.add_router([keyed], [older])
        deployment.add_router([older], [keyed], "--no-user-key", name="router-older")
        deployment.add_router([also_keyed], [keyed], name="router-given")
        yield deployment


@pytest.mark.parametrize(
    ("router", "receiver", "outcome"),
    [
        ("router", "older", "unreachable"),
        ("router-older", "keyed", ""),  # the parameters are not obeyed
        ("router-given", "keyed", "received"),
    ],
)
async def test_answers_are_right_and_blocks_move_where_the_key_is_one(
    client: Client, deployment: Deployment, router: str, receiver: str, outcome: str
) -> None:
    body = salted(body_of(fresh_prompt(NUM_TOKENS)))
    right = await client.plain(deployment[receiver], body)
    answer = await client.post(deployment[router], body)
    assert (answer.status, answer.token_ids) == (200, right)
    assert answer.outcome == outcome
