"""vLLM's own NixlConnector behind the real router: the tokens are a plain server's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.vllm.asking import Question, random_tokens
from tests.vllm.conftest import Answers
from tests.vllm.nixl_pair import HITS, NixlPair, chosen_of, running_nixl
from tests.vllm.routing import RunningRouter, routing

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
_HANDOFFS = "kvferry_router_handoffs_total"
_BLOCK = 128


@pytest.fixture(scope="module")
def nixl_pair(
    plain_answers: Answers, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[NixlPair]:
    folder = tmp_path_factory.mktemp("pair")
    with running_nixl(model, folder, "NixlConnector", bidirectional_kv_xfer=True) as pair:
        yield pair


@pytest.fixture
async def router(nixl_pair: NixlPair, tmp_path: Path) -> AsyncIterator[RunningRouter]:
    async with routing(tmp_path, *nixl_pair.options) as running:
        yield running


async def test_pulls_give_the_tokens_of_a_plain_server(
    router: RunningRouter, nixl_pair: NixlPair, plain_answers: Answers
) -> None:
    before = await router.instance_figure(nixl_pair.decode.instance.url, HITS)
    chosen = chosen_of(plain_answers)
    for index, (question, expected) in enumerate(chosen):
        assert await router.tokens(question.again(), stream=index % 2 == 0) == expected
    moved = await router.instance_figure(nixl_pair.decode.instance.url, HITS) - before
    assert moved == sum(len(question.tokens) for question, _ in chosen)
    assert await router.figure(_HANDOFFS, mode="pull") == len(chosen)


async def test_an_unstreamed_turns_blocks_are_read_back_once(
    router: RunningRouter, nixl_pair: NixlPair
) -> None:
    prefill_url = nixl_pair.prefill.instance.url
    first = Question(random_tokens(900, 41))
    second = first.continued(await router.tokens(first), 200, 42)
    before = await router.instance_figure(prefill_url, HITS)
    answer = await router.tokens(second)
    num_read = await router.instance_figure(prefill_url, HITS) - before
    assert num_read == (900 - 8) // _BLOCK * _BLOCK
    # Under another salt nothing of it is cached or remembered anywhere.
    assert answer == await router.tokens(second.again())
    assert await router.figure("kvferry_router_history_hints_total") == 1
