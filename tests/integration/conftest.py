"""What integration tests share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.integration.clear_answers import Judge
from tests.integration.deployment_client import (
    Client,
    Json,
    body_of,
    fresh_prompt,
    open_client,
    salted,
)
from tests.integration.deployment_setup import Deployment
from tests.integration.exchange_pair import Side, make_side
from tests.integration.history_legs import Talk
from tests.support.process_forks import ProcessForks
from tests.support.tiny_model import WIDE_SHAPE, make_tiny_model


@pytest.fixture(scope="module")
def shared_side() -> Iterator[Side]:
    """One exchange for a module's tests that only knock at its door."""
    side = make_side("door")
    yield side
    side.close()


@pytest.fixture(scope="session")
def forks() -> Iterator[ProcessForks]:
    """Starts real ``kvferry`` processes in a moment."""
    forks = ProcessForks()
    yield forks
    forks.close()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose handoffs are a few hundred KiB."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def judge(tiny_model: Path) -> Judge:
    """Finds ties in answers of ``tiny_model``."""
    return Judge(tiny_model)


@pytest.fixture(scope="session")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose handoffs are tens of MiB: 2 MiB a block of 16 tokens."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    return make_tiny_model(folder, num_layers=1, shape=WIDE_SHAPE)


@pytest.fixture
async def client(deployment: Deployment) -> AsyncIterator[Client]:
    """A client; afterwards everything of the module's ``deployment`` runs again, holding nothing.

    A module that needs more of it has one of its own.
    """
    async with open_client() as client:
        yield client
        deployment.restore()
        await client.wait_whole(*deployment.instances)


@pytest.fixture(scope="module")
def known() -> dict[str, list[int]]:
    """The prompt of a module's cases, and its right tokens."""
    return {}


@pytest.fixture
async def case(
    request: pytest.FixtureRequest,
    client: Client,
    deployment: Deployment,
    known: dict[str, list[int]],
) -> tuple[Json, list[int]]:
    """A request that no cache knows, of the module's NUM_TOKENS, and its right tokens.

    ``client`` and ``deployment`` are the module's own.
    """
    if not known:
        known["prompt"] = fresh_prompt(request.module.NUM_TOKENS)
        decode = next(p for p in deployment.instances if p.name.startswith("decode"))
        known["right"] = await client.plain(decode, body_of(known["prompt"], 6))
    return salted(body_of(known["prompt"], 6)), known["right"]


@pytest.fixture(scope="module")
def known_talks() -> list[Talk]:
    """The conversation of a module's tests, once one of them has made it."""
    return []
