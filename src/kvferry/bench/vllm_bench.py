"""Asks vLLM deployments of several kinds, step by step, and takes what their users would see.

What is needed inside a request is taken at its client: the end of prefill is prefill's answer.
"""

from __future__ import annotations

import random
import secrets
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvferry.bench.client import StreamedAnswer
from kvferry.bench.legs_client import LegsAnswer, LegsClient
from kvferry.bench.turns_plan import TokenScript
from kvferry.bench.vllm_plan import VllmArm, VllmDeployment, VllmPlan, VllmStep
from kvferry.client.dialects import Json
from kvferry.client.nixl_history import NixlHistory
from kvferry.errors import MeasurementError
from kvferry.protocol.params import PeerAddress

_WARM_UP_TOKENS = 512
_SETTLE_TOKENS = 128


class Stage(Protocol):
    """Where deployments come and go."""

    async def use(self, deployment: VllmDeployment) -> LegsClient:
        """Return a client of ``deployment``, which runs now while no other computes.

        The same client as before if it has not been started anew since.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSample:
    """One request. Durations in seconds."""

    arm: VllmArm
    repeat: int
    num_prompt_tokens: int
    num_history_tokens: int
    """Of them, those of the turn before; 0 where none was."""
    prefill_s: float
    """From sending prefill's leg to its answer."""
    after_prefill_s: float
    """From prefill's answer to decode's first token."""
    ttft_s: float
    """From sending the first leg to decode's first token."""
    second_gap_s: float
    """From the first token to the second."""
    decode_step_s: float
    """Median gap between the later tokens of the same request."""
    tpot_s: float
    """Mean gap between tokens, from the first to the last."""
    num_moved_tokens: int
    num_read_back_tokens: int

    @property
    def extra_after_prefill_s(self) -> float:
        """The time after prefill less the decode step that the first token needs anyway."""
        return self.after_prefill_s - self.decode_step_s


class VllmBench:
    """Runs the steps of a plan. ``rng`` draws the prompts."""

    def __init__(self, stage: Stage, plan: VllmPlan, rng: random.Random) -> None:
        self._stage = stage
        self._plan = plan
        self._rng = rng
        self._client: LegsClient | None = None
        self._warm: list[LegsClient] = []

    async def run(
        self,
        steps: Sequence[VllmStep],
        *,
        is_over: Callable[[], bool] = lambda: False,
        on_step: Callable[[VllmStep], None] = lambda step: None,
    ) -> list[VllmSample]:
        """Return a sample of each step until ``is_over``.

        Raises ``MeasurementError`` if a step moved nothing although it is about that.
        """
        samples: list[VllmSample] = []
        for step in steps:
            if is_over():
                break
            client = await self._ready_client(step.arm)
            take = self._turn if step.arm.has_turns else self._handoff
            samples.append(await take(client, step))
            on_step(step)
        return samples

    async def _ready_client(self, arm: VllmArm) -> LegsClient:
        """Return the arm's client, after a request that does not count where others ran before."""
        client = await self._stage.use(arm.deployment)
        if not any(client is other for other in self._warm):
            self._warm.append(client)
            for mode in arm.deployment.engine.modes:
                await client.ask(self._body(self._draw(_WARM_UP_TOKENS)), mode)
        if client is not self._client:
            self._client = client
            await client.ask(self._body(self._draw(_SETTLE_TOKENS)), arm.mode)
        return client

    async def _handoff(self, client: LegsClient, step: VllmStep) -> VllmSample:
        legs = await client.ask(self._body(self._draw(step.num_tokens)), step.arm.mode)
        if legs.num_moved_tokens <= 0:
            raise MeasurementError(f"{step.arm}: nothing was moved for {step.num_tokens} tokens")
        return _sample(step, legs, num_prompt_tokens=step.num_tokens, num_history_tokens=0)

    async def _turn(self, client: LegsClient, step: VllmStep) -> VllmSample:
        plan = self._plan
        script = TokenScript(
            (self._draw(step.num_tokens - plan.max_tokens), self._draw(plan.new_tokens)),
            plan.max_tokens,
        )
        salt = secrets.token_hex(8)
        first, history = await self._first_turn(client, step.arm, self._body_of(script, (), salt))
        body = self._body_of(script, (first,), salt)
        legs = await client.ask(body, step.arm.mode, history=history)
        read_back = legs.prefill_report.num_read_back_tokens if legs.prefill_report else 0
        if step.arm is VllmArm.FERRY_READ_BACK and not read_back:
            outcome = legs.prefill_report.read_back_outcome if legs.prefill_report else ""
            raise MeasurementError(f"{step.arm}: nothing was read back: {outcome or 'not tried'}")
        return _sample(
            step,
            legs,
            num_prompt_tokens=step.num_tokens + plan.new_tokens,
            num_history_tokens=step.num_tokens,
        )

    async def _first_turn(
        self, client: LegsClient, arm: VllmArm, body: Json
    ) -> tuple[StreamedAnswer, PeerAddress | NixlHistory | None]:
        """Return a first turn's answer, and what the next turn's prefill is told of its holder.

        With FerryConnector decode computes it alone, so that prefill has never seen the history.
        """
        if arm is VllmArm.NIXL_READ_BACK:
            answer = (await client.ask(body, arm.mode)).decode
            named = answer.transfer_params
            if named is None:
                return answer, None
            return answer, NixlHistory(msgspec.Raw(msgspec.json.encode(named)))
        answer = await client.ask_decode_alone(body)
        return answer, await client.decode_peer() if arm.reads_back else None

    def _draw(self, count: int) -> tuple[int, ...]:
        first, last = self._plan.first_token_id, self._plan.last_token_id
        return tuple(self._rng.randint(first, last) for _ in range(count))

    def _body(self, prompt: Sequence[int]) -> Json:
        script = TokenScript((tuple(prompt),), self._plan.max_tokens)
        return self._body_of(script, (), secrets.token_hex(8))

    def _body_of(self, script: TokenScript, answers: Sequence[StreamedAnswer], salt: str) -> Json:
        return {**script.fields(answers), "temperature": 0, "cache_salt": salt}


def _sample(
    step: VllmStep, legs: LegsAnswer, *, num_prompt_tokens: int, num_history_tokens: int
) -> VllmSample:
    answer = legs.decode
    num_gaps = len(answer.token_ids) - 1
    if num_gaps < 3:
        raise MeasurementError(f"{step.arm}: only {num_gaps + 1} tokens came")
    return VllmSample(
        arm=step.arm,
        repeat=step.repeat,
        num_prompt_tokens=num_prompt_tokens,
        num_history_tokens=num_history_tokens,
        prefill_s=legs.prefill_s,
        after_prefill_s=legs.after_prefill_s,
        ttft_s=answer.ttft_s,
        second_gap_s=answer.second_gap_s,
        decode_step_s=statistics.median(answer.gaps_s()),
        tpot_s=(answer.token_times_s[-1] - answer.token_times_s[0]) / num_gaps,
        num_moved_tokens=legs.num_moved_tokens,
        num_read_back_tokens=(
            legs.prefill_report.num_read_back_tokens if legs.prefill_report else 0
        ),
    )
