"""One HTTP request on the engine: its engine requests, and what comes of each, one choice each.

Owns the crossing from the engine's thread to the handler's loop, detokenising, stop strings, the
end of a choice as the client sees it, and the rule that no engine request outlives its handler.
Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from kvferry.clock import Clock
from kvferry.engine.request import (
    EngineRequest,
    FinishReason,
    OutputCallback,
    TokenOutput,
)
from kvferry.engine.tokenizer import DetokenizerStream
from kvferry.errors import EngineError
from kvferry.observe.metrics import EngineMetrics
from kvferry.protocol.ids import RequestId, TransferId
from kvferry.protocol.kv_report import KvReport
from kvferry.protocol.params import KvTransferParams, TokenLogprob
from kvferry.server.figures import ReadBackTotals

if TYPE_CHECKING:
    # torch is heavy: only building an instance imports it.
    from kvferry.engine.runner import Engine

ABORT_TIMEOUT_S = 2.0
"""How long the engine may take to say that it has stopped a request."""


class ShuttingDownError(EngineError):
    """The engine gave the request up because this process ends."""


class StopMatcher:
    """Finds stop strings in text that comes in pieces, and holds back what may begin one."""

    def __init__(self, stops: tuple[str, ...], *, include_stop: bool = False) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._held = ""
        # Of two that begin at the same place, the longer is tried first.
        longest_first = sorted(stops, key=len, reverse=True)
        self._any_stop = re.compile("|".join(map(re.escape, longest_first)))

    def feed(self, text: str) -> tuple[str, str | None]:
        """Add ``text``; return the text that is certain, and the stop string if one was reached.

        The earliest match counts, the longest of those that begin there.
        """
        if not self._stops:
            return text, None
        pending, self._held = self._held + text, ""
        found = self._any_stop.search(pending)
        if found is not None:
            return pending[: found.end() if self._include_stop else found.start()], found[0]
        split = len(pending) - self._num_held(pending)
        self._held = pending[split:]
        return pending[:split], None

    def flush(self) -> str:
        """Return what was held back: the text ends here."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, pending: str) -> int:
        """Length of the longest end of ``pending`` that begins a stop string."""
        longest = max(len(stop) for stop in self._stops) - 1
        for length in range(min(longest, len(pending)), 0, -1):
            tail = pending[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceOptions:
    """How one request's choices are shown."""

    stop_strings: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    """Stop strings count only after this many tokens."""
    stop_token_ids: frozenset[int] = frozenset()
    """The client's own; a model's end token is no ``stop_reason``."""
    skip_special_tokens: bool = True
    wants_report: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one engine output adds to a choice; or all of a choice, see ``Choice.so_far``."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    """One a token, where they were asked for."""
    text_offset: int = 0
    """Characters of the choice before ``text``."""
    num_tokens: int = 0
    """Tokens of the choice, these included."""
    is_first: bool = False
    """Whether nothing of the choice was shown before."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    report: KvReport | None = None
    handoff: KvTransferParams | None = None
    num_computed_tokens: int | None = None
    """Progress of a prefill leg; such a delta adds nothing to the choice."""


@dataclass(slots=True, eq=False)
class Choice:
    """One choice, from its first output to its end."""

    index: int
    request: EngineRequest
    stream: DetokenizerStream
    options: ChoiceOptions
    token_ids: list[int] = field(default_factory=list)
    report: KvReport | None = None
    handoff: KvTransferParams | None = None
    _matcher: StopMatcher = field(init=False)
    _matched_stop: str | None = None
    _texts: list[str] = field(default_factory=list)
    _num_chars: int = 0
    _logprobs: list[TokenLogprob] = field(default_factory=list)
    _finish_reason: FinishReason | None = None
    _stop_reason: int | str | None = None

    def __post_init__(self) -> None:
        stops = self.options.stop_strings
        self._matcher = StopMatcher(stops, include_stop=self.options.include_stop)

    @property
    def is_finished(self) -> bool:
        """Whether the client has all of it; outputs after that are ignored."""
        return self._finish_reason is not None

    @property
    def needs_abort(self) -> bool:
        """Whether a stop string was reached, so that the engine has to be told to stop."""
        return self._matched_stop is not None

    def feed(self, output: TokenOutput) -> Delta | None:
        """Add one output; return what it adds for the client, None for nothing."""
        if self.is_finished:
            return None
        if output.num_computed_tokens is not None:
            return Delta(num_computed_tokens=output.num_computed_tokens)
        if self.needs_abort:
            return None if output.finish_reason is None else self.end_at_stop(output)
        text, self._matched_stop = self._text_of(output)
        finish_reason, stop_reason = self._end_of(output)
        if output.token_id is None and finish_reason is None and not text:
            return None
        # With a report wanted the end is told with it, when the engine has stopped.
        if self.needs_abort and output.finish_reason is None and self.options.wants_report:
            finish_reason, stop_reason = None, None
        return self._add(
            Delta(
                text=text,
                token_ids=() if output.token_id is None else (output.token_id,),
                logprobs=() if output.logprob is None else (output.logprob,),
                text_offset=self._num_chars,
                num_tokens=self._num_tokens_with(output),
                is_first=not self._texts,
                finish_reason=finish_reason,
                stop_reason=stop_reason,
                report=output.report,
                handoff=output.handoff,
            )
        )

    def end_at_stop(self, last: TokenOutput | None = None) -> Delta:
        """End a choice whose stop string was reached; ``last`` is what the engine has said to that,
        None if it has not answered in time."""
        return self._add(
            Delta(
                num_tokens=len(self.token_ids),
                finish_reason=FinishReason.STOP,
                stop_reason=self._matched_stop,
                report=last.report if last is not None else None,
                handoff=last.handoff if last is not None else None,
            )
        )

    def so_far(self) -> Delta:
        """Return everything the choice has said, as one delta."""
        return Delta(
            text="".join(self._texts),
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self._logprobs),
            is_first=True,
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
        )

    def _add(self, delta: Delta) -> Delta:
        self._texts.append(delta.text)
        self._num_chars += len(delta.text)
        self.token_ids += delta.token_ids
        self._logprobs += delta.logprobs
        self._finish_reason, self._stop_reason = delta.finish_reason, delta.stop_reason
        self.report = delta.report or self.report
        self.handoff = delta.handoff or self.handoff
        return delta

    def _num_tokens_with(self, output: TokenOutput) -> int:
        return len(self.token_ids) + (output.token_id is not None)

    def _text_of(self, output: TokenOutput) -> tuple[str, str | None]:
        """Return the text that ``output`` makes certain, and the stop string that ends it."""
        text = ""
        if output.token_id is not None:
            is_stop_token = output.stop_token_id == output.token_id
            if not is_stop_token or self.options.include_stop:
                text = self.stream.step(output.token_id)
        if output.finish_reason is not None:
            text += self.stream.finish()
        if self._num_tokens_with(output) <= self.options.min_tokens:
            certain, stop = text, None
        else:
            certain, stop = self._matcher.feed(text)
        if output.finish_reason is not None and stop is None:
            certain += self._matcher.flush()
        return certain, stop

    def _end_of(self, output: TokenOutput) -> tuple[FinishReason | None, int | str | None]:
        if self._matched_stop is not None:
            return FinishReason.STOP, self._matched_stop
        if output.stop_token_id in self.options.stop_token_ids:
            return output.finish_reason, output.stop_token_id
        return output.finish_reason, None


@dataclass(slots=True)
class RequestMeter:
    """Counts a request that the engine has taken, and notes when its tokens come."""

    metrics: EngineMetrics
    read_backs: ReadBackTotals
    clock: Clock
    num_prompt_tokens: int
    _began_s: float = 0.0
    _last_token_s: dict[int, float] = field(default_factory=dict)
    """By choice."""

    def begin(self) -> None:
        """The engine has taken the request."""
        self.metrics.prompt_tokens.inc(self.num_prompt_tokens)
        self._began_s = self.clock.monotonic_s()

    def note(self, deltas: Sequence[tuple[Choice, Delta]]) -> None:
        """Count what has just come."""
        now_s = self.clock.monotonic_s()
        for choice, delta in deltas:
            if delta.token_ids:
                self._note_token(choice.index, now_s)
            if delta.finish_reason is not None:
                self.metrics.request_success.labels(delta.finish_reason.value).inc()
                self.metrics.e2e_request_latency_s.observe(now_s - self._began_s)
            prefill = delta.report.prefill if delta.report is not None else None
            # On decode it is what the other instance has said of itself, and has counted.
            is_own = delta.report is not None and not delta.report.mode
            if is_own and prefill is not None and prefill.read_back_outcome:
                self.read_backs.add(prefill)

    def _note_token(self, choice: int, now_s: float) -> None:
        self.metrics.generation_tokens.inc()
        last_s = self._last_token_s.get(choice)
        if last_s is None:
            self.metrics.time_to_first_token_s.observe(now_s - self._began_s)
        else:
            self.metrics.inter_token_latency_s.observe(now_s - last_s)
        self._last_token_s[choice] = now_s


class OutputBridge:
    """Carries outputs to the event loop, with one wake-up for all that came meanwhile."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._pending: list[tuple[OutputCallback, TokenOutput]] = []
        self._is_closed = False

    def callback_for(self, sink: OutputCallback) -> OutputCallback:
        """Return a callback for any thread that has ``sink`` called on the loop, in order."""

        def on_output(output: TokenOutput) -> None:
            with self._lock:
                if self._is_closed:
                    return
                self._pending.append((sink, output))
                if len(self._pending) == 1:
                    self._loop.call_soon_threadsafe(self._deliver)

        return on_output

    def close(self) -> None:
        """Drop whatever still comes: the loop is about to end."""
        with self._lock:
            self._is_closed = True
            self._pending.clear()

    def _deliver(self) -> None:
        with self._lock:
            pending, self._pending = self._pending, []
        for sink, output in pending:
            sink(output)


class Generation:
    """The engine requests of one HTTP request, one a choice.

    An asynchronous context manager: entering submits, leaving aborts what has not ended and gives
    up an offered handoff unless ``keep_handoff`` was called, even one that is offered later.
    """

    def __init__(
        self,
        engine: Engine,
        bridge: OutputBridge,
        choices: Sequence[Choice],
        meter: RequestMeter,
        *,
        withdraw: Callable[[TransferId], None],
    ) -> None:
        self.choices = choices
        self._engine = engine
        self._bridge = bridge
        self._meter = meter
        self._withdraw = withdraw
        self._outputs: deque[tuple[Choice, TokenOutput]] = deque()
        self._has_outputs = asyncio.Event()
        self._running: set[RequestId] = set()
        self._offered: TransferId | None = None
        self._is_left = False

    async def __aenter__(self) -> Generation:
        """Submit every request. Raises ``RequestError`` if one is refused; then none runs."""
        try:
            for choice in self.choices:
                on_output = self._bridge.callback_for(partial(self._take, choice))
                self._engine.submit(choice.request, on_output)
                self._running.add(choice.request.request_id)
        except BaseException:
            self._leave()
            raise
        self._meter.begin()
        return self

    async def __aexit__(self, *failure: object) -> None:
        self._leave()

    @property
    def is_finished(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.is_finished for choice in self.choices)

    async def next_deltas(self) -> list[tuple[Choice, Delta]]:
        """Wait for outputs; return what they add, in order, possibly nothing.

        Raises ``EngineError`` if the engine failed a choice or gave it up.
        """
        if not self._outputs:
            self._has_outputs.clear()
            try:
                async with asyncio.timeout(self._timeout_s()):
                    await self._has_outputs.wait()
            except TimeoutError:
                # The engine has not said that it stopped: the choices end without its report.
                return self._noted(
                    [(c, c.end_at_stop()) for c in self.choices if not c.is_finished]
                )
        taken = list(self._outputs)
        self._outputs.clear()
        return self._noted([(choice, self._feed(choice, output)) for choice, output in taken])

    def keep_handoff(self) -> None:
        """The answer that carries the handoff has been sent: from now on its lease decides."""
        self._offered = None

    def _timeout_s(self) -> float | None:
        """Bounded only once all that is left is the engine's word that it has stopped."""
        open_ones = [choice for choice in self.choices if not choice.is_finished]
        return ABORT_TIMEOUT_S if all(choice.needs_abort for choice in open_ones) else None

    def _feed(self, choice: Choice, output: TokenOutput) -> Delta | None:
        had_stopped = choice.needs_abort or choice.is_finished
        # What ends a request that nobody here has stopped is a failure.
        if output.finish_reason is FinishReason.ERROR and not had_stopped:
            raise EngineError(output.error or "the engine failed this request")
        if output.finish_reason is FinishReason.ABORT and not had_stopped:
            raise ShuttingDownError(output.error or "the server is shutting down")
        delta = choice.feed(output)
        if choice.needs_abort and not had_stopped and output.finish_reason is None:
            # Leaving must not abort it again, should its last output be late.
            self._running.discard(output.request_id)
            self._engine.abort(output.request_id)
        return delta

    def _noted(self, fed: Sequence[tuple[Choice, Delta | None]]) -> list[tuple[Choice, Delta]]:
        deltas = [(choice, delta) for choice, delta in fed if delta is not None]
        self._meter.note(deltas)
        return deltas

    def _take(self, choice: Choice, output: TokenOutput) -> None:
        if output.finish_reason is not None:
            self._running.discard(output.request_id)
        if output.handoff is not None:
            self._offered = output.handoff.transfer_id
        if self._is_left:
            self._give_up_offer()
            return
        self._outputs.append((choice, output))
        self._has_outputs.set()

    def _leave(self) -> None:
        self._is_left = True
        for request_id in self._running:
            self._engine.abort(request_id)
        self._running.clear()
        self._give_up_offer()

    def _give_up_offer(self) -> None:
        if self._offered is not None:
            self._withdraw(self._offered)
            self._offered = None
