"""HTTP to the instances: one leg at a time, every failure mapped to ``LegFailedError``.

Only configured URLs are ever asked, and no redirect is followed. Knows no policy.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import io
from collections.abc import Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from kvferry.errors import PeerUnreachableError

# Shorter than the 5 s after which common servers close an idle connection, so that a leg is not
# sent into one that is just being closed.
_KEEP_ALIVE_S = 4.0
_LARGE_BODY_BYTES = 1024 * 1024
_MAX_ERROR_ANSWER_BYTES = 1024 * 1024
_NOBODY_THERE = frozenset(
    (
        errno.EHOSTUNREACH,
        errno.EHOSTDOWN,
        errno.ENETUNREACH,
        errno.ENETDOWN,
        errno.ETIMEDOUT,
        # A server that ends listens no more; it may keep connections open on which nothing comes.
        errno.ECONNREFUSED,
    )
)
_UNWATCHED: AbstractContextManager[object] = nullcontext()


class LegFailure(enum.StrEnum):
    """Why a leg failed."""

    UNREACHABLE = "unreachable"
    """No connection could be made; nothing was sent."""
    BROKEN = "broken"
    """The connection ended before the answer did."""
    TIMEOUT = "timeout"
    SILENT = "silent"
    """Nothing came any more, and the instance's probes went unanswered."""
    ABORTED = "aborted"
    """The instance ended the request itself, and called it an answer: it is being stopped."""
    ENGINE_ERROR = "engine_error"
    """The engine answered with a 5xx, or with something that no engine should."""
    OVERLOADED = "overloaded"
    """The engine answered 429: it is well, and full."""
    TOO_LARGE = "too_large"

    @property
    def doubts_instance(self) -> bool:
        """Whether the instance should be probed before it gets more."""
        return self in (
            LegFailure.UNREACHABLE,
            LegFailure.BROKEN,
            LegFailure.TIMEOUT,
            LegFailure.SILENT,
            LegFailure.ABORTED,
        )


@dataclass(frozen=True, slots=True)
class LegAnswer:
    """A whole answer of an engine, its body as it came."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class LegFailedError(PeerUnreachableError):
    """A leg failed; ``answer`` is what the engine said, where it said anything."""

    def __init__(self, cause: LegFailure, detail: str, answer: LegAnswer | None = None) -> None:
        super().__init__(detail)
        self.cause = cause
        self.answer = answer

    @property
    def is_unanswered(self) -> bool:
        """Whether nobody is there who has said anything: no answer, no reset of a connection."""
        error = self.__cause__
        if isinstance(error, aiohttp.ClientConnectorDNSError):
            return True  # A host that the network has lost may have lost its name, too.
        if isinstance(error, aiohttp.ClientConnectorError):
            # Without a number: several addresses were tried, and failed in different ways.
            return error.os_error.errno in (*_NOBODY_THERE, None)
        return isinstance(error, TimeoutError)


class Upstream:
    """The connections to all instances. To be made on the event loop, and closed."""

    def __init__(self, *, connect_timeout_s: float, max_answer_bytes: int) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept"),
        )
        self._max_answer_bytes = max_answer_bytes
        self._urls: dict[tuple[str, str], URL] = {}

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    def _url(self, base: str, path: str) -> URL:
        url = self._urls.get((base, path))
        if url is None:
            url = self._urls[base, path] = URL(base + path)
        return url

    async def post(
        self, base: str, path: str, body: bytes, headers: CIMultiDict[str]
    ) -> aiohttp.ClientResponse:
        """Send ``body`` and return the answer once its headers are there; close it when done.

        Unless it was read whole by then, that closes the connection, so that the instance notices.
        Raises ``LegFailedError``.
        """
        data = body if len(body) <= _LARGE_BODY_BYTES else io.BytesIO(body)
        try:
            return await self._session.post(
                self._url(base, path), data=data, headers=headers, allow_redirects=False
            )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _mapped(error) from error

    async def read_some(
        self, response: aiohttp.ClientResponse, wait: AbstractContextManager[object] = _UNWATCHED
    ) -> bytes:
        """Return the next bytes as they come, empty at the end; they are awaited within ``wait``.

        Raises ``LegFailedError``.
        """
        try:
            with wait:
                return await response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise _mapped(error) from error

    async def read_all(
        self, response: aiohttp.ClientResponse, wait: AbstractContextManager[object] = _UNWATCHED
    ) -> LegAnswer:
        """Return the whole answer; each part is awaited within ``wait``.

        Raises ``LegFailedError``, also for an answer beyond the limit.
        """
        is_error = response.status >= 400
        limit = _MAX_ERROR_ANSWER_BYTES if is_error else self._max_answer_bytes
        chunks: list[bytes] = []
        size = 0
        while chunk := await self.read_some(response, wait):
            size += len(chunk)
            if size > limit:
                raise LegFailedError(LegFailure.TOO_LARGE, f"its answer exceeds {limit} bytes")
            chunks.append(chunk)
        body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        return LegAnswer(response.status, response.headers, body)

    async def get(self, base: str, path: str, headers: CIMultiDict[str]) -> LegAnswer:
        """Return the whole answer to a GET. Raises ``LegFailedError``."""
        return await self._ask("GET", self._url(base, path), headers)

    async def delete(self, base: str, path: str, headers: CIMultiDict[str]) -> LegAnswer:
        """Return the whole answer to a DELETE. Raises ``LegFailedError``."""
        return await self._ask("DELETE", URL(base + path), headers)

    async def _ask(self, method: str, url: URL, headers: CIMultiDict[str]) -> LegAnswer:
        try:
            response = await self._session.request(
                method, url, headers=headers, allow_redirects=False
            )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _mapped(error) from error
        with closing(response):
            return await self.read_all(response)


def require_well(answer: LegAnswer) -> LegAnswer:
    """Return ``answer`` if it is a success or the client's own fault.

    Raises ``LegFailedError`` when another instance may do better.
    """
    if answer.status == 429:
        raise LegFailedError(LegFailure.OVERLOADED, "it answered 429", answer)
    if 200 <= answer.status < 300 or 400 <= answer.status < 500:
        return answer
    shown = answer if answer.status >= 500 else None
    raise LegFailedError(LegFailure.ENGINE_ERROR, f"it answered {answer.status}", shown)


def _mapped(error: Exception) -> LegFailedError:
    """The one table of foreign errors: what aiohttp and the socket raise, as causes."""
    # A timeout of the whole leg is raised by whoever set it; what arrives here is connecting.
    if isinstance(error, aiohttp.ClientConnectorError | TimeoutError | asyncio.TimeoutError):
        return LegFailedError(LegFailure.UNREACHABLE, str(error) or "connecting took too long")
    if isinstance(error, aiohttp.ClientPayloadError | aiohttp.ServerDisconnectedError):
        # Their own words are of chunks and encodings, and this ends up before clients.
        return LegFailedError(LegFailure.BROKEN, "its connection ended before its answer did")
    return LegFailedError(LegFailure.BROKEN, str(error) or type(error).__name__)
