"""vLLM's own NixlPushConnector behind the real router: the tokens are a plain server's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.vllm.conftest import Answers
from tests.vllm.nixl_pair import HITS, NixlPair, chosen_of, kill, running_nixl
from tests.vllm.routing import RunningRouter, routing

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
_HANDOFFS = "kvferry_router_handoffs_total"


@pytest.fixture(scope="module")
def nixl_pair(
    plain_answers: Answers, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[NixlPair]:
    with running_nixl(model, tmp_path_factory.mktemp("pair"), "NixlPushConnector") as pair:
        yield pair


@pytest.fixture
async def router(nixl_pair: NixlPair, tmp_path: Path) -> AsyncIterator[RunningRouter]:
    async with routing(tmp_path, *nixl_pair.options) as running:
        yield running


async def test_pushes_give_the_tokens_of_a_plain_server(
    router: RunningRouter, nixl_pair: NixlPair, plain_answers: Answers
) -> None:
    before = await router.instance_figure(nixl_pair.decode.instance.url, HITS)
    chosen = chosen_of(plain_answers)
    headers = {"X-Request-Id": "the-same-for-all"}
    for index, (question, expected) in enumerate(chosen):
        tokens = await router.tokens(question.again(), headers, stream=index % 2 == 0)
        assert tokens == expected
    moved = await router.instance_figure(nixl_pair.decode.instance.url, HITS) - before
    assert moved == sum(len(question.tokens) for question, _ in chosen)
    assert await router.figure(_HANDOFFS, mode="push") == len(chosen)


async def test_a_prefill_instance_that_dies_does_not_leave_decode_waiting(
    router: RunningRouter, nixl_pair: NixlPair, plain_answers: Answers
) -> None:
    question, expected = chosen_of(plain_answers)[-1]
    asked = asyncio.create_task(router.tokens(question.again()))
    async with asyncio.timeout(60):
        while not await router.figure("kvferry_router_instance_inflight", role="prefill"):
            await asyncio.sleep(0.01)
    kill(nixl_pair.prefill)
    assert await asked == expected
    fallback = {"outcome": "fallback_decode_only"}
    assert await router.figure("kvferry_router_requests_total", **fallback) == 1
