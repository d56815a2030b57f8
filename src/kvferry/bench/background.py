"""How much running decodes slow down while handoffs arrive beside them.

Windows of three arms alternate. In each, fresh background streams run on the decode instance while
prompts arrive through the router at a fixed rate, whether or not earlier ones have ended. Prefill
has every prompt in its cache. In ``pull`` and ``push`` decode has none of them, since more prompts
take turns than its pool can keep; in ``held`` it has all of them, so that nothing moves.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import itertools
import random
import statistics
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass

from kvferry.bench.client import CompletionClient, SeenReport, StreamedAnswer
from kvferry.bench.plan import LAST_TOKEN_ID, arm_orders, draw_tokens, require, tokens_body
from kvferry.bench.report import (
    RATIO_LEGEND,
    Groups,
    Report,
    format_ratio,
    ms,
    paired_ratio,
    sample_fields,
    values,
)
from kvferry.clock import Clock
from kvferry.errors import MeasurementError
from kvferry.options import option

_STREAM_PROMPT_TOKENS = 64
_ARRIVAL_TOKENS = 2
"""The handed-over token and one that needs the prompt's KV."""
_LAST_BLOCKS_TOKENS = 64
"""A prompt counts as cached if all but the last few blocks are."""


class BackgroundArm(enum.StrEnum):
    """What the arrivals of a window are."""

    HELD = "held"
    """Decode has their prompts already: nothing moves."""
    PULL = "pull"
    PUSH = "push"

    @property
    def mode(self) -> str:
        """The mode that is asked of the router."""
        return "push" if self is BackgroundArm.PUSH else "pull"


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundPlan:
    """What runs, what arrives, how long. Durations in seconds."""

    num_streams: int = 4
    arrivals_per_s: float = option(10.0, "Prompts that arrive in a second.", flag="--rate")
    length_tokens: int = option(2048, "Tokens of arriving prompts.", flag="--background-length")
    """Of each arriving prompt, less its last token. A cache of whole blocks then lacks just that
    one where this is a multiple of the block size: nobody computes more than one token."""
    window_s: float = option(5.0, "Seconds of one arm at a time.")
    rounds: int = option(8, "Windows of each arm; one round before does not count.")
    num_moving: int = 12
    """Prompts that take turns in ``pull`` and ``push``: more than decode's pool can keep."""
    num_held: int = 2
    max_stream_tokens: int = 1_024
    """Bounds a background stream, which a window ends long before."""
    max_unanswered: int = 16
    """More arrivals than this without an answer end the measurement."""
    last_token_id: int = LAST_TOKEN_ID

    def __post_init__(self) -> None:
        """Refuse a plan that measures nothing. Raises ``ConfigError``."""
        some = min(self.num_streams, self.rounds) >= 1
        require(some, "background needs at least one stream and one round")
        arrives = self.arrivals_per_s > 0 and self.window_s * self.arrivals_per_s >= 1
        require(arrives, "no prompt arrives within a window: raise the rate or the window")
        refusal = f"background prompts need more than {_LAST_BLOCKS_TOKENS} tokens"
        require(self.length_tokens > _LAST_BLOCKS_TOKENS, refusal)

    @property
    def stream_tokens(self) -> int:
        """Most tokens of a background stream, its prompt included."""
        return _STREAM_PROMPT_TOKENS + self.max_stream_tokens

    @property
    def num_steps(self) -> int:
        """How many steps a run reports: prompts that warm prefill's cache, and windows."""
        return self.num_moving + self.num_held + len(BackgroundArm) * (self.rounds + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundTargets:
    """Base URLs without a trailing slash."""

    router_url: str
    prefill_url: str
    decode_url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSample:
    """One window. Durations in seconds."""

    arm: BackgroundArm
    repeat: int
    """The round."""
    stream_tpots_s: tuple[float, ...]
    """Of each background stream: the time between its first and last token, over the gaps."""
    longest_gap_s: float
    """Between two tokens of any stream."""
    num_arrivals: int
    arrival_e2el_s: float
    """Median time from an arrival's sending to its last token."""
    num_moved_bytes: int

    @property
    def tpot_s(self) -> float:
        """The streams' median."""
        return statistics.median(self.stream_tpots_s)


class BackgroundBench:
    """One measurement. ``clock`` must be the host's monotonic clock."""

    def __init__(
        self,
        client: CompletionClient,
        targets: BackgroundTargets,
        plan: BackgroundPlan,
        rng: random.Random,
        clock: Clock,
    ) -> None:
        self._client = client
        self._targets = targets
        self._plan = plan
        self._rng = rng
        self._clock = clock
        self._moving = [self._prompt(plan.length_tokens + 1) for _ in range(plan.num_moving)]
        self._held = [self._prompt(plan.length_tokens + 1) for _ in range(plan.num_held)]
        self._next_moving = itertools.cycle(self._moving)

    async def run(self, on_step: Callable[[], None] = lambda: None) -> list[WindowSample]:
        """Warm prefill's cache, run every window, and return those that count.

        ``on_step`` is called ``plan.num_steps`` times. Raises ``MeasurementError`` if an arrival is
        not what its arm says, or prefill does not have every prompt at the end.
        """
        for prompt in [*self._moving, *self._held]:
            await self._ask_prefill(prompt)
            on_step()
        samples = []
        orders = arm_orders(tuple(BackgroundArm), self._rng)
        for number, order in zip(range(-1, self._plan.rounds), orders, strict=False):
            for arm in order:
                sample = await self._run_window(arm, number)
                if number >= 0:
                    samples.append(sample)
                on_step()
        await self._require_prefill_has_all()
        return samples

    def _prompt(self, length_tokens: int) -> list[int]:
        return draw_tokens(self._rng, length_tokens, self._plan.last_token_id)

    async def _ask_prefill(self, prompt: list[int]) -> SeenReport:
        url = _completions(self._targets.prefill_url)
        return _require_report(await self._client.stream(url, tokens_body(prompt, 1)))

    async def _require_prefill_has_all(self) -> None:
        for prompt in [*self._moving, *self._held]:
            report = await self._ask_prefill(prompt)
            if not _is_cached(report, len(prompt)):
                raise MeasurementError(
                    f"prefill's cache had only {report.num_cached_tokens} of a prompt's "
                    f"{len(prompt)} tokens at the end: its pool is too small"
                )

    async def _run_window(self, arm: BackgroundArm, number: int) -> WindowSample:
        if arm is BackgroundArm.HELD:
            for prompt in self._held:
                await self._ask_router(prompt, arm)
        async with self._background() as streams:
            begun_s = self._clock.monotonic_s()
            answers = await self._arrivals(arm)
            end_s = begun_s + self._plan.window_s
            seen = [[at_s for at_s in times if begun_s <= at_s <= end_s] for times in streams]
        return _window_sample(arm, number, seen, answers)

    @contextlib.asynccontextmanager
    async def _background(self) -> AsyncIterator[list[list[float]]]:
        """Yield each stream's token times, which go on growing, once all of them run."""
        times_s: list[list[float]] = [[] for _ in range(self._plan.num_streams)]
        has_begun = [asyncio.Event() for _ in times_s]

        async def stream(own_times_s: list[float], begun: asyncio.Event) -> None:
            def note(now_s: float) -> None:
                own_times_s.append(now_s)
                if len(own_times_s) > 1:
                    begun.set()

            prompt = self._prompt(_STREAM_PROMPT_TOKENS)
            body = tokens_body(prompt, self._plan.max_stream_tokens)
            await self._client.stream(_completions(self._targets.decode_url), body, on_token=note)

        async def wait_all() -> None:
            for begun in has_begun:
                await begun.wait()

        tasks = [
            asyncio.create_task(stream(own, begun))
            for own, begun in zip(times_s, has_begun, strict=True)
        ]
        all_begun = asyncio.create_task(wait_all())
        try:
            await asyncio.wait([all_begun, *tasks], return_when=asyncio.FIRST_COMPLETED)
            _require_running(tasks)
            yield times_s
            _require_running(tasks)
        finally:
            for task in (all_begun, *tasks):
                task.cancel()
            await asyncio.gather(all_begun, *tasks, return_exceptions=True)

    async def _arrivals(self, arm: BackgroundArm) -> list[StreamedAnswer]:
        """Have prompts arrive for a window; return every answer once all have come."""
        prompts: Iterator[list[int]] = (
            itertools.cycle(self._held) if arm is BackgroundArm.HELD else self._next_moving
        )
        interval_s = 1 / self._plan.arrivals_per_s
        begun_s = self._clock.monotonic_s()
        tasks: list[asyncio.Task[StreamedAnswer]] = []
        try:
            for number in range(round(self._plan.window_s / interval_s)):
                await self._sleep_until(begun_s + number * interval_s)
                tasks.append(asyncio.create_task(self._ask_router(next(prompts), arm)))
                self._require_keeping_up(arm, sum(not task.done() for task in tasks))
            await self._sleep_until(begun_s + self._plan.window_s)
            answers = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for answer in answers:
            _require_as_said(arm, _require_report(answer), self._plan.length_tokens)
        return answers

    async def _sleep_until(self, at_s: float) -> None:
        # The clock is the one by which windows are cut; the event loop's may differ from it.
        await asyncio.sleep(0)
        while (left_s := at_s - self._clock.monotonic_s()) > 0:
            await asyncio.sleep(left_s)

    def _require_keeping_up(self, arm: BackgroundArm, num_unanswered: int) -> None:
        if num_unanswered > self._plan.max_unanswered:
            raise MeasurementError(
                f"{arm}: {num_unanswered} arrivals wait at {self._plan.arrivals_per_s:g} a second: "
                "the deployment cannot keep up; lower the rate"
            )

    async def _ask_router(self, prompt: list[int], arm: BackgroundArm) -> StreamedAnswer:
        url = _completions(self._targets.router_url)
        return await self._client.stream(url, tokens_body(prompt, _ARRIVAL_TOKENS), mode=arm.mode)


def _completions(base_url: str) -> str:
    return f"{base_url}/v1/completions"


def _require_report(answer: StreamedAnswer) -> SeenReport:
    if answer.report is None:
        raise MeasurementError("an answer has no kv_report")
    return answer.report


def _require_running(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done():
            task.result()
            raise MeasurementError("a background stream ended before its window did")


def _is_cached(report: SeenReport, num_tokens: int) -> bool:
    return report.num_cached_tokens >= num_tokens - _LAST_BLOCKS_TOKENS


def _require_as_said(arm: BackgroundArm, report: SeenReport, length_tokens: int) -> None:
    """Raise ``MeasurementError`` if an arrival is not what ``arm`` says."""
    if arm is BackgroundArm.HELD:
        if report.num_received_bytes or not _is_cached(report, length_tokens):
            raise MeasurementError(
                f"held: decode had only {report.num_cached_tokens} of {length_tokens} tokens"
            )
        return
    if report.num_cached_tokens or report.num_received_tokens < length_tokens - _LAST_BLOCKS_TOKENS:
        raise MeasurementError(
            f"{arm}: of {length_tokens} tokens {report.num_received_tokens} were moved and "
            f"{report.num_cached_tokens} cached: {report.receive_outcome or 'no receive'}"
        )
    if report.mode != arm.mode:
        raise MeasurementError(f"{arm}: the blocks moved by {report.mode or 'no mode'}")


def _window_sample(
    arm: BackgroundArm, number: int, streams: list[list[float]], answers: list[StreamedAnswer]
) -> WindowSample:
    if min(map(len, streams)) < 2:
        raise MeasurementError(f"{arm}: a background stream stood still for a whole window")
    reports = [_require_report(answer) for answer in answers]
    return WindowSample(
        arm=arm,
        repeat=number,
        stream_tpots_s=tuple((times[-1] - times[0]) / (len(times) - 1) for times in streams),
        longest_gap_s=max(
            late - early for times in streams for early, late in itertools.pairwise(times)
        ),
        num_arrivals=len(answers),
        arrival_e2el_s=statistics.median(a.token_times_s[-1] - a.sent_s for a in answers),
        num_moved_bytes=sum(report.num_received_bytes for report in reports),
    )


def report_background(samples: Sequence[WindowSample], rng: random.Random) -> Report:
    """Return the streams' TPOT of each arm, its ratios to ``held``, and every window."""
    groups = Groups(samples, {})
    arms = [(arm, BackgroundArm.HELD) for arm in (BackgroundArm.PULL, BackgroundArm.PUSH)]
    over = groups.compare(arms, ("tpot_s",), paired_ratio, rng)
    ratios = {item.arm: format_ratio(item.figures["tpot_s"]) for item in over}

    def num_arrivals(found: list[WindowSample]) -> int:
        return sum(sample.num_arrivals for sample in found)

    def moved_bytes(found: list[WindowSample]) -> int:
        return sum(sample.num_moved_bytes for sample in found)

    table = groups.medians_table(
        {"tpot_s": "TPOT"},
        {
            "longest gap ms": lambda found: ms(max(values(found, "longest_gap_s"))),
            "arrivals": lambda found: str(num_arrivals(found)),
            "arrival E2EL ms": lambda found: ms(statistics.median(values(found, "arrival_e2el_s"))),
            "moved MiB/arrival": lambda found: (
                f"{moved_bytes(found) / num_arrivals(found) / 2**20:.1f}"
            ),
            "TPOT / held": lambda found: ratios.get(found[0].arm, ""),
        },
    )
    legend = "n windows; TPOT of the background streams: median of windows (interquartile range)"
    fields = {
        "summaries": groups.summaries(("tpot_s", "arrival_e2el_s")),
        "ratios": groups.compared(over, "over"),
        "samples": [sample_fields(sample, "tpot_s") for sample in samples],
    }
    return Report("background", 2, fields, f"{table}\n\n{legend}; {RATIO_LEGEND}")
