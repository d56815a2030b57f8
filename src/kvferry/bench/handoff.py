"""What a handoff costs, measured inside each request on one host's clock.

The arms are interleaved: ``pull`` and the two pushes go through a router, ``colocated`` asks one
instance directly, which does both parts. Prompts are random token ids, new for each request, so
that no cache helps.
"""

from __future__ import annotations

import enum
import itertools
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.bench.client import Asker, KvReport, StreamedAnswer
from kvferry.errors import ConfigError, MeasurementError


class Arm(enum.StrEnum):
    """How a request is served."""

    COLOCATED = "colocated"
    PULL = "pull"
    PUSH = "push"
    """The decode instance is chosen when the request arrives."""
    PUSH_LATE = "push-late"
    """The decode instance is chosen while prefill computes."""

    @property
    def mode(self) -> str | None:
        """The mode that is asked of the router; None: there is no router in between."""
        match self:
            case Arm.COLOCATED:
                return None
            case Arm.PULL:
                return "pull"
            case Arm.PUSH | Arm.PUSH_LATE:
                return "push"


DEFAULT_ARMS = (Arm.COLOCATED, Arm.PULL, Arm.PUSH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Base URLs without a trailing slash."""

    router_url: str
    plain_url: str
    """An instance that serves the colocated arm."""
    late_router_url: str | None = None
    """A router that chooses the decode instance late."""

    def url(self, arm: Arm) -> str:
        """Return where requests of ``arm`` go. Raises ``ConfigError`` if nothing serves it."""
        match arm:
            case Arm.COLOCATED:
                base: str | None = self.plain_url
            case Arm.PULL | Arm.PUSH:
                base = self.router_url
            case Arm.PUSH_LATE:
                base = self.late_router_url
        if base is None:
            raise ConfigError(f"{arm} needs a router that chooses the decode instance late")
        return f"{base}/v1/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffPlan:
    """What is asked, and how often."""

    arms: tuple[Arm, ...] = DEFAULT_ARMS
    lengths_tokens: tuple[int, ...] = (512, 2048)
    repeats: int = 30
    """Requests of each length and arm that count."""
    warmups: int = 2
    """Further ones before, of each length and arm, that do not."""
    max_tokens: int = 12
    model: str | None = None
    first_token_id: int = 1_000
    last_token_id: int = 40_000
    """Prompts are drawn from this range, both ends included."""

    def __post_init__(self) -> None:
        """Refuse a plan that measures nothing. Raises ``ConfigError``."""
        if not self.arms or len(set(self.arms)) < len(self.arms):
            raise ConfigError("arms must be one or more, each of them once")
        if not self.lengths_tokens or min(self.lengths_tokens) < 1:
            raise ConfigError("lengths must be one or more positive token counts")
        if self.repeats < 1 or self.warmups < 0:
            raise ConfigError("repeats must be at least 1, warm-ups at least 0")
        if self.max_tokens < 4:
            raise ConfigError("max tokens must be at least 4: a decode step is measured after two")
        if not 0 <= self.first_token_id < self.last_token_id:
            raise ConfigError("the range of token ids is empty")

    @property
    def num_requests(self) -> int:
        """How many requests the plan sends."""
        return len(self.lengths_tokens) * len(self.arms) * (self.repeats + self.warmups)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffSample:
    """One request. Durations in seconds."""

    arm: Arm
    num_prompt_tokens: int
    repeat: int
    ttft_s: float
    until_prefill_end_s: float
    """From sending the request to the end of prefill's last forward."""
    after_prefill_s: float
    """From the end of prefill's last forward to the client's first token; less a decode step where
    decode takes one for it."""
    second_gap_s: float
    """From the first token to the second, both at the client."""
    decode_step_s: float
    """Median gap between the later tokens of the same request."""
    num_received_tokens: int
    num_received_bytes: int
    transport: str

    @property
    def extra_gap_s(self) -> float:
        """The gap to the second token less one decode step."""
        return self.second_gap_s - self.decode_step_s


async def measure_handoffs(
    client: Asker,
    targets: Targets,
    plan: HandoffPlan,
    rng: random.Random,
    *,
    on_request: Callable[[], None] = lambda: None,
) -> list[HandoffSample]:
    """Send the plan's requests one after another and return those that count.

    Each repeat runs the arms in another order; the orders take turns. Raises ``MeasurementError``
    if an answer is not what its arm says (a pull that moved nothing, a report without times).
    """
    samples = []
    urls = {arm: targets.url(arm) for arm in plan.arms}
    orders = arm_orders(plan.arms, rng)
    for repeat in range(-plan.warmups, plan.repeats):
        for length in plan.lengths_tokens:
            for arm in orders[repeat % len(orders)]:
                body = _body(plan, length, rng)
                answer = await client.stream(urls[arm], body, mode=arm.mode)
                sample = _sample(arm, length, repeat, answer)
                if repeat >= 0:
                    samples.append(sample)
                on_request()
    return samples


def arm_orders(arms: Sequence[Arm], rng: random.Random) -> list[tuple[Arm, ...]]:
    """Return every order of ``arms``, shuffled: used in turn, no arm has a place of its own."""
    orders = list(itertools.permutations(arms))
    rng.shuffle(orders)
    return orders


def _body(plan: HandoffPlan, length: int, rng: random.Random) -> dict[str, object]:
    prompt = [rng.randint(plan.first_token_id, plan.last_token_id) for _ in range(length)]
    body: dict[str, object] = {
        "prompt": prompt,
        "max_tokens": plan.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    return body if plan.model is None else {**body, "model": plan.model}


def _sample(arm: Arm, length: int, repeat: int, answer: StreamedAnswer) -> HandoffSample:
    report = _checked_report(arm, length, answer)
    step_s = statistics.median(answer.gaps_s())
    own_step_s = step_s if report.samples_first_token else 0.0
    assert report.prefill_end_s is not None
    return HandoffSample(
        arm=arm,
        num_prompt_tokens=length,
        repeat=repeat,
        ttft_s=answer.ttft_s,
        until_prefill_end_s=report.prefill_end_s - answer.sent_s,
        after_prefill_s=answer.token_times_s[0] - report.prefill_end_s - own_step_s,
        second_gap_s=answer.second_gap_s,
        decode_step_s=step_s,
        num_received_tokens=report.num_received_tokens,
        num_received_bytes=report.num_received_bytes,
        transport=report.transport,
    )


def _checked_report(arm: Arm, length: int, answer: StreamedAnswer) -> KvReport:
    report = answer.report
    if report is None or report.prefill_end_s is None:
        raise MeasurementError(f"{arm}: the answer has no kv_report with the end of prefill")
    if len(answer.token_ids) < 4:
        raise MeasurementError(f"{arm}: only {len(answer.token_ids)} tokens came")
    if not answer.sent_s <= report.prefill_end_s <= answer.token_times_s[0]:
        raise MeasurementError(
            f"{arm}: prefill ended outside the request's time; is it another host's clock?"
        )
    if report.num_cached_tokens:
        raise MeasurementError(f"{arm}: {report.num_cached_tokens} prompt tokens were cached")
    _require_moved_as_asked(arm, length, report)
    return report


def _require_moved_as_asked(arm: Arm, length: int, report: KvReport) -> None:
    if arm is Arm.COLOCATED:
        if report.num_received_bytes:
            raise MeasurementError("colocated: blocks were moved; ask an instance, not a router")
        return
    if report.num_received_bytes == 0 and report.num_received_tokens == 0:
        raise MeasurementError(
            f"{arm}: nothing was moved for {length} tokens: "
            f"{report.receive_outcome or 'no receive'}"
        )
    if report.mode != arm.mode:
        raise MeasurementError(f"{arm}: the blocks moved by {report.mode or 'no mode'}")
