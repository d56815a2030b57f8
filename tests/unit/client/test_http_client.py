"""One bounded question: its answer, the server's clock, and errors in plain words."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from email.utils import formatdate

import aiohttp
import pytest
from aiohttp import web

from kvferry.client import http_client
from kvferry.client.http_client import HttpClient
from kvferry.errors import PeerUnreachableError

SKEW_S = 3600.0


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async def answer(request: web.Request) -> web.Response:
        if request.path == "/hangs":
            await asyncio.Event().wait()
        if request.path == "/large":
            return web.Response(body=b"x" * 1000)
        if request.path == "/ahead":
            return web.Response(headers={"Date": formatdate(time.time() + SKEW_S, usegmt=True)})
        if request.path == "/elsewhere":
            raise web.HTTPFound("/ahead")
        return web.Response(status=401, text="who are you", headers={"Date": "noon"})

    app = web.Application()
    app.router.add_get("/{tail:.*}", answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.fixture
async def client() -> AsyncIterator[HttpClient]:
    async with aiohttp.ClientSession() as session:
        yield HttpClient(session, 30)


async def test_any_status_is_an_answer(url: str, client: HttpClient) -> None:
    reply = await client.ask(f"{url}/")
    assert (reply.status, reply.text, reply.clock_ahead_s) == (401, "who are you", None)
    assert (await client.ask(f"{url}/elsewhere")).status == 302


async def test_the_servers_clock_is_told_by_its_date(url: str, client: HttpClient) -> None:
    reply = await client.ask(f"{url}/ahead")
    assert reply.clock_ahead_s is not None
    assert abs(reply.clock_ahead_s - SKEW_S) <= 1 + reply.elapsed_s


async def test_no_answer_in_time_is_said(url: str, client: HttpClient) -> None:
    with pytest.raises(PeerUnreachableError, match=r"no answer within 0\.2 s"):
        await client.ask(f"{url}/hangs", timeout_s=0.2)


async def test_an_answer_that_is_too_large_is_not_read(
    url: str, client: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_client, "MAX_ANSWER_BYTES", 999)
    with pytest.raises(PeerUnreachableError, match="more than 999 bytes"):
        await client.ask(f"{url}/large")


async def test_nobody_there_is_said(client: HttpClient) -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unheard.getsockname()[1]}"
        with pytest.raises(PeerUnreachableError, match="no connection"):
            await client.ask(address)
