"""As ``test_soak_failures``, with requests of both modes at once on the same instances."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.integration.clear_answers import Judge
from tests.integration.deployment_setup import open_deployment
from tests.integration.test_soak_failures import MOVES, REQUESTS, Tally, soak, start
from tests.support.process_forks import ProcessForks

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("transport", list(MOVES))
async def test_every_answer_is_right_or_a_named_error_in_any_mode(
    forks: ProcessForks,
    tiny_model: Path,
    judge: Judge,
    tmp_path: Path,
    transport: str,
    soak_s: float,
    soak_random: random.Random,
) -> None:
    tally = Tally()
    with open_deployment(tmp_path, forks) as deployment:
        start(deployment, tiny_model, transport)
        modes = ("pull", "push", "auto")
        await soak(deployment, judge, tally, soak_random, soak_s, modes, REQUESTS)
    assert tally.counts["pull: received"] > 0
    assert tally.counts["push: received"] > 0
    assert tally.counts["killed"] + tally.counts["stopped"] > 0
