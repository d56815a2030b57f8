"""A client that streams one answer and keeps the time of every event.

Knows OpenAI's streaming format and the two extensions ``return_token_ids`` and ``kv_report``.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import aiohttp
import msgspec

from kvferry.client.http_client import HttpClient
from kvferry.client.sse import END, EventReader, data_of
from kvferry.clock import Clock
from kvferry.errors import MeasurementError, PeerUnreachableError
from kvferry.protocol.headers import MODE_HEADER
from kvferry.protocol.kv_report import KvReport
from kvferry.protocol.params import REPORT_FIELD

_MAX_ERROR_CHARS = 500
_MAX_ANSWER_S = 300.0
"""Of an answer that is not streamed."""
_NO_HEADERS: Mapping[str, str] = {}


class SeenReport(KvReport, kw_only=True):
    """An instance's report, or what a client alone can tell in its place."""

    samples_first_token: bool = False
    """Whether decode takes a step of its own for the first token; the client knows, no instance."""


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None
    kv_report: SeenReport | None = None


class _Error(msgspec.Struct, frozen=True):
    message: str = ""


class _PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...] = ()
    error: _Error | None = None
    kv_report: SeenReport | None = None
    usage: _Usage | None = None
    kv_transfer_params: dict[str, object] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedAnswer:
    """One answer of one choice. Times are seconds of the client's monotonic clock."""

    sent_s: float
    first_byte_s: float
    token_ids: tuple[int, ...]
    token_times_s: tuple[float, ...]
    """When the event that brought each token arrived; as long as ``token_ids``."""
    text: str
    finish_reason: str
    ended_s: float
    report: SeenReport | None
    num_usage_cached_tokens: int | None = None
    """``cached_tokens`` of the usage, where one came."""
    transfer_params: dict[str, object] | None = None
    """``kv_transfer_params``, where the stream brought any."""

    @property
    def ttft_s(self) -> float:
        """From sending the request to the event that brought the first token."""
        return self.token_times_s[0] - self.sent_s

    @property
    def second_gap_s(self) -> float:
        """From the first token to the second."""
        return self.token_times_s[1] - self.token_times_s[0]

    def gaps_s(self) -> list[float]:
        """Return the gaps between tokens from the second token on: plain decode steps."""
        times_s = self.token_times_s[1:]
        return [late - early for early, late in itertools.pairwise(times_s)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedAnswer:
    """One unstreamed answer. Times are seconds of the client's monotonic clock."""

    sent_s: float
    answered_s: float
    """When all of it was there."""
    content: bytes
    """Its body, as it came."""


class _Collector:
    """Puts an answer together from its events."""

    def __init__(self, url: str, on_token: Callable[[float], None]) -> None:
        self._url = url
        self._on_token = on_token
        self.token_ids: list[int] = []
        self.times_s: list[float] = []
        self.texts: list[str] = []
        self.finish_reason = ""
        self.report: SeenReport | None = None
        self.num_usage_cached_tokens: int | None = None
        self.transfer_params: dict[str, object] | None = None

    def add(self, data: bytes, now_s: float) -> None:
        try:
            chunk = msgspec.json.decode(data, type=_Chunk)
        except msgspec.MsgspecError as error:
            raise MeasurementError(f"{self._url} sent a malformed event: {error}") from error
        if chunk.error is not None:
            raise MeasurementError(f"{self._url} ended with an error: {chunk.error.message}")
        self.report = chunk.kv_report or self.report
        self.transfer_params = chunk.kv_transfer_params or self.transfer_params
        if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
            self.num_usage_cached_tokens = chunk.usage.prompt_tokens_details.cached_tokens
        for choice in chunk.choices:
            self._add_choice(choice, now_s)

    def _add_choice(self, choice: _Choice, now_s: float) -> None:
        for token_id in choice.token_ids or ():
            self.token_ids.append(token_id)
            self.times_s.append(now_s)
            self._on_token(now_s)
        self.texts.append(choice.text or (choice.delta.content if choice.delta else None) or "")
        self.finish_reason = choice.finish_reason or self.finish_reason
        self.report = choice.kv_report or self.report

    def answer(self, sent_s: float, first_byte_s: float, ended_s: float) -> StreamedAnswer:
        return StreamedAnswer(
            sent_s=sent_s,
            first_byte_s=first_byte_s,
            token_ids=tuple(self.token_ids),
            token_times_s=tuple(self.times_s),
            text="".join(self.texts),
            finish_reason=self.finish_reason,
            ended_s=ended_s,
            report=self.report,
            num_usage_cached_tokens=self.num_usage_cached_tokens,
            transfer_params=self.transfer_params,
        )


class Asker(Protocol):
    """Gets answers from a deployment, however its instances are reached."""

    async def stream(
        self,
        url: str,
        body: Mapping[str, object],
        *,
        mode: str | None = None,
        headers: Mapping[str, str] = _NO_HEADERS,
        on_token: Callable[[float], None] = lambda now_s: None,
    ) -> StreamedAnswer:
        """See ``CompletionClient``."""
        ...

    async def post_nothing(self, url: str) -> None:
        """See ``CompletionClient``."""
        ...


class CompletionClient:
    """Sends requests over one session. ``clock`` must be the host's monotonic clock."""

    def __init__(self, session: aiohttp.ClientSession, clock: Clock) -> None:
        self._session = session
        self._http = HttpClient(session, _MAX_ANSWER_S)
        self._clock = clock

    async def stream(
        self,
        url: str,
        body: Mapping[str, object],
        *,
        mode: str | None = None,
        headers: Mapping[str, str] = _NO_HEADERS,
        on_token: Callable[[float], None] = lambda now_s: None,
    ) -> StreamedAnswer:
        """POST ``body`` to ``url`` and return the streamed answer, token ids and report included.

        ``mode`` is asked of a router, by a header beside ``headers``; ``on_token`` hears the time
        of each token as it comes. Raises ``MeasurementError`` if the answer is an error, is
        malformed, ends early or has no token ids.
        """
        payload = {**body, "stream": True, "return_token_ids": True, REPORT_FIELD: True}
        encoded, sent = msgspec.json.encode(payload), _headers(mode, headers)
        collector = _Collector(url, on_token)
        first_byte_s: float | None = None
        is_complete = False
        sent_s = self._clock.monotonic_s()
        try:
            async with self._session.post(url, data=encoded, headers=sent) as response:
                await _require_success(url, response)
                async for data, now_s in self._events(response):
                    first_byte_s = first_byte_s or now_s
                    is_complete = data == END
                    if is_complete:
                        break
                    collector.add(data, now_s)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise MeasurementError(f"{url}: {error or type(error).__name__}") from error
        if first_byte_s is None or not is_complete or not collector.token_ids:
            raise MeasurementError(
                f"{url}: the stream ended after {len(collector.token_ids)} tokens"
                + ("" if is_complete else " without its end mark")
            )
        return collector.answer(sent_s, first_byte_s, self._clock.monotonic_s())

    async def complete(
        self,
        url: str,
        body: Mapping[str, object],
        *,
        headers: Mapping[str, str] = _NO_HEADERS,
    ) -> TimedAnswer:
        """POST ``body`` to ``url`` and return the unstreamed answer.

        Raises ``MeasurementError`` if it is no 200.
        """
        encoded = msgspec.json.encode(body)
        sent_s = self._clock.monotonic_s()
        content = await self._whole(url, "POST", encoded, headers)
        answered_s = self._clock.monotonic_s()
        return TimedAnswer(sent_s=sent_s, answered_s=answered_s, content=content)

    async def text(self, url: str) -> str:
        """GET ``url`` and return its text. Raises ``MeasurementError`` if the answer is no 200."""
        return (await self._whole(url, "GET")).decode(errors="replace")

    async def post_nothing(self, url: str) -> None:
        """POST an empty body to ``url``. Raises ``MeasurementError`` if the answer is no 200."""
        await self._whole(url, "POST")

    async def _whole(
        self,
        url: str,
        method: str,
        body: bytes | None = None,
        headers: Mapping[str, str] = _NO_HEADERS,
    ) -> bytes:
        try:
            reply = await self._http.ask(url, method=method, body=body, headers=headers)
        except PeerUnreachableError as error:
            raise MeasurementError(f"{url}: {error}") from error
        if reply.status != 200:
            raise MeasurementError(f"{url} answered {reply.status}: {reply.text}")
        return reply.body

    async def _events(self, response: aiohttp.ClientResponse) -> AsyncIterator[tuple[bytes, float]]:
        """Yield the data of each server-sent event and the time at which it was complete."""
        reader = EventReader()
        async for piece in response.content.iter_any():
            now_s = self._clock.monotonic_s()
            for event in reader.feed(piece):
                if data := data_of(event):
                    yield data, now_s


def _headers(mode: str | None, further: Mapping[str, str]) -> dict[str, str]:
    headers = {"Content-Type": "application/json", **further}
    return headers if mode is None else {**headers, MODE_HEADER: mode}


async def _require_success(url: str, response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        text = await response.text(errors="replace")
        raise MeasurementError(f"{url} answered {response.status}: {text[:_MAX_ERROR_CHARS]}")
