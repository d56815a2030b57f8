"""Times and counts of one request, and what is retained, for the process's metrics.

Knows no text.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.clock import Clock
from kvferry.engine.request import RequestReport
from kvferry.observe.metrics import EngineMetrics
from kvferry.server.formats import Choice
from kvferry.server.output import Delta
from kvferry.server.read_backs import ReadBackTotals
from kvferry.server.retained import RetainedFigures


class RequestMeter:
    """Notes when tokens come; one a request."""

    def __init__(self, metrics: EngineMetrics, read_backs: ReadBackTotals, clock: Clock) -> None:
        self._metrics = metrics
        self._read_backs = read_backs
        self._clock = clock
        self._began_s = clock.monotonic_s()
        self._last_token_s: dict[int, float] = {}

    def begin(self, num_prompt_tokens: int) -> None:
        """The engine has taken the request."""
        self._metrics.prompt_tokens.inc(num_prompt_tokens)

    def note(self, deltas: Sequence[tuple[Choice, Delta]]) -> None:
        """Count what has just come."""
        now_s = self._clock.monotonic_s()
        for choice, delta in deltas:
            if delta.token_ids:
                self._note_token(choice.index, now_s)
            if delta.finish_reason is not None:
                self._metrics.request_success.labels(delta.finish_reason.value).inc()
                self._metrics.e2e_request_latency_s.observe(now_s - self._began_s)
                if delta.report is not None:
                    self._note_report(delta.report)

    def _note_report(self, report: RequestReport) -> None:
        prefill = report.prefill
        # On decode it is what the other instance has said of itself, and has counted.
        if prefill is None or report.mode or not prefill.read_back_outcome:
            return
        self._read_backs.add(prefill)
        self._metrics.read_back_tokens.inc(prefill.num_read_back_tokens)
        if prefill.num_recomputed_tokens:
            reason = prefill.read_back_outcome
            self._metrics.recomputed_tokens.labels(reason).inc(prefill.num_recomputed_tokens)

    def _note_token(self, choice: int, now_s: float) -> None:
        self._metrics.generation_tokens.inc()
        last_s = self._last_token_s.get(choice)
        if last_s is None:
            self._metrics.time_to_first_token_s.observe(now_s - self._began_s)
        else:
            self._metrics.inter_token_latency_s.observe(now_s - last_s)
        self._last_token_s[choice] = now_s


class PreemptionMeter:
    """Counts preemptions as they happen: its counter advances by what has come since last time."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics
        self._shown = 0

    def show(self, total: int) -> None:
        """Show ``total``, which never goes down."""
        self._metrics.num_preemptions.inc(total - self._shown)
        self._shown = total


class RetainedMeter:
    """Shows what is retained; counters advance by what has come since the last time."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics
        self._shown = RetainedFigures()

    def show(self, figures: RetainedFigures) -> None:
        """Show ``figures``, whose totals never go down."""
        self._metrics.retained_blocks.set(figures.num_blocks)
        self._metrics.retained_share.set(figures.share)
        self._metrics.retained_evicted.inc(figures.num_evicted - self._shown.num_evicted)
        for reason, total in figures.ends.items():
            ended = total - self._shown.ends.get(reason, 0)
            self._metrics.retention_ends.labels(reason).inc(ended)
        self._shown = figures
