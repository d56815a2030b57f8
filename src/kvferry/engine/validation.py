"""Check a request against one engine's limits, before it is queued.

Everything here raises ``RequestError``, whose message goes to the client.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.engine.request import EngineRequest, SamplingParams
from kvferry.errors import RequestError
from kvferry.protocol.params import Role

MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What bounds a request."""

    vocabulary_size: int
    max_model_len: int
    """Tokens of prompt and answer."""
    num_blocks: int
    block_size_tokens: int

    @property
    def pool_tokens(self) -> int:
        """Tokens whose KV fits into an empty pool."""
        return self.num_blocks * self.block_size_tokens


def check_request(request: EngineRequest, limits: EngineLimits) -> int:
    """Return how many tokens of prompt and answer ``request`` may reach.

    Raises ``RequestError`` for a request that can never be served.
    """
    check_sampling(request.sampling)
    prompt = request.prompt_token_ids
    if not prompt:
        raise RequestError("the prompt is empty", param="prompt", code="invalid_value")
    if min(prompt) < 0 or max(prompt) >= limits.vocabulary_size:
        raise RequestError(
            f"the prompt has a token id outside of 0 to {limits.vocabulary_size - 1}",
            param="prompt",
            code="invalid_value",
        )
    _check_stop_tokens(request.sampling, limits)
    return _max_total_tokens(request, limits)


def _check_stop_tokens(params: SamplingParams, limits: EngineLimits) -> None:
    for token_id in params.stop_token_ids:
        if not 0 <= token_id < limits.vocabulary_size:
            raise RequestError(
                f"stop token id {token_id} is outside of 0 to {limits.vocabulary_size - 1}",
                param="stop_token_ids",
                code="invalid_value",
            )


def _max_total_tokens(request: EngineRequest, limits: EngineLimits) -> int:
    num_prompt = len(request.prompt_token_ids)
    max_tokens = request.sampling.max_tokens
    if num_prompt >= limits.max_model_len:
        raise RequestError(
            f"this model's context is {limits.max_model_len} tokens, but the prompt has "
            f"{num_prompt} tokens and needs room for at least one more",
            param="prompt",
            code="context_length_exceeded",
        )
    if max_tokens is not None and num_prompt + max_tokens > limits.max_model_len:
        raise RequestError(
            f"this model's context is {limits.max_model_len} tokens, but the prompt has "
            f"{num_prompt} tokens and max_tokens is {max_tokens}, "
            f"{num_prompt + max_tokens} together",
            param="max_tokens",
            code="context_length_exceeded",
        )
    transfer = request.transfer
    if transfer is not None and transfer.role is Role.PREFILL:
        _require_pool(num_prompt, limits)
        return num_prompt + 1
    # The last token's KV is never needed.
    _require_pool(num_prompt + (max_tokens or 1) - 1, limits)
    if max_tokens is not None:
        return num_prompt + max_tokens
    return min(limits.max_model_len, limits.pool_tokens + 1)


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


def check_sampling(params: SamplingParams) -> None:
    """Raise ``RequestError`` naming the first parameter that is out of range."""
    valid = {
        "temperature": params.temperature >= 0,
        "top_p": 0 < params.top_p <= 1,
        "top_k": params.top_k >= -1,
        "presence_penalty": -2 <= params.presence_penalty <= 2,
        "frequency_penalty": -2 <= params.frequency_penalty <= 2,
        "repetition_penalty": 0 < params.repetition_penalty < float("inf"),
        "max_tokens": params.max_tokens is None or params.max_tokens >= 1,
        "min_tokens": params.min_tokens >= 0
        and (params.max_tokens is None or params.min_tokens <= params.max_tokens),
        "logprobs": params.logprobs is None or 0 <= params.logprobs <= MAX_LOGPROBS,
    }
    for name, is_valid in valid.items():
        if not is_valid:
            value = getattr(params, name)
            raise RequestError(f"{name} is out of range: {value}", param=name, code="invalid_value")
