"""The aiohttp application: routes, limits, and the socket it is served on."""

from __future__ import annotations

from aiohttp import web

from kvferry.errors import ConfigError
from kvferry.server import endpoints, openai
from kvferry.server.app_keys import SERVICE
from kvferry.server.config import HttpConfig
from kvferry.server.errors import error_middleware
from kvferry.server.service import InstanceService

_KEEPALIVE_S = 75.0


def build_app(service: InstanceService) -> web.Application:
    """Return the application that serves ``service``."""
    app = web.Application(
        middlewares=[error_middleware], client_max_size=service.parts.http.max_body_bytes
    )
    app[SERVICE] = service
    app.add_routes(
        [
            web.post("/v1/completions", openai.completions),
            web.post("/v1/chat/completions", openai.chat_completions),
            web.get("/v1/models", openai.models),
            web.post("/tokenize", endpoints.tokenize),
            web.post("/detokenize", endpoints.detokenize),
            web.get("/health", endpoints.health),
            web.get("/metrics", endpoints.metrics),
            web.post("/reset_prefix_cache", endpoints.reset_prefix_cache),
            web.get("/kvferry/instance", endpoints.instance),
            web.delete("/kvferry/transfers/{transfer_id}", endpoints.cancel_transfer),
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
