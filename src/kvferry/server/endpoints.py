"""Handlers beside OpenAI's: tokens, health, metrics, and what other kvferry processes ask."""

from __future__ import annotations

import msgspec
from aiohttp import web

from kvferry.errors import RequestError
from kvferry.observe.metrics import CONTENT_TYPE
from kvferry.protocol.ids import TransferId
from kvferry.protocol.signing import SIGNATURE_HEADER
from kvferry.server.app_keys import SERVICE
from kvferry.server.openai_types import DetokenizeRequest, TokenizeRequest, parse_body
from kvferry.server.prompts import (
    Prompt,
    checked_token_ids,
    encode_chat,
    encode_text,
    rendering_of,
)
from kvferry.server.service import InstanceService


async def tokenize(request: web.Request) -> web.Response:
    """``POST /tokenize``: ``{prompt}`` or ``{messages}`` → ``{count, max_model_len, tokens}``."""
    service = request.app[SERVICE]
    parsed = parse_body(await request.read(), TokenizeRequest)
    service.require_model(parsed.model)
    tokens = await _tokens(service, parsed)
    strings = service.tokenizer.token_strings(tokens) if parsed.return_token_strs else None
    return _json(
        {
            "count": len(tokens),
            "max_model_len": service.model.max_model_len,
            "tokens": tokens,
            "token_strs": strings,
        }
    )


async def _tokens(service: InstanceService, request: TokenizeRequest) -> Prompt:
    if (request.prompt is None) == (request.messages is None):
        raise RequestError(
            "give either prompt or messages",
            param="prompt",
            code="missing_required_parameter",
        )
    if request.messages is not None:
        return await encode_chat(service, request.messages, rendering_of(request))
    return await encode_text(
        service, request.prompt or "", add_special_tokens=request.add_special_tokens is not False
    )


async def detokenize(request: web.Request) -> web.Response:
    """``POST /detokenize``: ``{tokens}`` → ``{prompt}``."""
    service = request.app[SERVICE]
    parsed = parse_body(await request.read(), DetokenizeRequest)
    service.require_model(parsed.model)
    tokens = checked_token_ids(service, parsed.tokens, param="tokens")
    text = await service.run_for(
        len(tokens), lambda: service.tokenizer.decode(tokens, skip_special_tokens=False)
    )
    return _json({"prompt": text})


async def health(request: web.Request) -> web.Response:
    """``GET /health``: 200 while the engine can serve, else 503; the body is empty."""
    return web.Response(status=200 if request.app[SERVICE].is_healthy else 503)


async def metrics(request: web.Request) -> web.Response:
    """``GET /metrics`` in Prometheus' text form."""
    service = request.app[SERVICE]
    parts = service.parts
    figures, gauges = parts.figures(), parts.metrics.engine
    gauges.num_requests_running.set(figures.num_running)
    gauges.num_requests_waiting.set(figures.num_waiting)
    gauges.kv_cache_usage_perc.set(1 - figures.num_free_blocks / max(1, figures.num_blocks))
    service.retained_meter.show(figures.retained)
    service.preemption_meter.show(figures.num_preemptions)
    if parts.connector is not None:
        held, exchange = parts.connector.snapshot(), parts.metrics.exchange
        exchange.handoffs_held.set(held.num_handoffs_held)
        exchange.leased_blocks.set(held.num_blocks_leased)
        exchange.quarantined_blocks.set(held.num_blocks_quarantined)
        exchange.blind_links.set(figures.num_blind_links)
        exchange.resting_peers.set(held.num_peers_resting)
    return web.Response(body=parts.metrics.render(), headers={"Content-Type": CONTENT_TYPE})


async def instance(request: web.Request) -> web.Response:
    """``GET /kvferry/instance``: who this is, as on the control port, with the load beside it."""
    service = request.app[SERVICE]
    parts = service.parts
    info = parts.describe()
    shown = msgspec.to_builtins(info, builtin_types=(bytes,))
    shown["fingerprint"] = info.fingerprint.hex()
    # Not the key: who has another one is told by this where it is.
    shown["user_key"] = msgspec.to_builtins(parts.user_key_file)
    figures = parts.figures()
    shown["num_requests_running"] = figures.num_running
    shown["num_requests_waiting"] = figures.num_waiting
    shown["retained"] = msgspec.to_builtins(figures.retained)
    shown["read_back"] = msgspec.to_builtins(service.read_backs)
    if parts.connector is not None:
        shown["exchange"] = msgspec.to_builtins(parts.connector.snapshot())
    return _json(shown)


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """``POST /reset_prefix_cache``, as in vLLM: 200 once nothing of earlier prompts is found, and
    what was forgotten.

    For development: 403 unless the instance was started for it.
    """
    parts = request.app[SERVICE].parts
    if not parts.http.has_dev_endpoints:
        raise RequestError(
            "this endpoint is for development: start the instance with --enable-dev-endpoints",
            code="dev_endpoints_disabled",
            status=403,
        )
    return _json(msgspec.to_builtins(parts.engine.reset_prefix_cache()))


async def cancel_transfer(request: web.Request) -> web.Response:
    """``DELETE /kvferry/transfers/{transfer_id}``: 204, whether or not there was anything.

    403 where the instance has a key and the request is not signed with it.
    """
    request.app[SERVICE].cancel_transfer(
        TransferId(request.match_info["transfer_id"]), request.headers.get(SIGNATURE_HEADER)
    )
    return web.Response(status=204)


def _json(payload: dict[str, object]) -> web.Response:
    return web.Response(body=msgspec.json.encode(payload), content_type="application/json")
