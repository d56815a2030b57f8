"""What a handoff costs, measured inside each request on one host's clock.

The arms are interleaved: ``pull`` and the two pushes go through a router, ``colocated`` asks one
instance directly, which does both parts. Prompts are random token ids, new for each request, so
that no cache helps.
"""

from __future__ import annotations

import enum
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.bench.client import Asker, SeenReport, StreamedAnswer
from kvferry.bench.plan import (
    MIN_ANSWER_TOKENS,
    arm_orders,
    draw_tokens,
    last_token_id_option,
    require_lengths,
    require_sane,
    tokens_body,
)
from kvferry.bench.report import (
    RATIO_LEGEND,
    Groups,
    Report,
    format_interval,
    format_ratio,
    median_difference,
    paired_ratio,
    sample_fields,
)
from kvferry.errors import ConfigError, MeasurementError
from kvferry.options import option


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

    arms: tuple[Arm, ...] = option(
        DEFAULT_ARMS, f"Which of {', '.join(Arm)} to interleave.", is_list=True
    )
    lengths_tokens: tuple[int, ...] = option(
        (512, 2048), "Prompt tokens.", flag="--lengths", is_list=True
    )
    repeats: int = option(30, "Requests of each length and arm.")
    warmups: int = option(2, "Further ones before that do not count.")
    max_tokens: int = option(12, "Tokens of each answer.")
    last_token_id: int = last_token_id_option()

    def __post_init__(self) -> None:
        """Refuse a plan that measures nothing. Raises ``ConfigError``."""
        require_sane(self.arms, self.repeats, self.warmups, self.last_token_id)
        require_lengths(self.lengths_tokens, self.max_tokens)

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
    on_request: Callable[[], None] = lambda: None,
) -> list[HandoffSample]:
    """Send the plan's requests one after another and return those that count.

    Each repeat runs the arms in another order; the orders take turns. Raises ``MeasurementError``
    if an answer is not what its arm says (a pull that moved nothing, a report without times).
    """
    samples = []
    urls = {arm: targets.url(arm) for arm in plan.arms}
    orders = arm_orders(plan.arms, rng)
    for repeat, order in zip(range(-plan.warmups, plan.repeats), orders, strict=False):
        for length in plan.lengths_tokens:
            for arm in order:
                prompt = draw_tokens(rng, length, plan.last_token_id)
                body = tokens_body(prompt, plan.max_tokens)
                answer = await client.stream(urls[arm], body, mode=arm.mode)
                sample = _sample(arm, length, repeat, answer)
                if repeat >= 0:
                    samples.append(sample)
                on_request()
    return samples


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


def _checked_report(arm: Arm, length: int, answer: StreamedAnswer) -> SeenReport:
    """Return the answer's report. Raises ``MeasurementError`` if it is not what ``arm`` says."""
    report = answer.report
    if report is None or report.prefill_end_s is None:
        raise MeasurementError(f"{arm}: the answer has no kv_report with the end of prefill")
    if len(answer.token_ids) < MIN_ANSWER_TOKENS:
        raise MeasurementError(f"{arm}: only {len(answer.token_ids)} tokens came")
    if not answer.sent_s <= report.prefill_end_s <= answer.token_times_s[0]:
        raise MeasurementError(
            f"{arm}: prefill ended outside the request's time; is it another host's clock?"
        )
    if report.num_cached_tokens:
        raise MeasurementError(f"{arm}: {report.num_cached_tokens} prompt tokens were cached")
    if arm is Arm.COLOCATED:
        if report.num_received_bytes:
            raise MeasurementError("colocated: blocks were moved; ask an instance, not a router")
    elif report.num_received_bytes == 0 and report.num_received_tokens == 0:
        outcome = report.receive_outcome or "no receive"
        raise MeasurementError(f"{arm}: nothing was moved for {length} tokens: {outcome}")
    elif report.mode != arm.mode:
        raise MeasurementError(f"{arm}: the blocks moved by {report.mode or 'no mode'}")
    return report


_FIGURES = {
    "until_prefill_end_s": "sending → prefill's end",
    "after_prefill_s": "prefill's end → first token",
    "extra_gap_s": "gap to 2nd token less a step",
    "decode_step_s": "decode step",
    "ttft_s": "TTFT",
}
_COMPARED = ("until_prefill_end_s", "after_prefill_s", "extra_gap_s")
_LESS = [(arm, Arm.COLOCATED) for arm in (Arm.PULL, Arm.PUSH, Arm.PUSH_LATE)]
_OVER = [(arm, Arm.PULL) for arm in (Arm.PUSH, Arm.PUSH_LATE)]
_LESS_LEGEND = "difference of medians in ms [95 % interval]"


def report_handoffs(samples: Sequence[HandoffSample], rng: random.Random) -> Report:
    """Return medians, differences to colocated, ratios of push to pull, and raw samples."""
    groups = Groups(samples, {"num_prompt_tokens": "prompt"})
    less = groups.compare(_LESS, tuple(_FIGURES), median_difference, rng)
    over = groups.compare(_OVER, _COMPARED, paired_ratio, rng)
    transports = sorted({sample.transport for sample in samples if sample.transport})
    text = [
        groups.medians_table(_FIGURES),
        f"median (interquartile range); transport: {', '.join(transports) or '-'}",
        *groups.comparisons_text(less, _FIGURES, "less", format_interval, _LESS_LEGEND),
        *groups.comparisons_text(over, _FIGURES, "/", format_ratio, RATIO_LEGEND),
    ]
    fields = {
        "summaries": groups.summaries(tuple(_FIGURES)),
        "differences": groups.compared(less, "less"),
        "ratios": groups.compared(over, "over"),
        "samples": [sample_fields(sample, "extra_gap_s") for sample in samples],
    }
    return Report("handoff", 2, fields, "\n\n".join(text))
