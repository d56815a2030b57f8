"""How answers look: OpenAI's completion and chat objects, whole and in chunks.

Owns the JSON shapes, vLLM's additions included (``stop_reason``, ``token_ids``,
``prompt_token_ids``). Knows no engine and no connection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from kvferry.engine.request import FinishReason, RequestReport
from kvferry.protocol.params import KvTransferParams, TokenLogprob, emit_params
from kvferry.server.output import Delta

TokenText = Callable[[int], str]
"""Text of one token by itself."""

Json = dict[str, Any]
"""A JSON object on its way out."""


@dataclass(slots=True, kw_only=True)
class Choice:
    """What one choice has said so far."""

    index: int
    prompt_token_ids: tuple[int, ...]
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    report: RequestReport | None = None
    handoff: KvTransferParams | None = None
    is_begun: bool = False
    """Whether a chunk of it has been made."""

    def add(self, delta: Delta) -> None:
        """Append ``delta``."""
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.report = delta.report or self.report
        self.handoff = delta.handoff or self.handoff

    @property
    def text(self) -> str:
        """All its text."""
        return "".join(self.texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What every object of one answer repeats, and which extras were asked for."""

    answer_id: str
    created_s: int
    model: str
    num_logprobs: int | None = None
    returns_token_ids: bool = False
    token_text: TokenText


class AnswerFormat(Protocol):
    """One endpoint's shapes. A choice has had ``delta`` added when ``chunk`` is asked for it."""

    def chunk(self, choice: Choice, delta: Delta, *, is_first: bool) -> Json:
        """Return one chunk of a streamed answer."""
        ...

    def last_chunk(self, usage: Json) -> Json:
        """Return the chunk without choices that carries the usage."""
        ...

    def whole(self, choices: Sequence[Choice], usage: Json) -> Json:
        """Return an unstreamed answer."""
        ...


def usage_so_far(num_prompt_tokens: int, num_completion_tokens: int) -> Json:
    """Return OpenAI's usage object for a chunk in the middle of an answer."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "completion_tokens": num_completion_tokens,
    }


def usage_of(choices: Sequence[Choice], num_prompt_tokens: int) -> Json:
    """Return the usage of a whole answer; cached tokens are those that nobody computed."""
    num_completion = sum(len(choice.token_ids) for choice in choices)
    reports = [choice.report for choice in choices if choice.report is not None]
    details = None
    if reports:
        details = {"cached_tokens": sum(_num_reused_tokens(report) for report in reports)}
    usage = usage_so_far(num_prompt_tokens, num_completion)
    return usage | {"prompt_tokens_details": details}


def _num_reused_tokens(report: RequestReport) -> int:
    """Prompt tokens that neither prefill nor this instance computed.

    Without prefill's report it is those in this instance's own cache. Each side computes all
    from some token on, so what both have not computed is the shorter of two beginnings.
    """
    prefill = report.prefill
    if prefill is None:
        return report.num_cached_tokens
    not_computed_here = report.num_prompt_tokens - report.num_computed_prompt_tokens
    not_computed_there = prefill.num_cached_tokens + prefill.num_read_back_tokens
    return max(0, min(not_computed_here, not_computed_there))


def _shown_report(report: RequestReport | None) -> Json | None:
    if report is None:
        return None
    shown: Json = msgspec.to_builtins(report)
    if report.prefill is not None:
        # Whole: on the wire it leaves out what is zero, which a reader of answers would miss.
        shown["prefill"] = msgspec.structs.asdict(report.prefill)
    return shown


def extras_of(choices: Sequence[Choice], *, with_report: bool) -> Json:
    """Return what kvferry adds at the top of an answer: the handoff, and the reports asked for.

    A report is an object for one choice, a list for several.
    """
    extras: Json = {}
    if len(choices) == 1 and choices[0].handoff is not None:
        extras["kv_transfer_params"] = emit_params(choices[0].handoff)
    if with_report:
        reports = [_shown_report(choice.report) for choice in choices]
        extras["kv_report"] = reports[0] if len(reports) == 1 else reports
    return extras


class CompletionFormat:
    """Shapes of ``/v1/completions``."""

    def __init__(self, envelope: Envelope) -> None:
        self._envelope = envelope

    def chunk(self, choice: Choice, delta: Delta, *, is_first: bool) -> Json:
        """See ``AnswerFormat``."""
        shown: Json = {
            "index": choice.index,
            "text": delta.text,
            "logprobs": self._logprobs(delta, delta.text_offset),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._envelope.returns_token_ids:
            shown["prompt_token_ids"] = choice.prompt_token_ids if is_first else None
            shown["token_ids"] = delta.token_ids
        return self._top([shown])

    def last_chunk(self, usage: Json) -> Json:
        """See ``AnswerFormat``."""
        return self._top([]) | {"usage": usage}

    def whole(self, choices: Sequence[Choice], usage: Json) -> Json:
        """See ``AnswerFormat``."""
        return self._top([self._whole_choice(choice) for choice in choices]) | {"usage": usage}

    def _whole_choice(self, choice: Choice) -> Json:
        logprobs = self._logprobs(_as_delta(choice), 0)
        shown: Json = {
            "index": choice.index,
            "text": choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._envelope.returns_token_ids:
            shown["prompt_token_ids"] = choice.prompt_token_ids
            shown["token_ids"] = choice.token_ids
        return shown

    def _top(self, choices: list[Json]) -> Json:
        return {
            "id": self._envelope.answer_id,
            "object": "text_completion",
            "created": self._envelope.created_s,
            "model": self._envelope.model,
            "choices": choices,
        }

    def _logprobs(self, delta: Delta, text_offset: int) -> Json | None:
        if self._envelope.num_logprobs is None:
            return None
        text_of = self._envelope.token_text
        tokens = [text_of(token) for token in delta.token_ids]
        offsets: list[int] = []
        for token in tokens:
            offsets.append(text_offset)
            text_offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for entry in delta.logprobs],
            "top_logprobs": [
                {text_of(other): value for other, value in entry.top} | {token: entry.logprob}
                for token, entry in zip(tokens, delta.logprobs, strict=False)
            ],
            "text_offset": offsets,
        }


class ChatFormat:
    """Shapes of ``/v1/chat/completions``."""

    def __init__(self, envelope: Envelope) -> None:
        self._envelope = envelope

    def chunk(self, choice: Choice, delta: Delta, *, is_first: bool) -> Json:
        """See ``AnswerFormat``; the first chunk of a choice carries the role too."""
        role: Json = {"role": "assistant"} if is_first else {}
        shown: Json = {
            "index": choice.index,
            "delta": role | {"content": delta.text},
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        top = self._top("chat.completion.chunk", [shown])
        if self._envelope.returns_token_ids:
            shown["token_ids"] = delta.token_ids
            if is_first:
                top["prompt_token_ids"] = choice.prompt_token_ids
        return top

    def last_chunk(self, usage: Json) -> Json:
        """See ``AnswerFormat``."""
        return self._top("chat.completion.chunk", []) | {"usage": usage}

    def whole(self, choices: Sequence[Choice], usage: Json) -> Json:
        """See ``AnswerFormat``."""
        shown = [self._whole_choice(choice) for choice in choices]
        top = self._top("chat.completion", shown) | {"usage": usage}
        if self._envelope.returns_token_ids:
            top["prompt_token_ids"] = choices[0].prompt_token_ids
        return top

    def _whole_choice(self, choice: Choice) -> Json:
        shown: Json = {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "tool_calls": []},
            "logprobs": self._logprobs(_as_delta(choice)),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._envelope.returns_token_ids:
            shown["token_ids"] = choice.token_ids
        return shown

    def _top(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self._envelope.answer_id,
            "object": kind,
            "created": self._envelope.created_s,
            "model": self._envelope.model,
            "choices": choices,
        }

    def _logprobs(self, delta: Delta) -> Json | None:
        num_top = self._envelope.num_logprobs
        if num_top is None:
            return None
        content = [
            self._logprob(token, entry.logprob)
            | {"top_logprobs": [self._logprob(*other) for other in entry.top[:num_top]]}
            for token, entry in zip(delta.token_ids, delta.logprobs, strict=False)
        ]
        return {"content": content}

    def _logprob(self, token_id: int, logprob: float) -> Json:
        text = self._envelope.token_text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _as_delta(choice: Choice) -> Delta:
    return Delta(token_ids=tuple(choice.token_ids), logprobs=tuple(choice.logprobs))
