"""From an engine's tokens to a choice's text: detokenising, stop strings, what is held back.

Owns the end of a choice as the client sees it. Knows no HTTP and no thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.engine.request import FinishReason, RequestReport, TokenOutput
from kvferry.engine.tokenizer import DetokenizerStream
from kvferry.protocol.params import KvTransferParams, TokenLogprob


class StopMatcher:
    """Finds stop strings in text that comes in pieces, and holds back what may begin one."""

    def __init__(self, stops: tuple[str, ...], *, include_stop: bool = False) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Add ``text``; return the text that is certain, and the stop string if one was reached.

        The earliest match counts, the longest of those that begin there.
        """
        if not self._stops:
            return text, None
        pending = self._held + text
        found = self._first_match(pending)
        if found is not None:
            position, stop = found
            self._held = ""
            return pending[: position + (len(stop) if self._include_stop else 0)], stop
        split = len(pending) - self._num_held(pending)
        self._held = pending[split:]
        return pending[:split], None

    def flush(self) -> str:
        """Return what was held back: the text ends here."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, pending: str) -> tuple[int, str] | None:
        matches = [(pending.find(stop), -len(stop), stop) for stop in self._stops]
        found = [match for match in matches if match[0] >= 0]
        if not found:
            return None
        position, _, stop = min(found)
        return position, stop

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
    wants_report: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one engine output adds to a choice."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    """One a token, where they were asked for."""
    text_offset: int = 0
    """Characters of the choice before ``text``."""
    num_tokens: int = 0
    """Tokens of the choice, these included."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    report: RequestReport | None = None
    handoff: KvTransferParams | None = None
    num_computed_tokens: int | None = None
    """Progress of a prefill leg; such a delta adds nothing to the choice."""


class ChoiceAssembler:
    """One choice, from its first output to its end."""

    def __init__(self, stream: DetokenizerStream, options: ChoiceOptions) -> None:
        self._stream = stream
        self._options = options
        self._matcher = StopMatcher(options.stop_strings, include_stop=options.include_stop)
        self._num_tokens = 0
        self._num_chars = 0
        self._matched_stop: str | None = None
        self._is_finished = False

    @property
    def is_finished(self) -> bool:
        """Whether the client has all of it; outputs after that are ignored."""
        return self._is_finished

    @property
    def needs_abort(self) -> bool:
        """Whether a stop string was reached, so that the engine has to be told to stop."""
        return self._matched_stop is not None

    def feed(self, output: TokenOutput) -> Delta | None:
        """Add one output; return what it adds for the client, None for nothing."""
        if self._is_finished:
            return None
        if output.num_computed_tokens is not None:
            return Delta(num_computed_tokens=output.num_computed_tokens)
        if self._matched_stop is not None:
            return self._end_after_stop(output)
        text, stop = self._text_of(output)
        if stop is not None:
            self._matched_stop = stop
        finish_reason, stop_reason = self._end_of(output, stop)
        if output.token_id is None and finish_reason is None and not text:
            return None
        # With a report wanted the end is told with it, when the engine has stopped.
        if stop is not None and output.finish_reason is None and self._options.wants_report:
            finish_reason, stop_reason = None, None
        self._is_finished = finish_reason is not None
        self._num_chars += len(text)
        return Delta(
            text=text,
            text_offset=self._num_chars - len(text),
            num_tokens=self._num_tokens,
            token_ids=() if output.token_id is None else (output.token_id,),
            logprobs=() if output.logprob is None else (output.logprob,),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            report=output.report,
            handoff=output.handoff,
        )

    def end_without_report(self) -> Delta:
        """End a choice whose stop string was reached, although the engine has not answered yet."""
        self._is_finished = True
        return Delta(
            finish_reason=FinishReason.STOP,
            stop_reason=self._matched_stop,
            num_tokens=self._num_tokens,
        )

    def _end_after_stop(self, output: TokenOutput) -> Delta | None:
        if output.finish_reason is None:
            return None
        self._is_finished = True
        return Delta(
            finish_reason=FinishReason.STOP,
            stop_reason=self._matched_stop,
            num_tokens=self._num_tokens,
            report=output.report,
            handoff=output.handoff,
        )

    def _text_of(self, output: TokenOutput) -> tuple[str, str | None]:
        """Return the text that ``output`` makes certain, and the stop string that ends it."""
        text = ""
        if output.token_id is not None:
            self._num_tokens += 1
            is_stop_token = output.stop_token_id == output.token_id
            if not is_stop_token or self._options.include_stop:
                text = self._stream.step(output.token_id)
        if output.finish_reason is not None:
            text += self._stream.finish()
        if self._num_tokens <= self._options.min_tokens:
            certain, stop = text, None
        else:
            certain, stop = self._matcher.feed(text)
        if output.finish_reason is not None and stop is None:
            certain += self._matcher.flush()
        return certain, stop

    def _end_of(
        self, output: TokenOutput, stop: str | None
    ) -> tuple[FinishReason | None, int | str | None]:
        if stop is not None:
            return FinishReason.STOP, stop
        if output.stop_token_id in self._options.stop_token_ids:
            return output.finish_reason, output.stop_token_id
        return output.finish_reason, None
