"""Passes an instance's stream on to the client, bytes as they come, and ends it properly.

Parses nothing but a first event for an error. Knows neither where the bytes come from nor why a
stream ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web

from kvferry.router.answers import ErrorAnswer

EVENT_STREAM = "text/event-stream"
_END_TIMEOUT_S = 1.0


class _FirstEvent(msgspec.Struct):
    error: dict[str, Any] | None = None


_event_decoder = msgspec.json.Decoder(_FirstEvent)


class ForwardedStream(web.StreamResponse):
    """A streamed answer whose headers travel with its first bytes, in one write.

    It is begun only when the first bytes are there, so nothing waits for this.
    """

    # A release that does not know it writes headers on their own; nothing else changes.
    _send_headers_immediately = False


def is_event_stream(headers: Mapping[str, str]) -> bool:
    """Whether an answer with these headers is a stream of server-sent events."""
    content_type: str = headers.get("Content-Type", "")
    return content_type.partition(";")[0].strip().lower() == EVENT_STREAM


def error_event_in(first: bytes) -> bytes | None:
    """Return the error that a stream begins with, as JSON; None where it begins well.

    ``first``: its first bytes. vLLM has answered 200 before it knows that a request fails.
    """
    event = first.partition(b"\n\n")[0].removeprefix(b"data:").strip()
    if not event.startswith(b"{") or b'"error"' not in event:
        return None
    try:
        return event if _event_decoder.decode(event).error is not None else None
    except (msgspec.DecodeError, RecursionError):
        return None


def client_is_gone(request: web.BaseRequest) -> bool:
    """Whether the client's connection has ended."""
    transport = request.transport
    return transport is None or transport.is_closing()


async def forward_stream(
    first: bytes, read_some: Callable[[], Awaitable[bytes]], stream: web.StreamResponse
) -> None:
    """Write ``first``, then all that ``read_some`` gives until it gives nothing.

    Waits while the client reads slowly. Raises what ``read_some`` raises, and
    ``ConnectionResetError`` when the client is gone.
    """
    chunk = first
    while chunk:
        await stream.write(chunk)
        chunk = await read_some()
    await stream.write_eof()


async def end_stream_with_error(
    request: web.BaseRequest, stream: web.StreamResponse, error: ErrorAnswer
) -> None:
    """End a stream that has begun with an event that says what went wrong.

    A client that does not take it within a second, or had stopped reading before, is cut off.
    """
    transport = request.transport
    if transport is None:
        return
    if transport.get_write_buffer_size() > transport.get_write_buffer_limits()[0]:
        transport.abort()
        return
    try:
        async with asyncio.timeout(_END_TIMEOUT_S):
            # The blank line ends an event of which only a part has come.
            await stream.write(b"\n\n" + error.as_event())
            await stream.write_eof()
    except (TimeoutError, ConnectionError):
        transport.abort()
