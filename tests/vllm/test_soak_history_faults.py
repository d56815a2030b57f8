"""A read-back whose holder is lost, or whose client leaves: right tokens, whole pools."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import AsyncIterator

import pytest

from tests.vllm.asking import (
    Client,
    Json,
    Question,
    hint,
    num_read_back,
    random_tokens,
    read_back_outcome,
)
from tests.vllm.conftest import Pair
from tests.vllm.settling import have_all_run, wait_whole

pytestmark = [pytest.mark.vllm, pytest.mark.soak, pytest.mark.timeout(600)]
PAIR_CONFIG = {
    "retention_s": 300.0,
    "handoff_lease_s": 3.0,
    "control_timeout_s": 1.0,
    "receive_timeout_s": 5.0,
}
_ANSWER_S = 10.0
"""From the fault to the end of prefill, beside what computing the prompt takes."""
_MAX_DELAY_S = 0.06
"""About as long as asking for, and reading, a history of this length takes."""
_NUM_ABORTS = 6


@pytest.fixture
async def whole_afterwards(pair: Pair, client: Client) -> AsyncIterator[None]:
    yield
    await have_all_run(*pair)
    for server in pair:
        await client.reset_at_last(server.url)
    await wait_whole(client, *pair)


class _Turn:
    """A second turn whose history decode holds, and its right tokens."""

    def __init__(self, client: Client, pair: Pair, seed: int) -> None:
        self._client = client
        self.prefill, self.decode = pair
        self._seed = seed
        self._holder = hint(self.decode.peer())
        self.plain_s = 0.0

    async def begin(self) -> None:
        first = Question(random_tokens(2000, self._seed))
        answer = await self._client.tokens(self.decode.url, first)
        self.question = first.continued(answer, 60, self._seed + 1)
        began_s = time.monotonic()
        self.expected = await self._client.tokens(self.prefill.url, self.question.again())
        self.plain_s = time.monotonic() - began_s

    async def run(self) -> Json | None:
        return await self._client.prefill(self.prefill.url, self.question, history=self._holder)

    async def assert_right(self) -> None:
        """What prefill has in its cache now, read back or computed, gives the right tokens."""
        assert await self._client.tokens(self.prefill.url, self.question) == self.expected


@pytest.mark.usefixtures("whole_afterwards")
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("moment", ["before", "reading"])
async def test_a_holder_that_is_lost_costs_a_recompute(
    pair: Pair, client: Client, moment: str, fault: signal.Signals, soak_random: random.Random
) -> None:
    turn = _Turn(client, pair, soak_random.randrange(2**20))
    await turn.begin()
    leg = None
    if moment == "reading":
        leg = asyncio.create_task(turn.run())
        await asyncio.sleep(soak_random.uniform(0, _MAX_DELAY_S))
    began_s = time.monotonic()
    turn.decode.send(fault)
    offered = await (leg or turn.run())
    assert time.monotonic() - began_s < _ANSWER_S + 3 * turn.plain_s
    await turn.assert_right()
    outcome = read_back_outcome(offered)
    assert outcome in {"unreachable", "slow", "failed", "gone"} or (
        outcome == "received" and moment == "reading"
    )


@pytest.mark.usefixtures("whole_afterwards")
async def test_a_client_that_leaves_at_any_moment_leaves_nothing(
    pair: Pair, client: Client, soak_random: random.Random
) -> None:
    turn = _Turn(client, pair, soak_random.randrange(2**20))
    await turn.begin()
    for _ in range(_NUM_ABORTS):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(soak_random.uniform(0.001, 2 * _MAX_DELAY_S)):
                await turn.run()
        await turn.assert_right()
        await client.reset_at_last(turn.prefill.url)
    offered = await turn.run()
    assert num_read_back(offered) > 2000
    await turn.assert_right()
