"""Instances that are drained: who may ask it, and what becomes of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import pytest

from kvferry.protocol.ids import TransferId
from kvferry.protocol.signing import signature_headers
from tests.integration.router_setup import Deployment, deployment

_KEY = b"k" * 32
_JSON = {"Content-Type": "application/json"}


async def _order(
    world: Deployment, body: bytes, headers: Mapping[str, str] = _JSON
) -> tuple[int, str]:
    url = f"{world.router.url}/kvferry/fleet/draining"
    async with world.client.post(url, data=body, headers=headers) as response:
        return response.status, await response.text()


def _body(url: str, is_draining: bool = True) -> bytes:
    return f'{{"url": "{url}", "is_draining": {str(is_draining).lower()}}}'.encode()


async def _ask(world: Deployment) -> int:
    async with world.post({"prompt": "a", "stream": True}) as response:
        await response.read()
        return response.status


async def test_a_draining_instance_finishes_what_it_has_and_gets_nothing_new(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    async with deployment(1, 2) as world:
        gate = world.d.decode.before_headers = asyncio.Event()
        running = asyncio.create_task(_ask(world))
        await world.d.wait_until(lambda: len(world.d.received) == 1)
        assert (await _order(world, _body(world.d.url)))[0] == 200
        assert [await _ask(world) for _ in range(4)] == [200] * 4
        assert (len(world.d.received), len(world.decode[1].received)) == (1, 4)
        async with world.client.get(f"{world.router.url}/kvferry/fleet") as response:
            shown = (await response.json())["decode"]
        assert [each["is_draining"] for each in shown] == [True, False]
        assert not [r for r in caplog.records if "has drained" in r.message]
        gate.set()
        assert await running == 200
        await world.wait_settled()
        assert [
            vars(r)["fields"]["instance"] for r in caplog.records if "drained" in r.message
        ] == [world.d.url]
        assert (await _order(world, _body(world.d.url, is_draining=False)))[0] == 200
        assert [await _ask(world) for _ in range(4)] == [200] * 4
        assert len(world.d.received) > 1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (_body("http://127.0.0.1:1"), "not a configured instance"),
        (b'{"url": "http://127.0.0.1:1"}', "is_draining"),
        (b'{"url": "x", "is_draining": true, "more": 1}', "more"),
        (b"{", "truncated"),
    ],
)
async def test_an_order_that_is_none_is_refused(body: bytes, words: str) -> None:
    async with deployment() as world:
        status, text = await _order(world, body)
        assert (status, words in text) == (400, True)


async def test_a_page_in_a_browser_cannot_order_it() -> None:
    async with deployment() as world:
        assert (await _order(world, _body(world.d.url), {"Content-Type": "text/plain"}))[0] == 403


async def test_where_the_router_has_a_key_the_order_is_signed() -> None:
    async with deployment(cluster_key=_KEY) as world:
        body = _body(world.d.url)
        for key, status in ((None, 403), (b"x" * 32, 403), (_KEY, 200)):
            signed = {} if key is None else signature_headers(
                key, body, TransferId("draining"), time.time()
            )  # fmt: skip
            assert (await _order(world, body, _JSON | dict(signed)))[0] == status
        assert world.router.fleet.snapshot().decode[0].is_draining
