"""From a request's fields to the engine's sampling parameters: ranges, defaults, seeds of choices.

Defaults are vLLM's neutral ones, whatever the model's generation config proposes.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.engine.request import SamplingParams
from kvferry.errors import RequestError
from kvferry.server.openai_types import (
    DEFAULT_COMPLETION_TOKENS,
    ChatRequest,
    CompletionRequest,
    GenerationFields,
)

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1024
MAX_CHOICES = 128
MAX_CACHE_SALT_CHARS = 1024
_MAX_SEED = 2**63


@dataclass(frozen=True, slots=True)
class _Range:
    """Inclusive bounds; None is none."""

    low: float | None = None
    high: float | None = None
    excludes_low: bool = False

    def check(self, name: str, value: float | None) -> None:
        if value is None:
            return
        too_low = self.low is not None and (
            value <= self.low if self.excludes_low else value < self.low
        )
        if too_low or (self.high is not None and value > self.high):
            raise RequestError(
                f"{name} must be {self}, not {value:g}", param=name, code="invalid_value"
            )

    def __str__(self) -> str:
        least = f"above {self.low:g}" if self.excludes_low else f"at least {self.low:g}"
        return least if self.high is None else f"{least} and at most {self.high:g}"


_RANGES = {
    "max_tokens": _Range(1),
    "max_completion_tokens": _Range(1),
    "min_tokens": _Range(0),
    "n": _Range(1, MAX_CHOICES),
    "seed": _Range(-_MAX_SEED, _MAX_SEED - 1),
    "temperature": _Range(0),
    "top_p": _Range(0, 1, excludes_low=True),
    "top_k": _Range(-1),
    "presence_penalty": _Range(-2, 2),
    "frequency_penalty": _Range(-2, 2),
    "repetition_penalty": _Range(0, excludes_low=True),
    "top_logprobs": _Range(0, MAX_LOGPROBS),
}


def check_fields(request: CompletionRequest | ChatRequest) -> None:
    """Raise ``RequestError`` naming the first field whose value is out of its range."""
    for name, allowed in _RANGES.items():
        allowed.check(name, getattr(request, name, None))
    if isinstance(request, CompletionRequest):
        _Range(0, MAX_LOGPROBS).check("logprobs", request.logprobs)
    _check_stop(request.stop_strings)
    if request.stream_options is not None and not request.stream:
        raise RequestError(
            "stream_options is for streamed answers: set stream to true",
            param="stream_options",
            code="invalid_value",
        )
    if len(request.cache_salt or "") > MAX_CACHE_SALT_CHARS:
        raise RequestError(
            f"cache_salt must have at most {MAX_CACHE_SALT_CHARS} characters",
            param="cache_salt",
            code="invalid_value",
        )


def _check_stop(stop: tuple[str, ...]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise RequestError(
            f"stop must have at most {MAX_STOP_STRINGS} texts, not {len(stop)}",
            param="stop",
            code="invalid_value",
        )
    if any(not 0 < len(text) <= MAX_STOP_STRING_CHARS for text in stop):
        raise RequestError(
            f"each text in stop must have 1 to {MAX_STOP_STRING_CHARS} characters",
            param="stop",
            code="invalid_value",
        )


def sampling_params(request: CompletionRequest | ChatRequest, choice: int) -> SamplingParams:
    """Return the parameters of choice number ``choice``; a given seed is raised by that number.

    Raises ``RequestError`` for values that contradict each other.
    """
    max_tokens = _max_tokens(request)
    min_tokens = request.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens ({min_tokens}) must not exceed max_tokens ({max_tokens})",
            param="min_tokens",
            code="invalid_value",
        )
    return SamplingParams(
        temperature=_or(request.temperature, 1.0),
        top_p=_or(request.top_p, 1.0),
        top_k=max(0, request.top_k or 0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        seed=_seed(request, choice),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=bool(request.ignore_eos),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logprobs=_num_logprobs(request),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _seed(request: GenerationFields, choice: int) -> int | None:
    # Wrapped, so that the largest seed has successors too.
    return None if request.seed is None else (request.seed + choice) % _MAX_SEED


def _max_tokens(request: CompletionRequest | ChatRequest) -> int | None:
    if isinstance(request, ChatRequest):
        if request.max_completion_tokens is not None:
            return request.max_completion_tokens
        return request.max_tokens
    return DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens


def _num_logprobs(request: CompletionRequest | ChatRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        return request.logprobs
    if not request.logprobs:
        if request.top_logprobs:
            raise RequestError(
                "top_logprobs needs logprobs to be true", param="top_logprobs", code="invalid_value"
            )
        return None
    return request.top_logprobs or 0
