"""vLLM's own connectors against ours: what is asked of which deployment, in which order.

Takes what users of the deployments would see; what is needed inside a request is taken at its
client: the end of prefill is prefill's answer.
"""

from __future__ import annotations

import enum
import itertools
import random
import secrets
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvferry.bench.client import StreamedAnswer
from kvferry.bench.legs_client import LegsAnswer, LegsClient
from kvferry.bench.plan import (
    MIN_ANSWER_TOKENS,
    arm_rotations,
    draw_tokens,
    last_token_id_option,
    require,
    require_lengths,
    require_sane,
    tokens_body,
)
from kvferry.bench.report import (
    RATIO_LEGEND,
    Groups,
    Report,
    format_ratio,
    paired_ratio,
    sample_fields,
    values,
)
from kvferry.bench.turns import token_script
from kvferry.client.dialects import Json
from kvferry.client.engine_kinds import EngineKind
from kvferry.client.nixl_history import NixlHistory
from kvferry.errors import MeasurementError
from kvferry.options import option
from kvferry.protocol.params import PeerAddress, Role

_NO_PREFIX_CACHE = ("--no-enable-prefix-caching",)
_WARM_UP_TOKENS = 512
_SETTLE_TOKENS = 128


class VllmDeployment(enum.StrEnum):
    """A prefill and a decode instance of one kind."""

    NIXL = "nixl"
    """vLLM's NixlConnector."""
    NIXL_PUSH = "nixl-push"
    """vLLM's NixlPushConnector."""
    NIXL_BIDIRECTIONAL = "nixl-bidirectional"
    """NixlConnector that may read back; prefill without a prefix cache, as if it had lost it."""
    FERRY = "ferry"
    """FerryConnector, which pulls, pushes and reads back."""

    @property
    def engine(self) -> EngineKind:
        """How its legs are asked."""
        match self:
            case VllmDeployment.NIXL | VllmDeployment.NIXL_BIDIRECTIONAL:
                return EngineKind.VLLM_NIXL
            case VllmDeployment.NIXL_PUSH:
                return EngineKind.VLLM_NIXL_PUSH
            case VllmDeployment.FERRY:
                return EngineKind.VLLM

    def arguments(self, role: Role) -> tuple[str, ...]:
        """Return further arguments of its instance of one role."""
        loses = self is VllmDeployment.NIXL_BIDIRECTIONAL and role is Role.PREFILL
        return _NO_PREFIX_CACHE if loses else ()

    def transfer_config(self) -> dict[str, object]:
        """Return what ``--kv-transfer-config`` says to both of its instances."""
        config: dict[str, object] = {"kv_role": "kv_both"}
        match self:
            case VllmDeployment.NIXL:
                return {**config, "kv_connector": "NixlConnector"}
            case VllmDeployment.NIXL_PUSH:
                return {**config, "kv_connector": "NixlPushConnector"}
            case VllmDeployment.NIXL_BIDIRECTIONAL:
                extra = {"bidirectional_kv_xfer": True}
                config["kv_connector_extra_config"] = extra
                return {**config, "kv_connector": "NixlConnector"}
            case VllmDeployment.FERRY:
                return {
                    **config,
                    "kv_connector": "FerryConnector",
                    "kv_connector_module_path": "kvferry.vllm_plugin",
                    "kv_load_failure_policy": "recompute",
                }


class VllmArm(enum.StrEnum):
    """How one request is served. Ends with how the KV moves, or where a history comes from."""

    NIXL_PULL = "nixl-pull"
    FERRY_PULL = "ferry-pull"
    NIXL_PUSH = "nixl-push"
    FERRY_PUSH = "ferry-push"
    FERRY_RECOMPUTE = "ferry-recompute"
    """A second turn whose history prefill computes again."""
    FERRY_READ_BACK = "ferry-read-back"
    """A second turn whose history prefill reads back."""
    NIXL_READ_BACK = "nixl-read-back"
    """The same with vLLM's own means, after a streamed answer."""

    @property
    def deployment(self) -> VllmDeployment:
        """Who serves it."""
        match self:
            case VllmArm.NIXL_PULL:
                return VllmDeployment.NIXL
            case VllmArm.NIXL_PUSH:
                return VllmDeployment.NIXL_PUSH
            case VllmArm.NIXL_READ_BACK:
                return VllmDeployment.NIXL_BIDIRECTIONAL
            case _:
                return VllmDeployment.FERRY

    @property
    def mode(self) -> str:
        """How the KV of the handoff moves."""
        return "push" if self in (VllmArm.NIXL_PUSH, VllmArm.FERRY_PUSH) else "pull"

    @property
    def has_turns(self) -> bool:
        """Whether a conversation's second turn is measured, not a handoff."""
        return self in _TURN_ARMS

    @property
    def reads_back(self) -> bool:
        """Whether the history is to come from the decode instance."""
        return self in (VllmArm.FERRY_READ_BACK, VllmArm.NIXL_READ_BACK)


_TURN_ARMS = (VllmArm.FERRY_RECOMPUTE, VllmArm.FERRY_READ_BACK, VllmArm.NIXL_READ_BACK)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmPlan:
    """What is asked, and how often."""

    arms: tuple[VllmArm, ...] = option(tuple(VllmArm), "What to compare.", is_list=True)
    lengths_tokens: tuple[int, ...] = option(
        (64, 512, 2048, 4096), "Prompt tokens of handoffs.", flag="--lengths", is_list=True
    )
    history_tokens: int = option(
        2048, "Tokens of history of second turns, the answer included.", flag="--history"
    )
    new_tokens: int = option(100, "New tokens of second turns.")
    repeats: int = option(8, "Requests of each length and arm.")
    rounds: int = 2
    """In how many starts of each deployment the repeats are done, where not all fit at once."""
    max_tokens: int = option(12, "Tokens of each answer.")
    last_token_id: int = last_token_id_option()

    def __post_init__(self) -> None:
        """Refuse a plan that measures nothing. Raises ``ConfigError``."""
        require_sane(self.arms, self.repeats, 0, self.last_token_id)
        require_lengths(self.lengths_tokens, self.max_tokens)
        fits = 1 <= self.rounds <= self.repeats
        require(fits, "rounds must be at least 1 and at most the repeats")
        has_turn = self.history_tokens > self.max_tokens and self.new_tokens >= 1
        require(has_turn, "a history must be longer than an answer, and a turn adds a token")

    @property
    def deployments(self) -> tuple[VllmDeployment, ...]:
        """Which are needed, in an order of their own."""
        needed = {arm.deployment for arm in self.arms}
        return tuple(deployment for deployment in VllmDeployment if deployment in needed)


@dataclass(frozen=True, slots=True)
class VllmStep:
    """One request that counts, or one conversation of two turns."""

    arm: VllmArm
    num_tokens: int
    """Of the prompt; of the history where a turn is measured."""
    repeat: int


def plan_steps(plan: VllmPlan, rng: random.Random, *, all_at_once: bool) -> list[VllmStep]:
    """Return every step in its order.

    ``all_at_once``: arms alternate request by request. Else each round has the deployments one
    after another, in another order each time, so that each is started once a round.
    """
    if all_at_once:
        return list(_alternating(plan, plan.arms, range(plan.repeats), rng))
    steps: list[VllmStep] = []
    orders = arm_rotations(plan.deployments, rng)
    bounds = [plan.repeats * number // plan.rounds for number in range(plan.rounds + 1)]
    for (first, end), order in zip(itertools.pairwise(bounds), orders, strict=False):
        for deployment in order:
            arms = [arm for arm in plan.arms if arm.deployment is deployment]
            steps += _alternating(plan, arms, range(first, end), rng)
    return steps


def _alternating(
    plan: VllmPlan, arms: Sequence[VllmArm], repeats: range, rng: random.Random
) -> Iterator[VllmStep]:
    orders = arm_rotations(arms, rng)
    for repeat in repeats:
        for length in plan.lengths_tokens:
            for arm in next(orders):
                if not arm.has_turns:
                    yield VllmStep(arm, length, repeat)
        for arm in next(orders):
            if arm.has_turns:
                yield VllmStep(arm, plan.history_tokens, repeat)


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
                await client.ask(self._body(_WARM_UP_TOKENS), mode)
        if client is not self._client:
            self._client = client
            await client.ask(self._body(_SETTLE_TOKENS), arm.mode)
        return client

    async def _handoff(self, client: LegsClient, step: VllmStep) -> VllmSample:
        legs = await client.ask(self._body(step.num_tokens), step.arm.mode)
        if legs.num_moved_tokens <= 0:
            raise MeasurementError(f"{step.arm}: nothing was moved for {step.num_tokens} tokens")
        return _sample(step, legs, num_prompt_tokens=step.num_tokens, num_history_tokens=0)

    async def _turn(self, client: LegsClient, step: VllmStep) -> VllmSample:
        plan = self._plan
        first_prompt = self._draw(step.num_tokens - plan.max_tokens)
        script = token_script([first_prompt, self._draw(plan.new_tokens)], plan.max_tokens)
        salt = {"temperature": 0, "cache_salt": secrets.token_hex(8)}
        first, history = await self._first_turn(client, step.arm, {**script.fields([]), **salt})
        body = {**script.fields([first]), **salt}
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

    def _draw(self, count: int) -> list[int]:
        return draw_tokens(self._rng, count, self._plan.last_token_id)

    def _body(self, num_tokens: int) -> Json:
        """Return a request with a new prompt under a salt of its own."""
        body = tokens_body(self._draw(num_tokens), self._plan.max_tokens)
        return {**body, "cache_salt": secrets.token_hex(8)}


def _sample(
    step: VllmStep, legs: LegsAnswer, *, num_prompt_tokens: int, num_history_tokens: int
) -> VllmSample:
    answer = legs.decode
    num_gaps = len(answer.token_ids) - 1
    if len(answer.token_ids) < MIN_ANSWER_TOKENS:
        raise MeasurementError(f"{step.arm}: only {len(answer.token_ids)} tokens came")
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


_FIGURES = {
    "prefill_s": "P's prefill",
    "extra_after_prefill_s": "after P less a step",
    "ttft_s": "TTFT",
    "second_gap_s": "gap to 2nd token",
    "tpot_s": "TPOT",
}
_COMPARED = (
    (VllmArm.FERRY_PULL, VllmArm.NIXL_PULL),
    (VllmArm.FERRY_PUSH, VllmArm.NIXL_PUSH),
    (VllmArm.FERRY_PUSH, VllmArm.FERRY_PULL),
    (VllmArm.FERRY_RECOMPUTE, VllmArm.FERRY_READ_BACK),
    (VllmArm.NIXL_READ_BACK, VllmArm.FERRY_READ_BACK),
)
_LEGEND = (
    "milliseconds, median (interquartile range); P's prefill: from sending its leg to its answer; "
    "after P: from there to the first token of D, less D's median gap between later tokens"
)
_TURN_LEGEND = (
    "a conversation's second turn, prefill without a cache of the first; read back: tokens"
)


def report_vllm(samples: Sequence[VllmSample], rng: random.Random) -> Report:
    """Return the medians of handoffs and of turns, each with its ratios, and raw samples."""
    text, summaries, ratios = [], [], []
    for has_turns, legend in ((False, _LEGEND), (True, _TURN_LEGEND)):
        found = [sample for sample in samples if sample.arm.has_turns is has_turns]
        if not found:
            continue
        groups = Groups(found, {"num_prompt_tokens": "prompt"})
        over = groups.compare(_COMPARED, tuple(_FIGURES), paired_ratio, rng)
        further = {"read back": _read_back} if has_turns else None
        text += [groups.medians_table(_FIGURES, further), legend]
        text += groups.comparisons_text(over, _FIGURES, "/", format_ratio, RATIO_LEGEND)
        summaries += groups.summaries(tuple(_FIGURES))
        ratios += groups.compared(over, "over")
    raw = [sample_fields(sample) for sample in samples]
    fields = {"summaries": summaries, "ratios": ratios, "samples": raw}
    return Report("vllm", 2, fields, "\n\n".join(text))


def _read_back(samples: list[VllmSample]) -> str:
    return f"{statistics.median(values(samples, 'num_read_back_tokens')):.0f}"
