"""Server-sent events over one HTTP response. Knows bytes, not what they say."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

import msgspec
from aiohttp import web

DONE_EVENT = b"data: [DONE]\n\n"
STALL_LIMIT_S = 300.0
"""How long a client may keep its end of a full connection unread."""
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}

_encoder = msgspec.json.Encoder()


def event(payload: Mapping[str, object]) -> bytes:
    """Return one event with ``payload`` as JSON; JSON has no raw line ends, so one line does."""
    return b"data: " + _encoder.encode(payload) + b"\n\n"


class EventStream:
    """A streamed answer. The status line goes out with the first events."""

    def __init__(self, request: web.Request, *, stall_limit_s: float = STALL_LIMIT_S) -> None:
        self._request = request
        self._stall_limit_s = stall_limit_s
        self._response = web.StreamResponse(headers=_HEADERS)

    @property
    def response(self) -> web.StreamResponse:
        """The response, for the handler to return."""
        return self._response

    @property
    def is_begun(self) -> bool:
        """Whether the status line has gone out, so that errors must be events."""
        return self._response.prepared

    async def send(self, events: Iterable[bytes]) -> None:
        """Write ``events`` at once, as one piece.

        Raises ``ConnectionError`` if the client left, or has read nothing for ``STALL_LIMIT_S``.
        """
        data = b"".join(events)
        if not data:
            return
        if not self._response.prepared:
            await self._response.prepare(self._request)
        try:
            async with asyncio.timeout(self._stall_limit_s):
                await self._response.write(data)
        except TimeoutError as error:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError(
                f"the client has read nothing for {self._stall_limit_s} s"
            ) from error

    async def end(self, note: bytes = b"") -> None:
        """Write ``note``, a comment, with the last event, and end the response."""
        await self.send([note, DONE_EVENT])
        await self._response.write_eof()
