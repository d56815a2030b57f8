"""How answers look: OpenAI's completion and chat objects, whole and in chunks.

Owns the JSON shapes, vLLM's additions included (``stop_reason``, ``token_ids``,
``prompt_token_ids``). Knows no engine and no connection.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from kvferry.protocol.kv_report import KvReport
from kvferry.protocol.params import REPORT_FIELD, TRANSFER_FIELD, emit_params
from kvferry.server.generation import Choice, Delta

Json = dict[str, Any]
"""A JSON object on its way out."""


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


def _num_reused_tokens(report: KvReport) -> int:
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


def handoff_of(choices: Sequence[Choice]) -> Json:
    """Return what a prefill leg's answer has at its top for the decode leg, nothing in others."""
    if len(choices) != 1 or choices[0].handoff is None:
        return {}
    return {TRANSFER_FIELD: emit_params(choices[0].handoff)}


def reports_of(choices: Sequence[Choice]) -> Json:
    """Return the reports for the top of an answer: an object for one choice, a list for several."""
    reports = [_shown_report(choice.report) for choice in choices]
    return {REPORT_FIELD: reports[0] if len(reports) == 1 else reports}


def _shown_report(report: KvReport | None) -> Json | None:
    if report is None:
        return None
    shown: Json = msgspec.to_builtins(report)
    if report.prefill is not None:
        # Whole: on the wire it leaves out what is zero, which a reader of answers would miss.
        shown["prefill"] = msgspec.structs.asdict(report.prefill)
    return shown


@dataclass(frozen=True, kw_only=True)
class AnswerFormat(ABC):
    """One endpoint's shapes, with what every object of one answer repeats."""

    answer_id: str
    created_s: int
    model: str
    num_logprobs: int | None
    returns_token_ids: bool
    token_text: Callable[[int], str]
    """Text of one token by itself."""

    whole_object: ClassVar[str]
    """What an unstreamed answer calls itself."""
    chunk_object: ClassVar[str]
    has_prompt_in_choices: ClassVar[bool]
    """Whether the prompt's token ids stand in each choice, or once at the top."""

    def chunk(self, choice: Choice, delta: Delta) -> Json:
        """Return one chunk of a streamed answer."""
        return self._object([(choice, delta)], is_whole=False)

    def last_chunk(self, usage: Json) -> Json:
        """Return the chunk without choices that carries the usage."""
        return self._object([], is_whole=False) | {"usage": usage}

    def whole(self, choices: Sequence[Choice], usage: Json) -> Json:
        """Return an unstreamed answer."""
        parts = [(choice, choice.so_far()) for choice in choices]
        return self._object(parts, is_whole=True) | {"usage": usage}

    def _object(self, parts: Sequence[tuple[Choice, Delta]], *, is_whole: bool) -> Json:
        choices: list[Json] = [
            {
                "index": choice.index,
                **self._text(delta, is_whole=is_whole),
                "logprobs": None if self.num_logprobs is None else self._logprobs(delta),
                "finish_reason": delta.finish_reason,
                "stop_reason": delta.stop_reason,
            }
            for choice, delta in parts
        ]
        shown: Json = {
            "id": self.answer_id,
            "object": self.whole_object if is_whole else self.chunk_object,
            "created": self.created_s,
            "model": self.model,
            "choices": choices,
        }
        if self.returns_token_ids:
            for its_json, (choice, delta) in zip(choices, parts, strict=True):
                its_json["token_ids"] = delta.token_ids
                prompt = choice.request.prompt_token_ids if delta.is_first else None
                if self.has_prompt_in_choices:
                    its_json["prompt_token_ids"] = prompt
                elif prompt is not None:
                    shown["prompt_token_ids"] = prompt
        return shown

    @abstractmethod
    def _text(self, delta: Delta, *, is_whole: bool) -> Json:
        """Return the fields of a choice that show its text."""

    @abstractmethod
    def _logprobs(self, delta: Delta) -> Json:
        """Return the log probabilities of the tokens of ``delta``."""


class CompletionFormat(AnswerFormat):
    """Shapes of ``/v1/completions``."""

    whole_object = chunk_object = "text_completion"
    has_prompt_in_choices = True

    def _text(self, delta: Delta, *, is_whole: bool) -> Json:
        return {"text": delta.text}

    def _logprobs(self, delta: Delta) -> Json:
        tokens = [self.token_text(token) for token in delta.token_ids]
        offset, offsets = delta.text_offset, []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for entry in delta.logprobs],
            "top_logprobs": [
                {self.token_text(other): value for other, value in entry.top}
                | {token: entry.logprob}
                for token, entry in zip(tokens, delta.logprobs, strict=False)
            ],
            "text_offset": offsets,
        }


class ChatFormat(AnswerFormat):
    """Shapes of ``/v1/chat/completions``; the first chunk of a choice carries the role too."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    has_prompt_in_choices = False

    def _text(self, delta: Delta, *, is_whole: bool) -> Json:
        role = {"role": "assistant"} if delta.is_first else {}
        message: Json = role | {"content": delta.text}
        return {"message": message | {"tool_calls": []}} if is_whole else {"delta": message}

    def _logprobs(self, delta: Delta) -> Json:
        content = [
            self._logprob(token, entry.logprob)
            | {"top_logprobs": [self._logprob(*other) for other in entry.top[: self.num_logprobs]]}
            for token, entry in zip(delta.token_ids, delta.logprobs, strict=False)
        ]
        return {"content": content}

    def _logprob(self, token_id: int, logprob: float) -> Json:
        text = self.token_text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
