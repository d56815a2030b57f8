"""Prefill or decode killed or stopped at each moment of a handoff: right tokens, whole pools."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator

import pytest

from tests.vllm.asking import Client, Question, decode_params, new_transfer_id, random_tokens
from tests.vllm.conftest import Pair
from tests.vllm.serving import VllmServer
from tests.vllm.settling import have_all_run, wait_for, wait_whole

pytestmark = [pytest.mark.vllm, pytest.mark.soak, pytest.mark.timeout(600)]
PAIR_CONFIG = {
    "retention_s": 0,
    "handoff_lease_s": 3.0,
    "control_timeout_s": 1.0,
    "receive_timeout_s": 5.0,
}
_ANSWER_S = 10.0
"""From the fault to the end of the answer, beside what computing the prompt takes."""
_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_CASES = [
    ("pull", "held"),
    ("push", "held"),
    ("push", "registered"),
    ("push", "computing"),
    ("pull", "answering"),
    ("push", "answering"),
]


class _Handoff:
    """One handoff, led up to a moment."""

    def __init__(self, client: Client, pair: Pair, mode: str, question: Question) -> None:
        self._client = client
        self.prefill, self.decode = pair
        self._mode = mode
        self._question = question
        self._transfer_id = new_transfer_id()
        self._params = decode_params(self._transfer_id, self.prefill.peer(), mode)
        self.prefill_leg: asyncio.Task[object] | None = None
        self.decode_leg: asyncio.Task[list[int]] | None = None

    async def lead_up_to(self, moment: str) -> None:
        """Return at that moment; what runs goes on."""
        if moment in ("registered", "computing"):
            self.start_decode()
            await wait_for(lambda: self.decode.metric(_WAITING) >= 1)
        if moment in ("held", "answering"):
            await self._prefill()
        if moment == "computing":
            self.prefill_leg = asyncio.create_task(self._prefill())
            await wait_for(lambda: self.prefill.metric(_RUNNING) >= 1)
        if moment == "answering":
            self.start_decode()
            await wait_for(lambda: self.decode.metric(_RUNNING) >= 1)

    def start_decode(self) -> asyncio.Task[list[int]]:
        """Send the decode leg, if it was not sent."""
        if self.decode_leg is None:
            leg = self._client.tokens(
                self.decode.url, self._question, kv_transfer_params=self._params
            )
            self.decode_leg = asyncio.create_task(leg)
        return self.decode_leg

    async def end(self) -> None:
        """Wait for what is left of either leg, however it ends."""
        for leg in (self.prefill_leg, self.decode_leg):
            if leg is not None:
                with contextlib.suppress(Exception):
                    await leg

    async def _prefill(self) -> object:
        return await self._client.prefill(
            self.prefill.url, self._question, self._transfer_id, mode=self._mode
        )


@pytest.fixture
async def whole_afterwards(pair: Pair, client: Client) -> AsyncIterator[None]:
    yield
    await have_all_run(*pair)
    await wait_whole(client, *pair)


async def _question(client: Client, decode: VllmServer) -> tuple[Question, list[int], float]:
    """Return a question, its right tokens, and how long computing them takes."""
    question = Question(random_tokens(1500, 700), max_tokens=24)
    began_s = time.monotonic()
    expected = await client.tokens(decode.url, question.again())
    return question.again(), expected, time.monotonic() - began_s


@pytest.mark.usefixtures("whole_afterwards")
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize(("mode", "moment"), _CASES)
async def test_a_prefill_instance_that_is_lost_costs_a_recompute(
    pair: Pair, client: Client, mode: str, moment: str, fault: signal.Signals
) -> None:
    prefill, decode = pair
    question, expected, plain_s = await _question(client, decode)
    handoff = _Handoff(client, pair, mode, question)
    await handoff.lead_up_to(moment)
    began_s = time.monotonic()
    prefill.send(fault)
    assert await handoff.start_decode() == expected
    took_s = time.monotonic() - began_s
    assert took_s < _ANSWER_S + 3 * plain_s
    if fault is signal.SIGKILL:
        await wait_whole(client, decode)
    prefill.send(signal.SIGCONT)
    await handoff.end()


@pytest.mark.usefixtures("whole_afterwards")
@pytest.mark.parametrize(("mode", "moment"), _CASES)
async def test_a_decode_instance_that_is_killed_lets_prefill_free_its_blocks(
    pair: Pair, client: Client, mode: str, moment: str
) -> None:
    prefill, decode = pair
    question, expected, _ = await _question(client, decode)
    handoff = _Handoff(client, pair, mode, question)
    await handoff.lead_up_to(moment)
    decode.kill()
    await handoff.end()
    await wait_whole(client, prefill)
    assert await client.tokens(prefill.url, question.again()) == expected
