"""What a request may ask for its conversation by header. Pure."""

from __future__ import annotations

import math

from kvferry.errors import RequestError
from kvferry.protocol.client_headers import READ_BACK_HEADER, RETENTION_HEADER
from kvferry.protocol.messages import MAX_DURATION_S
from kvferry.router.config import ReadBack


def wanted_read_back(header: str | None, configured: ReadBack) -> ReadBack:
    """Return what a request asks for by header, else what is configured.

    Raises ``RequestError`` for a value that is none.
    """
    if header is None:
        return configured
    try:
        return ReadBack(header.strip().lower())
    except ValueError as error:
        allowed = ", ".join(ReadBack)
        raise RequestError(
            f"{READ_BACK_HEADER} must be one of {allowed}",
            param=READ_BACK_HEADER,
            code="invalid_value",
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
