"""What remains when a client leaves: nothing."""

import asyncio
import socket
import struct
from typing import Any

import aiohttp
import pytest

from kvferry.engine.request import FinishReason
from kvferry.errors import RequestError
from kvferry.protocol.ids import TransferId
from tests.unit.server.fakes import (
    ScriptedEngine,
    Served,
    handoff_output,
    hands_over,
    outputs_of,
    serve,
)

COMPLETIONS = "/v1/completions"
PREFILL: dict[str, Any] = {
    "prompt": "abc",
    "kv_transfer_params": {"transfer_id": "xfer-1", "role": "prefill"},
}


async def leave(asking: asyncio.Task[Any]) -> None:
    """Cancelling a client's request closes its connection."""
    asking.cancel()
    await asyncio.wait([asking])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_before_the_first_token(stream: bool, n: int) -> None:
    async with serve(ScriptedEngine()) as served:
        body = {"prompt": "abc", "stream": stream, "n": n}
        asking = asyncio.create_task(served.client.post(COMPLETIONS, json=body))
        await served.engine.wait_requests(n)
        await leave(asking)
        await served.engine.wait_aborted(n)
        names = {request.request_id for request in served.engine.requests}
        assert set(served.engine.aborted) == names


async def test_in_the_middle_of_a_stream() -> None:
    async with serve(ScriptedEngine()) as served:
        asking = asyncio.create_task(
            served.client.post(COMPLETIONS, json={"prompt": "abc", "stream": True})
        )
        request = await served.engine.wait_requests()
        served.engine.emit(request, "a")
        response = await asking
        await response.content.readuntil(b"\n\n")
        response.close()
        await served.engine.wait_aborted()
        assert served.engine.aborted == [request.request_id]


async def test_finished_choices_are_not_aborted() -> None:
    async with serve(ScriptedEngine()) as served:
        body = {"prompt": "abc", "n": 2}
        asking = asyncio.create_task(served.client.post(COMPLETIONS, json=body))
        await served.engine.wait_requests(2)
        first, second = served.engine.requests
        for output in outputs_of(first, [97], FinishReason.LENGTH):
            served.engine.callback(first)(output)
        await asyncio.sleep(0)  # the loop delivers it
        await leave(asking)
        await served.engine.wait_aborted()
        assert served.engine.aborted == [second.request_id]


async def test_an_offer_made_after_its_client_left_is_withdrawn() -> None:
    engine = ScriptedEngine(answers_aborts=False)
    async with serve(engine) as served:
        asking = asyncio.create_task(served.client.post(COMPLETIONS, json=PREFILL))
        request = await engine.wait_requests()
        await leave(asking)
        await engine.wait_aborted()
        assert served.connector.withdrawn == []
        engine.callback(request)(handoff_output(request, "x"))
        await withdrawn(served)
        assert served.connector.withdrawn == [TransferId("xfer-1")]


async def test_an_offer_whose_answer_cannot_be_sent_is_withdrawn() -> None:
    engine = ScriptedEngine()
    async with serve(engine) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.split(":")[-1]))
        body = b'{"prompt":"abc","kv_transfer_params":{"transfer_id":"xfer-1","role":"prefill"}}'
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        request = await engine.wait_requests()
        # Broken, not closed: the server finds out when it writes, or before.
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        await asyncio.sleep(0)
        engine.callback(request)(handoff_output(request, "x"))
        del reader
        await withdrawn(served)


async def test_an_offer_that_was_sent_stays() -> None:
    async with serve(ScriptedEngine(hands_over("x"))) as served:
        status, body = await served.post(COMPLETIONS, PREFILL)
        again, _ = await served.post(COMPLETIONS, PREFILL)
        assert served.connector.withdrawn == []
    assert (status, again) == (200, 200)
    assert body["kv_transfer_params"]["transfer_id"] == "xfer-1"


async def test_a_refused_request_leaves_no_transfer_behind() -> None:
    engine = ScriptedEngine(refusal=RequestError("no"))
    async with serve(engine) as served:
        status, _ = await served.post(COMPLETIONS, PREFILL)
        engine.refusal, engine.script = None, hands_over("x")
        again, _ = await served.post(COMPLETIONS, PREFILL)
    assert (status, again) == (400, 200)


async def withdrawn(served: Served) -> None:
    async with asyncio.timeout(10):
        await served.connector.withdrawals.wait()


async def test_closing_the_server_ends_streams_within_its_bound() -> None:
    async with serve(ScriptedEngine()) as served:
        asking = asyncio.create_task(
            served.client.post(COMPLETIONS, json={"prompt": "abc", "stream": True})
        )
        await served.engine.wait_requests()
        async with asyncio.timeout(10):
            await served.server.close()
        await served.engine.wait_aborted()
        with pytest.raises(aiohttp.ClientError):
            await asking
