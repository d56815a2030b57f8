"""What goes into an engine and what comes out: requests and their limits, outputs, reports.

Token ids only: text, chat templates and stop strings are the server's.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.errors import RequestError
from kvferry.protocol.ids import RequestId
from kvferry.protocol.kv_report import KvReport
from kvferry.protocol.params import KvTransferParams, Role, TokenLogprob

MAX_LOGPROBS = 20


class FinishReason(enum.StrEnum):
    """Why a request ended; the first two are OpenAI's."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    NOT_NEEDED = "not_needed"
    """Role prefill: decode has all it needs, so the prefill was ended before its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen; names and defaults are vLLM's."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    """None: the engine draws one."""
    max_tokens: int | None = None
    """None: as many as the context allows."""
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    """Number of alternatives to report; 0 reports the sampled token's alone; None reports none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One sequence to continue."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    cache_salt: str = ""
    transfer: KvTransferParams | None = None
    """Role prefill: end after one token and offer the blocks. Role decode: receive them."""
    wants_progress: bool = False
    """Role prefill: say how far the prompt is computed, at admission and after each chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutput:
    """One step of one request. The last one has a ``finish_reason`` and a ``report``."""

    request_id: RequestId
    token_id: int | None = None
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The stop token that ended the request, where one did."""
    error: str | None = None
    """With ``FinishReason.ERROR``: what went wrong and what to do."""
    handoff: KvTransferParams | None = None
    """Role prefill, last output: what the decode leg needs."""
    report: KvReport | None = None
    num_computed_tokens: int | None = None
    """Progress: leading prompt tokens whose KV is there. Such an output carries nothing else."""


OutputCallback = Callable[[TokenOutput], None]
"""Called on the engine's thread (or, for a handed-over first token, on the caller's)."""


@dataclass(frozen=True, slots=True)
class CacheReset:
    """What a reset of the prefix cache has forgotten."""

    num_cached_blocks: int
    """Blocks that a prompt could have found, retained ones included."""
    num_retained_blocks: int
    num_conversations: int
    """Retained until then."""
    num_blocks_in_use: int
    """Of requests in service, and held for peers or in quarantine: they are found by nobody new,
    and their content is there until those let go."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Between what a number has to be, both included unless said otherwise."""

    low: float
    high: float | None = None
    """None: any finite number."""
    excludes_low: bool = False

    def check(self, name: str, value: float | None) -> None:
        """Raise ``RequestError`` naming a parameter that is out of bounds; None is not."""
        if value is None:
            return
        is_high_enough = value > self.low if self.excludes_low else value >= self.low
        is_low_enough = value < math.inf if self.high is None else value <= self.high
        if not (is_high_enough and is_low_enough):
            raise RequestError.invalid_value(name, f"{name} must be {self}, not {value:g}")

    def __str__(self) -> str:
        least = f"above {self.low:g}" if self.excludes_low else f"at least {self.low:g}"
        return least if self.high is None else f"{least} and at most {self.high:g}"


SAMPLING_BOUNDS = {
    "max_tokens": Bounds(1),
    "min_tokens": Bounds(0),
    "temperature": Bounds(0),
    "top_p": Bounds(0, 1, excludes_low=True),
    "top_k": Bounds(-1),
    "presence_penalty": Bounds(-2, 2),
    "frequency_penalty": Bounds(-2, 2),
    "repetition_penalty": Bounds(0, excludes_low=True),
    "logprobs": Bounds(0, MAX_LOGPROBS),
}
"""By field of ``SamplingParams``."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What bounds a request."""

    vocabulary_size: int
    max_model_len: int
    """Tokens of prompt and answer."""
    num_blocks: int
    block_size_tokens: int


def check_request(request: EngineRequest, limits: EngineLimits) -> int:
    """Return how many tokens of prompt and answer ``request`` may reach.

    Raises ``RequestError``, whose message goes to the client, for a request that can never be
    served.
    """
    params, prompt, last_token = (
        request.sampling,
        request.prompt_token_ids,
        limits.vocabulary_size - 1,
    )
    for name, bounds in SAMPLING_BOUNDS.items():
        bounds.check(name, getattr(params, name))
    if params.max_tokens is not None:
        Bounds(0, params.max_tokens).check("min_tokens", params.min_tokens)
    if not prompt:
        raise RequestError.invalid_value("prompt", "the prompt is empty")
    if min(prompt) < 0 or max(prompt) > last_token:
        raise RequestError.invalid_value(
            "prompt", f"the prompt has a token id outside of 0 to {last_token}"
        )
    for token_id in params.stop_token_ids:
        if not 0 <= token_id <= last_token:
            raise RequestError.invalid_value(
                "stop_token_ids", f"stop token id {token_id} is outside of 0 to {last_token}"
            )
    return _max_total_tokens(request, limits)


def _max_total_tokens(request: EngineRequest, limits: EngineLimits) -> int:
    num_prompt, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
    context = (
        f"this model's context is {limits.max_model_len} tokens, but the prompt has {num_prompt}"
    )
    if num_prompt >= limits.max_model_len:
        raise RequestError(
            f"{context} tokens and needs room for at least one more",
            param="prompt",
            code="context_length_exceeded",
        )
    if max_tokens is not None and num_prompt + max_tokens > limits.max_model_len:
        raise RequestError(
            f"{context} tokens and max_tokens is {max_tokens}, {num_prompt + max_tokens} together",
            param="max_tokens",
            code="context_length_exceeded",
        )
    if request.transfer is not None and request.transfer.role is Role.PREFILL:
        _require_pool(num_prompt, limits)
        return num_prompt + 1
    # The last token's KV is never needed.
    _require_pool(num_prompt + (max_tokens or 1) - 1, limits)
    if max_tokens is not None:
        return num_prompt + max_tokens
    return min(limits.max_model_len, limits.num_blocks * limits.block_size_tokens + 1)


def _require_pool(num_tokens: int, limits: EngineLimits) -> None:
    size = limits.block_size_tokens
    needed = -(-num_tokens // size)
    if needed > limits.num_blocks:
        raise RequestError(
            f"this request needs {needed} KV blocks of {size} tokens, but this instance's pool "
            f"has {limits.num_blocks}; shorten it or enlarge the pool",
            param="prompt",
            code="kv_pool_too_small",
        )
