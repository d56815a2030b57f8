"""Requests of mixed lengths at once, through two prefill and two decode instances."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.integration.deployment_client import (
    body_of,
    fresh_prompt,
    open_client,
)
from tests.integration.deployment_setup import (
    BOUND_S,
    open_deployment,
)
from tests.support.process_forks import ProcessForks

pytestmark = pytest.mark.slow

LENGTHS = (1, 17, 65, 255, 256, 513, 1025, 2049)


async def test_eight_requests_at_once_are_all_right(
    forks: ProcessForks, tiny_model: Path, tmp_path: Path
) -> None:
    options = ("--transport", "nixl", "--num-blocks", "600", "--max-held-share", "1")
    with open_deployment(tmp_path, forks) as deployment:
        prefill = [deployment.add_engine(f"prefill-{n}", tiny_model, *options) for n in range(2)]
        decode = [deployment.add_engine(f"decode-{n}", tiny_model, *options) for n in range(2)]
        deployment.wait_ready()
        router = deployment.add_router(prefill, decode)
        bodies = [body_of(fresh_prompt(length), 12, stream=True) for length in LENGTHS]
        async with open_client() as client:
            right = [await client.plain(prefill[0], body | {"stream": False}) for body in bodies]
            answers = await asyncio.gather(
                *(client.post(router, body, bound_s=2 * BOUND_S) for body in bodies)
            )
            assert [answer.token_ids for answer in answers] == right
            assert all(answer.is_done for answer in answers)
            moved = [answer.outcome for answer in answers if answer.report["num_received_bytes"]]
            assert moved == ["received"] * sum(length >= 64 for length in LENGTHS)
            await client.wait_whole(*deployment.instances)
