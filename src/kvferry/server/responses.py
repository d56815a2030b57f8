"""What goes out over HTTP beside an answer's own shape: errors, JSON and event streams.

Owns the mapping from the exception tree to statuses: every answer of 400 and above is made here.
Knows bytes, not what an answer says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from kvferry.errors import FerryError, RequestError
from kvferry.observe.log import get_logger
from kvferry.protocol.error_answer import ErrorAnswer
from kvferry.server.generation import ShuttingDownError

_log = get_logger(__name__)
_DONE_EVENT = b"data: [DONE]\n\n"
_RETRY_AFTER_S = 1
_STALL_LIMIT_S = 300.0
"""How long a client may keep its end of a full connection unread."""
_STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
_encoder = msgspec.json.Encoder()


def answer_for(error: Exception) -> ErrorAnswer:
    """Return what the client is told about ``error``; unexpected ones are not shown in detail."""
    match error:
        case RequestError():
            return ErrorAnswer(
                error.status, str(error), "invalid_request_error", error.code, error.param
            )
        case ShuttingDownError():
            kind = "service_unavailable_error"
            return ErrorAnswer(503, str(error), kind, "shutting_down", retry_after_s=_RETRY_AFTER_S)
        case FerryError():
            return ErrorAnswer(500, str(error), "server_error", "engine_error")
        case web.HTTPException():
            return _answer_for_http(error)
        case _:
            return ErrorAnswer(500, "internal error; see the server's log", "server_error")


def _answer_for_http(error: web.HTTPException) -> ErrorAnswer:
    code = None
    match error:
        case web.HTTPRequestEntityTooLarge():
            message, code = f"the request body is too large: {error.text}", "request_too_large"
        case web.HTTPNotFound():
            message = "there is no such endpoint here"
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            message = f"this endpoint does not take {error.method}; it takes {allowed}"
        case _:
            message = error.reason
    return ErrorAnswer(error.status, message, "invalid_request_error", code)


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every exception of a handler in OpenAI's form."""
    try:
        return await handler(request)
    except ConnectionError:  # the client left while it was being answered
        raise
    except Exception as error:  # noqa: BLE001 - the border to HTTP: told to the client, or logged
        fields = {"path": request.path, "error": error}
        match error:
            case RequestError() | web.HTTPException():
                pass
            case FerryError():
                _log.error("request failed", extra={"fields": fields})
            case _:
                _log.exception("unexpected error", extra={"fields": {"path": request.path}})
        return answer_for(error).as_response()


def json_response(payload: Mapping[str, object]) -> web.Response:
    """Return ``payload`` as an answer of status 200."""
    return web.Response(body=_encoder.encode(payload), content_type="application/json")


def event(payload: Mapping[str, object]) -> bytes:
    """Return one event with ``payload`` as JSON; JSON has no raw line ends, so one line does."""
    return b"data: " + _encoder.encode(payload) + b"\n\n"


class EventStream:
    """A streamed answer of server-sent events. The status line goes out with the first events."""

    def __init__(self, request: web.Request, *, stall_limit_s: float = _STALL_LIMIT_S) -> None:
        self._request = request
        self._stall_limit_s = stall_limit_s
        self.response = web.StreamResponse(headers=_STREAM_HEADERS)
        """For the handler to return."""

    @property
    def is_begun(self) -> bool:
        """Whether the status line has gone out, so that errors must be events."""
        return self.response.prepared

    async def send(self, events: Iterable[bytes]) -> None:
        """Write ``events`` at once, as one piece.

        Raises ``ConnectionError`` if the client left, or has read nothing for the stall limit.
        """
        data = b"".join(events)
        if not data:
            return
        if not self.response.prepared:
            await self.response.prepare(self._request)
        try:
            async with asyncio.timeout(self._stall_limit_s):
                await self.response.write(data)
        except TimeoutError as error:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError(
                f"the client has read nothing for {self._stall_limit_s} s"
            ) from error

    async def end(self, note: bytes = b"") -> None:
        """Write ``note``, a comment, with the last event, and end the response."""
        await self.send([note, _DONE_EVENT])
        await self.response.write_eof()
