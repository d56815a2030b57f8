"""Errors as HTTP answers, in OpenAI's form ``{"error": {message, type, param, code}}``.

Owns the mapping from the exception tree to statuses; every answer of 400 and above is made here.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from kvferry.errors import EngineError, FerryError, RequestError
from kvferry.observe.log import get_logger

_log = get_logger(__name__)


class ShuttingDownError(EngineError):
    """The engine gave the request up because this process ends."""


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """One error for the client."""

    status: int
    message: str
    kind: str
    code: str | None = None
    param: str | None = None

    def encoded(self) -> bytes:
        """Return the JSON body."""
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})

    def as_response(self) -> web.Response:
        """Return the whole HTTP answer."""
        headers = {"Retry-After": "1"} if self.status == 503 else None
        return web.Response(
            status=self.status,
            body=self.encoded(),
            content_type="application/json",
            headers=headers,
        )


def answer_for(error: Exception) -> ErrorAnswer:
    """Return what the client is told about ``error``; unexpected ones are not shown in detail."""
    match error:
        case RequestError():
            return ErrorAnswer(
                error.status, str(error), "invalid_request_error", error.code, error.param
            )
        case ShuttingDownError():
            return ErrorAnswer(503, str(error), "service_unavailable_error", "shutting_down")
        case FerryError():
            return ErrorAnswer(500, str(error), "server_error", "engine_error")
        case web.HTTPException():
            return _answer_for_http(error)
        case _:
            return ErrorAnswer(500, "internal error; see the server's log", "server_error")


def _answer_for_http(error: web.HTTPException) -> ErrorAnswer:
    match error:
        case web.HTTPRequestEntityTooLarge():
            return ErrorAnswer(
                413,
                f"the request body is too large: {error.text}",
                "invalid_request_error",
                "request_too_large",
            )
        case web.HTTPNotFound():
            message = "there is no such endpoint here"
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            message = f"this endpoint does not take {error.method}; it takes {allowed}"
        case _:
            message = error.reason
    return ErrorAnswer(error.status, message, "invalid_request_error")


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every exception of a handler in OpenAI's form."""
    try:
        return await handler(request)
    except (RequestError, web.HTTPException) as error:
        return answer_for(error).as_response()
    except FerryError as error:
        _log.error("request failed", extra={"fields": {"path": request.path, "error": error}})
        return answer_for(error).as_response()
    except ConnectionError:  # the client left while it was being answered
        raise
    except Exception as error:  # noqa: BLE001 - the border to HTTP: logged, and answered as 500
        _log.exception("unexpected error", extra={"fields": {"path": request.path}})
        return answer_for(error).as_response()
