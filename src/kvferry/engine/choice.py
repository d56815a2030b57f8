"""The next token of a live request, and whether it is the last."""

from __future__ import annotations

from kvferry.engine.live_request import LiveRequest
from kvferry.engine.request import FinishReason, SamplingParams
from kvferry.engine.sampler import SamplingPoint, Scores, sample_token, token_logprob
from kvferry.protocol.params import TokenLogprob


def choose_token(request: LiveRequest, scores: Scores) -> tuple[int, TokenLogprob | None]:
    """Return the next token of ``request``, and its log probability where asked for."""
    params: SamplingParams = request.request.sampling
    too_early = request.num_output_tokens < params.min_tokens
    point = SamplingPoint(
        seed=request.seed,
        prompt_token_ids=request.request.prompt_token_ids,
        output_token_ids=request.token_ids[request.num_prompt_tokens :],
        suppressed_token_ids=request.stop_token_ids if too_early else (),
    )
    token_id = sample_token(scores, params, point)
    if params.logprobs is None:
        return token_id, None
    return token_id, token_logprob(scores, token_id, params.logprobs)


def finish_reason(request: LiveRequest) -> FinishReason | None:
    """Return why ``request`` ends with its last token, if it does."""
    if request.token_ids[-1] in request.stop_token_ids:
        return FinishReason.STOP
    if len(request.token_ids) >= request.max_total_tokens:
        return FinishReason.LENGTH
    return None
