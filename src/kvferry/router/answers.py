"""Answers to clients: errors of the router's own, in OpenAI's shape, and engines' passed on.

Knows no policy, and not why a stream ends.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from kvferry.client.dialects import hide_transfer_params
from kvferry.errors import RequestError
from kvferry.protocol.error_answer import ErrorAnswer
from kvferry.router.headers import answer_headers
from kvferry.router.upstream import LegAnswer

RETRY_AFTER_S = 1
_END_TIMEOUT_S = 1.0


def of_request_error(error: RequestError) -> ErrorAnswer:
    """Return the answer for a request that cannot be served as it is."""
    return ErrorAnswer(
        error.status,
        str(error),
        "invalid_request_error",
        error.code or "invalid_request",
        error.param,
    )


def body_too_large(max_body_bytes: int) -> RequestError:
    """Return the error of a body above the limit."""
    message = f"the request body exceeds {max_body_bytes} bytes"
    return RequestError(message, code="request_too_large", status=413)


def overloaded(max_inflight: int) -> ErrorAnswer:
    """Return the answer when as many requests as allowed are running."""
    message = f"the router already has {max_inflight} requests in flight; try again later"
    return ErrorAnswer(429, message, "overloaded_error", "overloaded", retry_after_s=RETRY_AFTER_S)


def no_instance(role: str) -> ErrorAnswer:
    """Return the answer when no instance can take a leg of ``role``."""
    return _unavailable("no_instance", f"no healthy {role} instance; try again later")


def no_credit(waited_s: float) -> ErrorAnswer:
    """Return the answer when no decode instance took one more handoff in time."""
    message = f"no decode instance took another handoff within {waited_s:g} s; try again later"
    return _unavailable("no_credit", message)


def shutting_down() -> ErrorAnswer:
    """Return the answer for a request that the end of the router's process cuts off."""
    return _unavailable("shutting_down", "the router is shutting down")


def _unavailable(code: str, message: str) -> ErrorAnswer:
    kind = "service_unavailable_error"
    return ErrorAnswer(503, message, kind, code, retry_after_s=RETRY_AFTER_S)


def leg_failed(role: str, detail: str) -> ErrorAnswer:
    """Return the answer when the leg of ``role`` failed on every instance that was tried."""
    message = f"the {role} instance failed: {detail}"
    return ErrorAnswer(502, message, "upstream_error", f"{role}_failed")


def timed_out(what: str, limit_s: float) -> ErrorAnswer:
    """Return the answer when ``what`` took more than ``limit_s`` seconds."""
    return ErrorAnswer(504, f"{what} took more than {limit_s:g} s", "timeout_error", "timeout")


def no_endpoint(method: str, path: str) -> ErrorAnswer:
    """Return the answer for a path or method that the router does not serve."""
    message = f"there is no endpoint {method} {path}"
    return ErrorAnswer(404, message, "invalid_request_error", "not_found")


def passed_on(answer: LegAnswer, request_id: str) -> web.Response:
    """Return an engine's whole answer for the client, less its transfer parameters."""
    return web.Response(
        status=answer.status,
        body=hide_transfer_params(answer.body),
        headers=answer_headers(answer.headers, request_id),
    )


class ForwardedStream(web.StreamResponse):
    """A streamed answer whose headers travel with its first bytes, in one write.

    It is begun only when the first bytes are there, so nothing waits for this.
    """

    # A release that does not know it writes headers on their own; nothing else changes.
    _send_headers_immediately = False


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


def client_is_gone(request: web.BaseRequest) -> bool:
    """Whether the client's connection has ended."""
    transport = request.transport
    return transport is None or transport.is_closing()
