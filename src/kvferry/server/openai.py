"""Handlers of OpenAI's endpoints: from a body to a checked ``Job``.

Owns which field means what. Running and answering is ``answering``'s.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web

from kvferry.engine.request import EngineRequest
from kvferry.errors import RequestError
from kvferry.protocol.client_headers import refuse_unknown_headers
from kvferry.protocol.ids import RequestId
from kvferry.protocol.params import KvTransferParams, Role
from kvferry.protocol.signing import SIGNATURE_HEADER
from kvferry.server.answering import Job, answer
from kvferry.server.app_keys import SERVICE
from kvferry.server.formats import AnswerFormat, ChatFormat, CompletionFormat, Envelope
from kvferry.server.openai_types import ChatRequest, CompletionRequest, parse_body
from kvferry.server.output import ChoiceOptions
from kvferry.server.prompts import (
    Prompt,
    checked_token_ids,
    encode_chat,
    encode_text,
    rendering_of,
)
from kvferry.server.sampling import MAX_CHOICES, check_fields, sampling_params
from kvferry.server.service import InstanceService


async def completions(request: web.Request) -> web.StreamResponse:
    """``POST /v1/completions``."""
    service = request.app[SERVICE]
    refuse_unknown_headers(request.headers)
    body = await request.read()
    parsed = parse_body(body, CompletionRequest)
    model = service.require_model(parsed.model)
    check_fields(parsed)
    accepted = _Accepted(
        answer_id=f"cmpl-{secrets.token_hex(16)}",
        model=model,
        prompts=[await _encoded(service, parsed, prompt) for prompt in parsed.prompts()],
        transfer=_transfer(service, request, parsed, body),
    )
    shapes = CompletionFormat(_envelope(service, parsed, accepted))
    return await answer(request, service, _job(parsed, accepted, shapes))


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """``POST /v1/chat/completions``."""
    service = request.app[SERVICE]
    refuse_unknown_headers(request.headers)
    body = await request.read()
    parsed = parse_body(body, ChatRequest)
    model = service.require_model(parsed.model)
    check_fields(parsed)
    accepted = _Accepted(
        answer_id=f"chatcmpl-{secrets.token_hex(16)}",
        model=model,
        prompts=[await encode_chat(service, parsed.messages, rendering_of(parsed))],
        transfer=_transfer(service, request, parsed, body),
    )
    shapes = ChatFormat(_envelope(service, parsed, accepted))
    return await answer(request, service, _job(parsed, accepted, shapes))


async def models(request: web.Request) -> web.Response:
    """``GET /v1/models``."""
    model = request.app[SERVICE].model
    entries = [
        {
            "id": name,
            "object": "model",
            "created": model.created_s,
            "owned_by": "kvferry",
            "root": model.names[0],
            "parent": None,
            "max_model_len": model.max_model_len,
        }
        for name in model.names
    ]
    return web.json_response({"object": "list", "data": entries})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Accepted:
    """What is known of a request once its fields have been checked."""

    answer_id: str
    model: str
    prompts: Sequence[Prompt]
    transfer: KvTransferParams | None


async def _encoded(
    service: InstanceService, request: CompletionRequest, prompt: str | list[int]
) -> Prompt:
    if isinstance(prompt, str):
        return await encode_text(
            service, prompt, add_special_tokens=request.add_special_tokens is not False
        )
    return checked_token_ids(service, prompt)


def _transfer(
    service: InstanceService,
    request: web.Request,
    fields: CompletionRequest | ChatRequest,
    body: bytes,
) -> KvTransferParams | None:
    transfer = service.trusted_transfer(
        fields.kv_transfer_params, body=body, signature=request.headers.get(SIGNATURE_HEADER)
    )
    if transfer is not None and (fields.n or 1) != 1:
        raise RequestError(
            f"n is {fields.n}, but kv_transfer_params hand over one choice: leave n out",
            param="n",
            code="unsupported_value",
        )
    return transfer


def _envelope(
    service: InstanceService, request: CompletionRequest | ChatRequest, accepted: _Accepted
) -> Envelope:
    tokenizer = service.tokenizer
    return Envelope(
        answer_id=accepted.answer_id,
        created_s=int(service.parts.wall_time_s()),
        model=accepted.model,
        num_logprobs=sampling_params(request, 0).logprobs,
        returns_token_ids=bool(request.return_token_ids),
        token_text=lambda token: tokenizer.decode([token], skip_special_tokens=False),
    )


def _job(
    request: CompletionRequest | ChatRequest, accepted: _Accepted, shapes: AnswerFormat
) -> Job:
    # A prefill leg ends after one token anyway; decode says it, and so finds the stop string.
    is_prefill = _is_prefill_leg(accepted)
    return Job(
        requests=_engine_requests(request, accepted),
        format=shapes,
        options=ChoiceOptions(
            stop_strings=() if is_prefill else request.stop_strings,
            include_stop=bool(request.include_stop_str_in_output),
            min_tokens=request.min_tokens or 0,
            stop_token_ids=frozenset(request.stop_token_ids or ()),
            wants_report=bool(request.kv_report),
        ),
        num_prompt_tokens=sum(len(prompt) for prompt in accepted.prompts),
        is_streamed=bool(request.stream),
        include_usage=request.include_usage,
        continuous_usage=request.continuous_usage,
        skip_special_tokens=request.skip_special_tokens is not False,
    )


def _is_prefill_leg(accepted: _Accepted) -> bool:
    return accepted.transfer is not None and accepted.transfer.role is Role.PREFILL


def _engine_requests(
    request: CompletionRequest | ChatRequest, accepted: _Accepted
) -> list[EngineRequest]:
    """One a choice: all choices of the first prompt, then of the second, as OpenAI numbers them."""
    num_choices = request.n or 1
    prompts = accepted.prompts
    _check_prompts(prompts, num_choices)
    if accepted.transfer is not None and len(prompts) != 1:
        raise RequestError(
            f"{len(prompts)} prompts, but kv_transfer_params hand over one",
            param="prompt",
            code="unsupported_value",
        )
    return [
        EngineRequest(
            request_id=RequestId(f"{accepted.answer_id}-{number * num_choices + choice}"),
            prompt_token_ids=prompt,
            sampling=sampling_params(request, choice),
            cache_salt=request.cache_salt or "",
            transfer=accepted.transfer,
            wants_progress=bool(request.kv_progress) and _is_prefill_leg(accepted),
        )
        for number, prompt in enumerate(prompts)
        for choice in range(num_choices)
    ]


def _check_prompts(prompts: Sequence[Prompt], num_choices: int) -> None:
    if len(prompts) * num_choices > MAX_CHOICES:
        raise RequestError(
            f"{len(prompts)} prompts with n = {num_choices} exceed {MAX_CHOICES} choices",
            param="n",
            code="invalid_value",
        )
    if any(not prompt for prompt in prompts):
        raise RequestError(
            "the prompt has no tokens: give at least one", param="prompt", code="invalid_value"
        )
