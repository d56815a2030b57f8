"""Listening: a port that is taken is one clear refusal, and stopping afterwards is harmless."""

from __future__ import annotations

import socket

import pytest
from aiohttp import web

from kvferry.errors import ConfigError
from kvferry.server.app import HttpServer
from kvferry.server.config import HttpConfig


async def test_a_taken_port_is_refused_and_the_end_is_quiet() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = HttpServer(web.Application(), HttpConfig(port=port))
        with pytest.raises(ConfigError, match=f"port {port}"):
            await server.start()
        await server.stop_listening()
        await server.close()
