"""Sends the two legs of each request to two vLLM instances and keeps the times of both.

Looks like a client of a router: what a router would be told by headers is obeyed here. Whether
blocks were moved is read from decode's metrics, outside the measured time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec

from kvferry.bench.client import CompletionClient, SeenReport, StreamedAnswer, TimedAnswer
from kvferry.bench.turns import SESSION_HEADER
from kvferry.client.dialects import Json, Peer, dialect_of
from kvferry.client.engine_kinds import EngineKind
from kvferry.client.metrics_text import metric_total
from kvferry.client.nixl_history import NixlHistory
from kvferry.errors import MeasurementError
from kvferry.protocol.headers import READ_BACK_HEADER, REQUEST_ID_HEADER
from kvferry.protocol.ids import TransferId
from kvferry.protocol.params import TRANSFER_FIELD, Mode, OnFailure, PeerAddress
from kvferry.protocol.prefill_result import PrefillReport

_HITS = "vllm:external_prefix_cache_hits_total"
_COMPLETIONS = "/v1/completions"
_SMALL_PROMPT_TOKENS = 200
_NO_HEADERS: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class LegsTargets:
    """Two instances, by base URLs without a trailing slash."""

    engine: EngineKind
    prefill_url: str
    decode_url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LegsAnswer:
    """Both legs of one request. Times are seconds of the client's monotonic clock."""

    prefill_sent_s: float
    prefill_answered_s: float
    decode: StreamedAnswer
    """Sent when the first of both legs was."""
    prefill_report: PrefillReport | None
    num_moved_tokens: int
    """What decode had from outside, by its metrics."""

    @property
    def prefill_s(self) -> float:
        """From sending prefill's leg to its answer."""
        return self.prefill_answered_s - self.prefill_sent_s

    @property
    def after_prefill_s(self) -> float:
        """From prefill's answer to the first token of decode's."""
        return self.decode.token_times_s[0] - self.prefill_answered_s


@dataclass(frozen=True, slots=True)
class _Leg:
    """What both legs of one request have in common."""

    body: Mapping[str, object]
    path: str
    transfer_id: TransferId

    @classmethod
    def fresh(cls, body: Mapping[str, object], path: str) -> _Leg:
        return cls(body, path, TransferId(f"bench-{secrets.token_hex(8)}"))

    @property
    def headers(self) -> dict[str, str]:
        """vLLM's own push matches both legs by this id."""
        return {REQUEST_ID_HEADER: self.transfer_id}


class LegsClient:
    """Asks a prefill and a decode instance. One request at a time, or figures mix."""

    def __init__(self, client: CompletionClient, targets: LegsTargets) -> None:
        self._client = client
        self._targets = targets
        self._dialect = dialect_of(targets.engine)
        self._prefill_peer: Peer | None = None
        self._decode_peer: PeerAddress | None = None
        self._answered: set[str] = set()

    async def ask(
        self,
        body: Mapping[str, object],
        mode: str,
        *,
        history: PeerAddress | NixlHistory | None = None,
        path: str = _COMPLETIONS,
    ) -> LegsAnswer:
        """Return both legs' answers to ``body``, which is sent to decode streamed.

        ``history`` is, for FerryConnector, who holds the conversation; for NixlConnector what came
        with its answer. Raises ``MeasurementError``.
        """
        if mode == "push" and self._prefill_peer is None:
            await self.learn_peers()
        hits_before = await self._num_hits()
        leg = _Leg.fresh(body, path)
        if mode == "push":
            first, decode = await self._both(leg, mode, history)
        else:
            first = await self._prefill(self._targets.prefill_url, leg, mode, history)
            offered = self._offered_by(first)
            decode = await self._decode(self._targets.decode_url, leg, offered)
        return LegsAnswer(
            prefill_sent_s=first.sent_s,
            prefill_answered_s=first.answered_s,
            decode=dataclasses.replace(decode, sent_s=min(first.sent_s, decode.sent_s)),
            prefill_report=_prefill_report_in(self._dialect.offered_params(first.content)),
            num_moved_tokens=round(await self._num_hits() - hits_before),
        )

    async def ask_decode_alone(self, body: Mapping[str, object]) -> StreamedAnswer:
        """Return decode's streamed answer to a request that prefill never sees."""
        return await self._client.stream(f"{self._targets.decode_url}{_COMPLETIONS}", body)

    async def decode_peer(self) -> PeerAddress | None:
        """Return the decode instance as holder of a conversation; None where it can be none."""
        if self._prefill_peer is None:
            await self.learn_peers()
        return self._decode_peer

    async def learn_peers(self) -> None:
        """Find out by whole requests who prefill is and, where it can be a peer, who decode is."""
        prefill_url, decode_url = self._targets.prefill_url, self._targets.decode_url
        self._prefill_peer = await self._peer(prefill_url, decode_url)
        if self._targets.engine is EngineKind.VLLM:
            peer = await self._peer(decode_url, prefill_url)
            self._decode_peer = peer if isinstance(peer, PeerAddress) else None

    async def stream(
        self,
        url: str,
        body: Mapping[str, object],
        *,
        mode: str | None = None,
        headers: Mapping[str, str] = _NO_HEADERS,
        on_token: Callable[[float], None] = lambda now_s: None,
    ) -> StreamedAnswer:
        """Answer as ``CompletionClient.stream`` does behind a router; see there.

        Without ``mode`` the instance at ``url`` alone is asked. The report has what can be seen
        from outside: prefill's end is its answer, and so is the first token of a lone instance.
        """
        if mode is None:
            answer = await self._client.stream(url, body, headers=headers, on_token=on_token)
            report = SeenReport(prefill_end_s=answer.token_times_s[0])
            return dataclasses.replace(answer, report=report)
        legs = await self.ask(
            body, mode, history=await self._hint(headers), path=urlsplit(url).path
        )
        prompt = body.get("prompt")
        report = SeenReport(
            prefill_end_s=min(legs.prefill_answered_s, legs.decode.token_times_s[0]),
            num_prompt_tokens=len(prompt) if isinstance(prompt, list) else 0,
            num_received_tokens=legs.num_moved_tokens,
            mode=mode,
            prefill=legs.prefill_report,
            samples_first_token=True,
        )
        return dataclasses.replace(legs.decode, report=report)

    async def post_nothing(self, url: str) -> None:
        """As ``CompletionClient.post_nothing``."""
        await self._client.post_nothing(url)

    async def _hint(self, headers: Mapping[str, str]) -> PeerAddress | None:
        """Return who holds the conversation, as a router would remember."""
        session = headers.get(SESSION_HEADER)
        if session is None or session not in self._answered:
            self._answered |= set() if session is None else {session}
            return None
        return await self.decode_peer() if headers.get(READ_BACK_HEADER) == "auto" else None

    async def _both(
        self, leg: _Leg, mode: str, history: PeerAddress | NixlHistory | None
    ) -> tuple[TimedAnswer, StreamedAnswer]:
        assert self._prefill_peer is not None
        params = self._dialect.push_params(leg.transfer_id, self._prefill_peer, OnFailure.RECOMPUTE)
        decode = asyncio.ensure_future(self._decode(self._targets.decode_url, leg, params))
        try:
            first = await self._prefill(self._targets.prefill_url, leg, mode, history)
            return first, await decode
        finally:
            decode.cancel()
            await asyncio.gather(decode, return_exceptions=True)

    async def _prefill(
        self, url: str, leg: _Leg, mode: str, history: PeerAddress | NixlHistory | None = None
    ) -> TimedAnswer:
        body = self._dialect.prefill_fields(leg.body, leg.transfer_id, Mode(mode), history=history)
        return await self._client.complete(f"{url}{leg.path}", body, headers=leg.headers)

    async def _decode(self, url: str, leg: _Leg, params: msgspec.Raw) -> StreamedAnswer:
        body = self._dialect.decode_fields(leg.body, params)
        return await self._client.stream(f"{url}{leg.path}", body, headers=leg.headers)

    async def _peer(self, url: str, other_url: str) -> Peer:
        """Ask ``url`` for a prefill leg, and the other for decode, so that nothing stays held."""
        leg = _Leg.fresh(_small_body(), _COMPLETIONS)
        first = await self._prefill(url, leg, self._targets.engine.modes[0])
        offered = self._offered_by(first)
        await self._decode(other_url, leg, offered)
        peer = self._dialect.peer_in(offered)
        if peer is None:
            raise MeasurementError(f"{url} does not say who it is in what it offers")
        return peer

    def _offered_by(self, answer: TimedAnswer) -> msgspec.Raw:
        offered = self._dialect.offered_params(answer.content)
        if offered is None:
            raise MeasurementError(
                f"prefill's answer has no {TRANSFER_FIELD}: is a connector loaded?"
            )
        return offered

    async def _num_hits(self) -> float:
        text = await self._client.text(f"{self._targets.decode_url}/metrics")
        return metric_total(text, _HITS) or 0.0


class _Offer(msgspec.Struct):
    prefill_report: PrefillReport | None = None
    """None: the connector says nothing of its part."""


def _prefill_report_in(offered: msgspec.Raw | None) -> PrefillReport | None:
    try:
        return None if offered is None else msgspec.json.decode(offered, type=_Offer).prefill_report
    except msgspec.DecodeError as error:
        raise MeasurementError(f"prefill's report is malformed: {error}") from error


def _small_body() -> Json:
    return {
        "prompt": list(range(1_000, 1_000 + _SMALL_PROMPT_TOKENS)),
        "max_tokens": 2,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": secrets.token_hex(8),
    }
