"""A bounded question over HTTP: its whole answer, or an error in plain words."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

import aiohttp

from kvferry.errors import PeerUnreachableError

MAX_ANSWER_BYTES = 16 * 1024 * 1024
_MAX_SHOWN_CHARS = 200
_HALF_SECOND_S = 0.5
_NO_HEADERS: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One whole answer."""

    status: int
    body: bytes
    elapsed_s: float
    clock_ahead_s: float | None
    """The server's wall clock less ours, by its Date; None where it sent none."""

    @property
    def text(self) -> str:
        """The beginning of the body, for people."""
        return self.body[:_MAX_SHOWN_CHARS].decode(errors="replace").strip()


class HttpClient:
    """Asks over one session; each question takes ``timeout_s`` at most."""

    def __init__(self, session: aiohttp.ClientSession, timeout_s: float) -> None:
        self._session = session
        self.timeout_s = timeout_s

    async def ask(
        self,
        url: str,
        *,
        method: str = "GET",
        body: bytes | None = None,
        headers: Mapping[str, str] = _NO_HEADERS,
        timeout_s: float | None = None,
    ) -> Reply:
        """Return the answer, whatever its status. Raises ``PeerUnreachableError``.

        ``body`` is JSON. ``timeout_s`` is another bound than usual.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        sent = headers if body is None else {"Content-Type": "application/json", **headers}
        asked = self._session.request(
            method,
            url,
            data=body,
            headers=sent,
            timeout=aiohttp.ClientTimeout(total=limit_s),
            allow_redirects=False,
        )
        started_s, started_wall_s = time.monotonic(), time.time()
        try:
            async with asked as response:
                content = await _bounded(response)
                elapsed_s = time.monotonic() - started_s
                return Reply(
                    status=response.status,
                    body=content,
                    elapsed_s=elapsed_s,
                    clock_ahead_s=_clock_ahead_s(response, started_wall_s + elapsed_s / 2),
                )
        except TimeoutError as error:
            raise PeerUnreachableError(f"no answer within {limit_s:g} s") from error
        except aiohttp.InvalidURL as error:
            raise PeerUnreachableError("this is no URL") from error
        except aiohttp.ClientConnectorError as error:
            raise PeerUnreachableError(f"no connection: {_reason(error)}") from error
        except aiohttp.ClientError as error:
            raise PeerUnreachableError(f"{type(error).__name__}: {error}") from error


def _reason(error: aiohttp.ClientConnectorError) -> str:
    number = error.os_error.errno
    # Of a name that is not known the number is not one of the system's.
    is_name = isinstance(error, aiohttp.ClientConnectorDNSError)
    return str(error.os_error) if is_name or number is None else os.strerror(number)


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    """Return the body. Raises ``PeerUnreachableError`` if it is larger than any we ask for."""
    content = bytearray()
    async for piece in response.content.iter_any():
        content += piece
        if len(content) > MAX_ANSWER_BYTES:
            raise PeerUnreachableError(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
    return bytes(content)


def _clock_ahead_s(response: aiohttp.ClientResponse, at_s: float) -> float | None:
    """Return the server's clock less ours at our wall time ``at_s``; Date has whole seconds."""
    try:
        told_s = parsedate_to_datetime(response.headers.get("Date", "")).timestamp()
    except ValueError:
        return None
    return told_s + _HALF_SECOND_S - at_s
