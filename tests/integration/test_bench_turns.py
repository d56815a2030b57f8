"""The turns benchmark against a real deployment: each arm has its history from where it says."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from kvferry.bench.client import CompletionClient
from kvferry.bench.turns import (
    TurnArm,
    TurnSample,
    TurnsBench,
    TurnsPlan,
    TurnTargets,
    plan_conversations,
)
from kvferry.bench.turns_report import check_answers
from kvferry.clock import SystemClock
from tests.integration.deployment_setup import Deployment, open_deployment
from tests.support.process_forks import ProcessForks

pytestmark = pytest.mark.slow

BLOCK_TOKENS = 16
PLAN = TurnsPlan(
    shapes=((200, 90, 90, 90),),
    answer_tokens=8,
    repeats=2,
    last_token_id=250,
)
TIMEOUT = aiohttp.ClientTimeout(total=30)


@pytest.fixture(scope="module")
def deployment(
    forks: ProcessForks, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    with open_deployment(tmp_path_factory.mktemp("turns"), forks) as deployment:
        engines = [
            deployment.add_engine(name, tiny_model, "--num-blocks", "512", "--enable-dev-endpoints")
            for name in ("prefill", "decode")
        ]
        deployment.wait_ready()
        deployment.add_router(engines[:1], engines[1:])
        yield deployment


async def _measure(deployment: Deployment) -> list[TurnSample]:
    rng = random.Random(1)
    conversations = plan_conversations(
        PLAN.arms, range(PLAN.repeats), lambda: PLAN.draw_scripts(rng), rng, "run"
    )
    targets = TurnTargets(
        router_url=deployment["router"].url, prefill_urls=(deployment["prefill"].url,)
    )
    async with aiohttp.ClientSession(timeout=TIMEOUT) as session:
        client = CompletionClient(session, SystemClock())
        return await TurnsBench(client, targets, lambda num_bytes: 0.0).run(conversations)


async def test_every_arm_has_its_history_from_where_it_says(deployment: Deployment) -> None:
    samples = await _measure(deployment)
    assert [sample.num_prompt_tokens for sample in samples[:4]] == [200, 298, 396, 494]
    for sample in samples:
        case = f"{sample.arm} at turn {sample.turn}"
        history = sample.num_history_tokens
        # The answer's last token was never computed on, so its block may lack it.
        is_whole = history - 2 * BLOCK_TOKENS
        if sample.arm.reads_back and history:
            assert sample.num_read_back_tokens >= history - BLOCK_TOKENS, case
            assert sample.num_read_back_bytes > 0, case
            assert sample.outcome == "received", case
            assert sample.read_back_s > 0, case
        elif sample.arm is TurnArm.WARM and history:
            assert sample.num_cached_tokens >= is_whole, case
        else:
            assert sample.num_computed_tokens == sample.num_prompt_tokens, case
        reused = sample.num_cached_tokens + sample.num_read_back_tokens
        assert reused + sample.num_computed_tokens == sample.num_prompt_tokens, case
        assert sample.num_usage_cached_tokens == reused, case
        assert sample.compute_s > 0, case
    checks = check_answers(samples)
    assert [check.num_same for check in checks] == [4 * PLAN.repeats] * 5
