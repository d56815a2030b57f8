"""Which vLLM deployments are compared, what is asked of them, and in which order. Pure."""

from __future__ import annotations

import enum
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvferry.bench.turns_plan import arm_rotations
from kvferry.client.engine_kinds import EngineKind
from kvferry.errors import ConfigError
from kvferry.protocol.params import Role

_NO_PREFIX_CACHE = ("--no-enable-prefix-caching",)


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

    arms: tuple[VllmArm, ...] = tuple(VllmArm)
    lengths_tokens: tuple[int, ...] = (64, 512, 2048, 4096)
    """Of the prompts whose handoff is measured."""
    history_tokens: int = 2048
    """Of the turns: the prompt before and its answer."""
    new_tokens: int = 100
    repeats: int = 8
    rounds: int = 2
    """In how many starts of each deployment the repeats are done, where not all fit at once."""
    max_tokens: int = 12
    first_token_id: int = 1_000
    last_token_id: int = 40_000
    """Prompts are drawn from this range, both ends included."""

    def __post_init__(self) -> None:
        """Refuse a plan that measures nothing. Raises ``ConfigError``."""
        if not self.arms or len(set(self.arms)) < len(self.arms):
            raise ConfigError("arms must be one or more, each of them once")
        if not self.lengths_tokens or min(self.lengths_tokens) < 1:
            raise ConfigError("lengths must be one or more positive token counts")
        if not 1 <= self.rounds <= self.repeats:
            raise ConfigError("rounds must be at least 1 and at most the repeats")
        if self.max_tokens < 4:
            raise ConfigError("max tokens must be at least 4: a decode step is measured after two")
        if self.history_tokens <= self.max_tokens or self.new_tokens < 1:
            raise ConfigError("a history must be longer than an answer, and a turn adds a token")

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
    for repeats, order in zip(_rounds(plan), orders, strict=False):
        for deployment in order:
            arms = [arm for arm in plan.arms if arm.deployment is deployment]
            steps += _alternating(plan, arms, repeats, rng)
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


def _rounds(plan: VllmPlan) -> list[range]:
    """Return the repeats of each round, as evenly as can be."""
    bounds = [plan.repeats * number // plan.rounds for number in range(plan.rounds + 1)]
    return [range(*pair) for pair in itertools.pairwise(bounds)]
