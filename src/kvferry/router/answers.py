"""Answers that the router gives itself, in the shape of OpenAI's errors. Knows no policy."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from aiohttp import web

from kvferry.errors import RequestError

RETRY_AFTER_S = 1


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """An error for the client; ``retry_after_s`` becomes ``Retry-After``."""

    status: int
    message: str
    kind: str
    code: str
    param: str | None = None
    retry_after_s: int | None = None

    def encoded(self) -> bytes:
        """Return the JSON body."""
        return msgspec.json.encode(
            {
                "error": {
                    "message": self.message,
                    "type": self.kind,
                    "param": self.param,
                    "code": self.code,
                }
            }
        )

    def as_event(self) -> bytes:
        """Return one server-sent event that carries the same body."""
        return b"data: " + self.encoded() + b"\n\n"

    def as_response(self) -> web.Response:
        """Return the whole HTTP answer."""
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(self.retry_after_s)
        return web.Response(
            status=self.status,
            body=self.encoded(),
            content_type="application/json",
            headers=headers,
        )


def of_request_error(error: RequestError) -> ErrorAnswer:
    """Return the answer for a request that cannot be served as it is."""
    return ErrorAnswer(
        error.status,
        str(error),
        "invalid_request_error",
        error.code or "invalid_request",
        error.param,
    )


def body_too_large(max_body_bytes: int) -> ErrorAnswer:
    """Return the answer for a body above the limit."""
    return ErrorAnswer(
        413,
        f"the request body exceeds {max_body_bytes} bytes",
        "invalid_request_error",
        "request_too_large",
    )


def overloaded(max_inflight: int) -> ErrorAnswer:
    """Return the answer when as many requests as allowed are running."""
    return ErrorAnswer(
        429,
        f"the router already has {max_inflight} requests in flight; try again later",
        "overloaded_error",
        "overloaded",
        retry_after_s=RETRY_AFTER_S,
    )


def no_instance(role: str) -> ErrorAnswer:
    """Return the answer when no instance can take a leg of ``role``."""
    return ErrorAnswer(
        503,
        f"no healthy {role} instance; try again later",
        "service_unavailable_error",
        "no_instance",
        retry_after_s=RETRY_AFTER_S,
    )


def no_credit(waited_s: float) -> ErrorAnswer:
    """Return the answer when no decode instance took one more handoff in time."""
    return ErrorAnswer(
        503,
        f"no decode instance took another handoff within {waited_s:g} s; try again later",
        "service_unavailable_error",
        "no_credit",
        retry_after_s=RETRY_AFTER_S,
    )


def leg_failed(role: str, detail: str) -> ErrorAnswer:
    """Return the answer when the leg of ``role`` failed on every instance that was tried."""
    return ErrorAnswer(
        502, f"the {role} instance failed: {detail}", "upstream_error", f"{role}_failed"
    )


def timed_out(what: str, limit_s: float) -> ErrorAnswer:
    """Return the answer when ``what`` took more than ``limit_s`` seconds."""
    return ErrorAnswer(504, f"{what} took more than {limit_s:g} s", "timeout_error", "timeout")


def no_endpoint(method: str, path: str) -> ErrorAnswer:
    """Return the answer for a path or method that the router does not serve."""
    return ErrorAnswer(
        404, f"there is no endpoint {method} {path}", "invalid_request_error", "not_found"
    )


def shutting_down() -> ErrorAnswer:
    """Return the answer for a request that the end of the router's process cuts off."""
    return ErrorAnswer(
        503,
        "the router is shutting down",
        "service_unavailable_error",
        "shutting_down",
        retry_after_s=RETRY_AFTER_S,
    )
