"""The aiohttp application: routes, the socket, and the handlers beside OpenAI's.

Those are tokens, health, metrics, and what other kvferry processes ask.
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from kvferry.errors import ConfigError, RequestError
from kvferry.observe.metrics import CONTENT_TYPE
from kvferry.protocol.ids import TransferId
from kvferry.server.bodies import DetokenizeRequest, TokenizeRequest, parse_body
from kvferry.server.completions import chat_completions, completions
from kvferry.server.config import HttpConfig
from kvferry.server.responses import error_middleware, json_response
from kvferry.server.service import SERVICE, InstanceService

_KEEPALIVE_S = 75.0


def build_app(service: InstanceService) -> web.Application:
    """Return the application that serves ``service``."""
    max_body_bytes = service.instance.config.http.max_body_bytes
    app = web.Application(middlewares=[error_middleware], client_max_size=max_body_bytes)
    app[SERVICE] = service
    app.add_routes(
        [
            web.post("/v1/completions", completions),
            web.post("/v1/chat/completions", chat_completions),
            web.get("/v1/models", models),
            web.post("/tokenize", tokenize),
            web.post("/detokenize", detokenize),
            web.get("/health", health),
            web.get("/metrics", metrics),
            web.post("/reset_prefix_cache", reset_prefix_cache),
            web.get("/kvferry/instance", instance),
            web.delete("/kvferry/transfers/{transfer_id}", cancel_transfer),
        ]
    )
    return app


class HttpServer:
    """An application on a listening socket. Clients that leave cancel their handlers."""

    def __init__(self, app: web.Application, config: HttpConfig) -> None:
        self._config = config
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=_KEEPALIVE_S,
            shutdown_timeout=config.shutdown_timeout_s,
        )
        self._site: web.TCPSite | None = None

    async def start(self) -> str:
        """Listen; return the URL. Raises ``ConfigError`` if the address cannot be had."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._config.host, self._config.port)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(
                f"cannot listen on {self._config.host} port {self._config.port}: {error}"
            ) from error
        self._site = site
        return _url(self._config.host, self._runner.addresses[0][1])

    async def stop_listening(self) -> None:
        """Take no new connection; open ones go on."""
        if self._site is not None:
            await self._site.stop()
            self._site = None

    async def close(self) -> None:
        """End every connection, giving running handlers ``shutdown_timeout_s``."""
        await self._runner.cleanup()


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def models(request: web.Request) -> web.Response:
    """``GET /v1/models``."""
    service = request.app[SERVICE]
    entries = [
        {
            "id": name,
            "object": "model",
            "created": service.created_s,
            "owned_by": "kvferry",
            "root": service.model_names[0],
            "parent": None,
            "max_model_len": service.instance.engine.model.max_model_len,
        }
        for name in service.model_names
    ]
    return json_response({"object": "list", "data": entries})


async def tokenize(request: web.Request) -> web.Response:
    """``POST /tokenize``: ``{prompt}`` or ``{messages}`` → ``{count, max_model_len, tokens}``."""
    service = request.app[SERVICE]
    body = parse_body(await request.read(), TokenizeRequest)
    service.require_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError(
            "give either prompt or messages", param="prompt", code="missing_required_parameter"
        )
    if body.messages is not None:
        tokens = await service.encode_chat(body.messages, body)
    else:
        adds_special = body.add_special_tokens is not False
        tokens = await service.encode_text(body.prompt or "", add_special_tokens=adds_special)
    strings = service.tokenizer.token_strings(tokens) if body.return_token_strs else None
    return json_response(
        {
            "count": len(tokens),
            "max_model_len": service.instance.engine.model.max_model_len,
            "tokens": tokens,
            "token_strs": strings,
        }
    )


async def detokenize(request: web.Request) -> web.Response:
    """``POST /detokenize``: ``{tokens}`` → ``{prompt}``."""
    service = request.app[SERVICE]
    body = parse_body(await request.read(), DetokenizeRequest)
    service.require_model(body.model)
    tokens = service.checked_token_ids(body.tokens, param="tokens")
    text = await service.run_for(
        len(tokens), lambda: service.tokenizer.decode(tokens, skip_special_tokens=False)
    )
    return json_response({"prompt": text})


async def health(request: web.Request) -> web.Response:
    """``GET /health``: 200 while the engine can serve, else 503; the body is empty."""
    return web.Response(status=200 if request.app[SERVICE].is_healthy else 503)


async def metrics(request: web.Request) -> web.Response:
    """``GET /metrics`` in Prometheus' text form."""
    body = request.app[SERVICE].figures.as_metrics()
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


async def instance(request: web.Request) -> web.Response:
    """``GET /kvferry/instance``: who this is, as on the control port, with the load beside it."""
    return json_response(request.app[SERVICE].figures.as_json())


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """``POST /reset_prefix_cache``, as in vLLM: 200 once nothing of earlier prompts is found, and
    what was forgotten.

    For development: 403 unless the instance was started for it.
    """
    instance = request.app[SERVICE].instance
    if not instance.config.http.has_dev_endpoints:
        raise RequestError(
            "this endpoint is for development: start the instance with --enable-dev-endpoints",
            code="dev_endpoints_disabled",
            status=403,
        )
    return json_response(msgspec.to_builtins(instance.engine.reset_prefix_cache()))


async def cancel_transfer(request: web.Request) -> web.Response:
    """``DELETE /kvferry/transfers/{transfer_id}``: 204, whether or not there was anything.

    403 where the instance has a key and the request is not signed with it.
    """
    transfer_id = TransferId(request.match_info["transfer_id"])
    request.app[SERVICE].cancel_transfer(transfer_id, request)
    return web.Response(status=204)
