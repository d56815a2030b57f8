"""A timeout that does not count the time in which its own process stood still."""

from __future__ import annotations

import asyncio
import time

import pytest
import uvloop

from kvferry.router.fleet.health import running_timeout

_LOOPS = (asyncio.new_event_loop, uvloop.new_event_loop)
_LIMIT_S = 0.2


async def test_what_does_not_come_ends_in_time() -> None:
    began_s = time.monotonic()
    with pytest.raises(TimeoutError):
        async with running_timeout(0.05):
            await asyncio.Event().wait()
    assert 0.04 < time.monotonic() - began_s < 2


async def test_what_comes_is_not_ended_later() -> None:
    async with running_timeout(0.05):
        await asyncio.sleep(0)
    await asyncio.sleep(0.1)


async def test_an_error_within_passes() -> None:
    with pytest.raises(KeyError):
        async with running_timeout(0.05):
            raise KeyError


async def _ask_while_the_loop_stands_still() -> bytes:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(4))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        asyncio.get_running_loop().call_later(0.0, time.sleep, 3 * _LIMIT_S)
        try:
            async with running_timeout(_LIMIT_S):
                writer.write(b"ping")
                await asyncio.sleep(0)
                return await reader.readexactly(4)
        finally:
            writer.close()
            await writer.wait_closed()


@pytest.mark.parametrize("new_loop", _LOOPS)
def test_a_process_that_stood_still_blames_nobody(
    new_loop: type[asyncio.AbstractEventLoop],
) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(_ask_while_the_loop_stands_still()) == b"ping"
