"""Which HTTP headers pass through the router, and what a client asks by kvferry's own. Pure."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from typing import TypeVar

from multidict import CIMultiDict

from kvferry.errors import RequestError
from kvferry.protocol.headers import (
    MODE_HEADER,
    READ_BACK_HEADER,
    REQUEST_ID_HEADER,
    RETENTION_HEADER,
)
from kvferry.protocol.messages import MAX_DURATION_S
from kvferry.router.config import ReadBack, RouteMode

MAX_REQUEST_ID_CHARS = 256
_Kind = TypeVar("_Kind", bound=enum.StrEnum)

_HOP_BY_HOP = frozenset(
    (
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
# Set anew for each leg, or true only of the client's own connection.
_PER_LEG = frozenset(
    (
        "accept-encoding",
        "content-encoding",
        "content-length",
        "content-type",
        "expect",
        "host",
        "x-request-id",
    )
)
# Headers by which other routers steer engines; a client must not.
_ROUTING_PREFIXES = ("x-kvferry-", "x-prefiller-", "x-decoder-", "x-encoder-", "x-kv-cache-source-")
_ROUTING_NAMES = frozenset(("x-data-parallel-rank", "x-data-parallel-host-port"))
_NEVER_REQUEST = _HOP_BY_HOP | _PER_LEG | _ROUTING_NAMES
# The router's own connection makes its own of these.
_NEVER_ANSWER = _HOP_BY_HOP | frozenset(("content-length", "date", "server", "x-request-id"))


def _named_in_connection(headers: Mapping[str, str]) -> Iterable[str]:
    value = headers.get("Connection")
    return () if value is None else (name.strip().lower() for name in value.split(","))


def request_headers(client_headers: Mapping[str, str], request_id: str) -> CIMultiDict[str]:
    """Return the headers of a leg: the client's own, less those that end here."""
    never = _NEVER_REQUEST.union(_named_in_connection(client_headers))
    headers: CIMultiDict[str] = CIMultiDict()
    for name, value in client_headers.items():
        lowered = name.lower()
        if lowered not in never and not lowered.startswith(_ROUTING_PREFIXES):
            headers.add(name, value)
    headers["Content-Type"] = "application/json"
    headers["Accept-Encoding"] = "identity"
    headers[REQUEST_ID_HEADER] = request_id
    return headers


def answer_headers(engine_headers: Mapping[str, str], request_id: str) -> CIMultiDict[str]:
    """Return the headers of the client's answer: the engine's, less those that end here."""
    never = _NEVER_ANSWER.union(_named_in_connection(engine_headers))
    headers: CIMultiDict[str] = CIMultiDict()
    for name, value in engine_headers.items():
        lowered = name.lower()
        if lowered not in never and not lowered.startswith(_ROUTING_PREFIXES):
            headers.add(name, value)
    headers[REQUEST_ID_HEADER] = request_id
    return headers


def acceptable_request_id(value: str) -> bool:
    """Whether a client's request id is used: not empty, not long, printable ASCII."""
    return 0 < len(value) <= MAX_REQUEST_ID_CHARS and value.isascii() and value.isprintable()


def wanted_mode(header: str | None, configured: RouteMode) -> RouteMode:
    """Return the mode that a request asks for by header, else the configured one.

    Raises ``RequestError`` for a value that is none.
    """
    return configured if header is None else _one_of(RouteMode, MODE_HEADER, header)


def wanted_read_back(header: str | None, configured: ReadBack) -> ReadBack:
    """Return what a request asks for by header, else what is configured.

    Raises ``RequestError`` for a value that is none.
    """
    return configured if header is None else _one_of(ReadBack, READ_BACK_HEADER, header)


def _one_of(kind: type[_Kind], name: str, header: str) -> _Kind:
    try:
        return kind(header.strip().lower())
    except ValueError as error:
        allowed = ", ".join(kind)
        raise RequestError(
            f"{name} must be one of {allowed}", param=name, code="invalid_value"
        ) from error


def wanted_retention_s(header: str | None) -> float | None:
    """Return for how many seconds a request asks to be retained, None where it does not say.

    0 ends the conversation. Raises ``RequestError`` for anything but 0 to ``MAX_DURATION_S``.
    """
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= MAX_DURATION_S:
        raise RequestError(
            f"{RETENTION_HEADER} must be 0 to {MAX_DURATION_S:g} (seconds)",
            param=RETENTION_HEADER,
            code="invalid_value",
        )
    return seconds
