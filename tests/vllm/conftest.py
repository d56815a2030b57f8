"""A plain vLLM's answers, then two servers with the plugin; never more than two at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from kvferry.engine.bundled_model import bundled_model_dir
from tests.vllm.asking import REQUEST_TIMEOUT_S, Client, Question, random_tokens
from tests.vllm.serving import VllmServer, running, start

LENGTHS = (1, 5, 100, 127, 128, 129, 200, 256, 300, 511, 700, 1500)
CHUNKS = ("--max-num-batched-tokens", "256")
"""So that a prompt of some length takes several steps."""
TEST_CONFIG = {"handoff_lease_s": 10.0, "receive_timeout_s": 20.0, "control_timeout_s": 5.0}
"""Long enough for two servers on two busy cores."""
Answers = list[tuple[Question, list[int]]]


@pytest.fixture(scope="session")
def model() -> Path:
    return bundled_model_dir()


@pytest.fixture(scope="session")
def plain_answers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Questions, and the tokens that one plain vLLM answers them with."""
    folder = tmp_path_factory.mktemp("plain")
    questions = [Question(random_tokens(n, seed)) for seed, n in enumerate(LENGTHS)]
    with running(start("plain", model, folder, *CHUNKS)) as (server,):
        return asyncio.run(_answers(server, questions))


async def _answers(server: VllmServer, questions: list[Question]) -> Answers:
    async with aiohttp.ClientSession() as session:
        client = Client(session)
        return [(q, await client.tokens(server.url, q)) for q in questions]


@pytest.fixture(scope="module")
def pair(
    request: pytest.FixtureRequest,
    plain_answers: Answers,
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[VllmServer, VllmServer]]:
    """A prefill and a decode instance; started after the plain one has ended.

    A module's ``PAIR_ARGUMENTS`` and ``PAIR_CONFIG`` are added to both.
    """
    folder = tmp_path_factory.mktemp("pair")
    arguments = (*CHUNKS, *getattr(request.module, "PAIR_ARGUMENTS", ()))
    config = {**TEST_CONFIG, **getattr(request.module, "PAIR_CONFIG", {})}
    prefill = start("prefill", model, folder, *arguments, core=0, extra_config=config)
    decode = start("decode", model, folder, *arguments, core=1, extra_config=config)
    with running(prefill, decode):
        yield prefill, decode


@pytest.fixture
def prefill(pair: tuple[VllmServer, VllmServer]) -> VllmServer:
    return pair[0]


@pytest.fixture
def decode(pair: tuple[VllmServer, VllmServer]) -> VllmServer:
    return pair[1]


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        yield Client(session)
