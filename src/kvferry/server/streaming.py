"""Server-sent events over one HTTP response. Knows bytes, not what they say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
from aiohttp import web

DONE_EVENT = b"data: [DONE]\n\n"
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

    def __init__(self, request: web.Request) -> None:
        self._request = request
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
        """Write ``events`` at once, as one piece. Raises ``ConnectionError`` if the client left."""
        data = b"".join(events)
        if not data:
            return
        if not self._response.prepared:
            await self._response.prepare(self._request)
        await self._response.write(data)

    async def end(self) -> None:
        """Write the last event and end the response."""
        await self.send([DONE_EVENT])
        await self._response.write_eof()
