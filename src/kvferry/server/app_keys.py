"""Keys under which the application carries what its handlers need."""

from __future__ import annotations

from aiohttp import web

from kvferry.server.service import InstanceService

SERVICE = web.AppKey("service", InstanceService)
