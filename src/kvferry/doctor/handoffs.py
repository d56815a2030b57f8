"""Real handoffs between two instances, over HTTP alone: what they cost, or why they fail.

Owns the two legs and their times. kvferry's own engine reports bytes and times in its answer. vLLM
does not: there the same request is sent again, which finds its blocks in the target's own cache,
and what the first one took longer is the move.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvferry.doctor.facts import HandoffSample, InstanceFacts, PairFacts
from kvferry.doctor.http_client import HttpClient
from kvferry.doctor.http_questions import HttpQuestions
from kvferry.doctor.transfer_checks import CLIENT_NOISE_S
from kvferry.errors import FerryError, MeasurementError, PeerUnreachableError
from kvferry.protocol.ids import TransferId, new_transfer_id
from kvferry.protocol.params import KvTransferParams, Mode, Role, emit_params
from kvferry.protocol.signing import SIGNATURE_HEADER, sign

RECEIVED = "received"
MIN_SHORT_TOKENS = 80
"""Above the default recompute threshold, below which nothing is moved."""
MAX_POOL_SHARE = 0.2
"""Of the smaller pool for one prompt: finished prefills may hold a quarter by default."""
_MAX_TOKENS = 2
"""The first may come with the handoff; the second needs the blocks."""
_FIRST_TOKEN_ID, _LAST_TOKEN_ID = 3, 250
"""Ids that any vocabulary has."""
_SIGNED_FOR_S = 60
_COUNT_WAIT_S = 3.0
_COUNT_INTERVAL_S = 0.1
_Json = dict[str, Any]  # Answers of engines; what is used of them is checked.


class HandoffFailedError(MeasurementError):
    """A leg was answered otherwise than it should be. ``remedy`` is one sentence."""

    def __init__(self, message: str, *, outcome: str = "", remedy: str = "") -> None:
        super().__init__(message)
        self.outcome = outcome
        self.remedy = remedy


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffPlan:
    """How much is handed over. ``num_tokens`` is of the long prompt; it may have to be shorter."""

    num_tokens: int = 1024
    repeats: int = 2
    """Of each length, after one handoff that only opens the connection."""
    timeout_s: float = 60.0
    """Bound of one leg."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of the two prompts: whole blocks and one token, which every decode computes."""

    short: int
    long: int


def lengths_of(plan: HandoffPlan, source: InstanceFacts, target: InstanceFacts) -> Lengths | None:
    """Return what fits into both instances, None if not even the short prompt does."""
    infos = [item.info for item in (source, target) if item.info is not None]
    block_size = max(info.layout.block_size_tokens for info in infos)
    bounds = [int(MAX_POOL_SHARE * info.num_blocks) * block_size for info in infos]
    bounds += [
        item.http.max_model_len - _MAX_TOKENS - 1
        for item in (source, target)
        if item.http.max_model_len is not None
    ]
    num_short_blocks = -(-MIN_SHORT_TOKENS // block_size)
    num_long_blocks = min(plan.num_tokens, *bounds) // block_size
    if num_long_blocks < num_short_blocks:
        return None
    return Lengths(short=num_short_blocks * block_size + 1, long=num_long_blocks * block_size + 1)


@dataclass(slots=True)
class _Pair:
    source: InstanceFacts
    target: InstanceFacts
    short: list[HandoffSample] = field(default_factory=list)
    long: list[HandoffSample] = field(default_factory=list)

    @property
    def is_reported(self) -> bool:
        """Whether the target's answers say what was moved."""
        return self.target.http.info is not None

    def facts(self, error: HandoffFailedError | None = None, outcome: str = "") -> PairFacts:
        return PairFacts(
            source_url=self.source.url,
            target_url=self.target.url,
            short=tuple(self.short),
            long=tuple(self.long),
            outcome=outcome or (error.outcome if error else ""),
            error=str(error) if error else "",
            remedy=error.remedy if error else "",
        )


class HandoffProbe:
    """Hands over random prompts that no cache knows."""

    def __init__(
        self,
        client: HttpClient,
        questions: HttpQuestions,
        plan: HandoffPlan,
        cluster_key: bytes | None,
        rng: random.Random,
    ) -> None:
        self._client = client
        self._questions = questions
        self._plan = plan
        self._cluster_key = cluster_key
        self._rng = rng

    async def measure(self, source: InstanceFacts, target: InstanceFacts) -> PairFacts:
        """Return what handoffs from ``source`` to ``target`` cost, or why the first one failed."""
        pair = _Pair(source, target)
        lengths = lengths_of(self._plan, source, target)
        try:
            if lengths is None:
                raise HandoffFailedError(
                    "the pools or the model's length are too small for a prompt to move",
                    remedy="give the instances more KV memory",
                )
            before = {} if pair.is_reported else await self._questions.receives(target.url)
            await self._hand_over(pair, lengths.short)
            if not pair.is_reported:
                await self._require_counted(pair, before)
            for _ in range(self._plan.repeats):
                pair.short += await self._hand_over(pair, lengths.short)
                pair.long += await self._hand_over(pair, lengths.long)
            if not pair.long:
                raise HandoffFailedError(
                    f"the target computed {lengths.long} tokens itself",
                    remedy="lower its recompute threshold, or try with more --tokens",
                )
            outcome = "" if pair.is_reported else await self._failed_outcome(pair, before)
        except HandoffFailedError as error:
            return pair.facts(error)
        except FerryError as error:
            return pair.facts(HandoffFailedError(str(error)))
        return pair.facts(outcome=outcome)

    async def _hand_over(self, pair: _Pair, num_tokens: int) -> list[HandoffSample]:
        """Hand one prompt over; return nothing where the target preferred to compute it."""
        rng = self._rng
        prompt = [rng.randint(_FIRST_TOKEN_ID, _LAST_TOKEN_ID) for _ in range(num_tokens)]
        body: _Json = {
            "prompt": prompt,
            "max_tokens": _MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": secrets.token_hex(16),
        }
        transfer_id = new_transfer_id()
        offered = await self._prefill(pair.source, body, transfer_id)
        try:
            answer, took_s = await self._decode(pair, body, transfer_id, offered)
        except FerryError:
            await self._withdraw(pair.source, transfer_id)
            raise
        if pair.is_reported:
            return _reported(answer, num_tokens)
        _, again_s = await self._complete(pair.target, body, None, transfer_id)
        return [_timed(pair.target, num_tokens, took_s, again_s)]

    async def _prefill(self, source: InstanceFacts, body: _Json, transfer_id: TransferId) -> _Json:
        params = KvTransferParams(transfer_id=transfer_id, role=Role.PREFILL)
        fields = {**emit_params(params), "mode": Mode.PULL.value}
        answer, _ = await self._complete(source, body, fields, transfer_id)
        offered = answer.get("kv_transfer_params")
        if isinstance(offered, dict):
            return offered
        if source.http.info is None:
            remedy = "look whether the server runs FerryConnector with kv_role kv_both"
        elif self._cluster_key is None:
            remedy = "give the instances' cluster key: without it their transfers are not obeyed"
        else:
            remedy = "give the cluster key that the instances have, and synchronise the clocks"
        raise HandoffFailedError(
            f"{source.name} ignored the transfer parameters of a prefill leg", remedy=remedy
        )

    async def _decode(
        self, pair: _Pair, body: _Json, transfer_id: TransferId, offered: _Json
    ) -> tuple[_Json, float]:
        # Nothing of it is worth keeping for a next turn.
        fields = {**offered, "retention_s": 0}
        extra = {"kv_report": True} if pair.is_reported else {}
        return await self._complete(pair.target, {**body, **extra}, fields, transfer_id)

    async def _complete(
        self, at: InstanceFacts, body: _Json, params: _Json | None, transfer_id: TransferId
    ) -> tuple[_Json, float]:
        """Return an answer and how long it took."""
        fields = {**body, "model": at.http.model}
        if params is not None:
            fields["kv_transfer_params"] = params
        encoded = msgspec.json.encode(fields)
        try:
            reply = await self._client.post(
                f"{at.url}/v1/completions",
                encoded,
                self._plan.timeout_s,
                self._signature(encoded, transfer_id),
            )
        except PeerUnreachableError as error:
            raise HandoffFailedError(f"{at.name}: {error}") from error
        if reply.status != 200:
            raise HandoffFailedError(f"{at.name} answered {reply.status}: {reply.text}")
        try:
            return msgspec.json.decode(reply.body, type=_Json), reply.elapsed_s
        except msgspec.MsgspecError as error:
            raise HandoffFailedError(f"{at.name} answered no JSON object: {error}") from error

    def _signature(self, body: bytes, transfer_id: TransferId) -> dict[str, str]:
        if self._cluster_key is None:
            return {}
        expires_at_s = int(time.time()) + _SIGNED_FOR_S
        return {SIGNATURE_HEADER: sign(self._cluster_key, body, transfer_id, expires_at_s)}

    async def _withdraw(self, source: InstanceFacts, transfer_id: TransferId) -> None:
        """Let the source drop what it holds; without kvferry's own engine its lease ends it."""
        with contextlib.suppress(PeerUnreachableError):
            await self._client.delete(
                f"{source.url}/kvferry/transfers/{transfer_id}", self._questions.timeout_s
            )

    async def _require_counted(self, pair: _Pair, before: dict[str, float]) -> None:
        """Raise ``HandoffFailedError`` unless the target counts a receive that went well."""
        deadline_s = time.monotonic() + _COUNT_WAIT_S
        counts: dict[str, float] = {}
        while not counts and time.monotonic() < deadline_s:
            counts = _since(before, await self._questions.receives(pair.target.url))
            if not counts:
                await asyncio.sleep(_COUNT_INTERVAL_S)
        if not counts:
            raise HandoffFailedError(
                f"{pair.target.name} counts no receive in its metrics",
                remedy="look whether it runs FerryConnector, and at its recompute threshold",
            )
        failed = next((outcome for outcome in counts if outcome != RECEIVED), "")
        if failed:
            raise HandoffFailedError(f"the blocks did not come: {failed}", outcome=failed)

    async def _failed_outcome(self, pair: _Pair, before: dict[str, float]) -> str:
        counts = _since(before, await self._questions.receives(pair.target.url))
        return next((outcome for outcome in counts if outcome != RECEIVED), "")


def _since(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {
        outcome: count - before.get(outcome, 0)
        for outcome, count in after.items()
        if count > before.get(outcome, 0)
    }


class _Report(msgspec.Struct, frozen=True):
    """Of kvferry's ``kv_report``; times are monotonic seconds of the target's host."""

    arrived_s: float = 0.0
    kv_ready_s: float | None = None
    num_received_bytes: int = 0
    receive_outcome: str = ""


def _reported(answer: _Json, num_tokens: int) -> list[HandoffSample]:
    try:
        report = msgspec.convert(answer.get("kv_report"), _Report)
    except msgspec.ValidationError as error:
        raise HandoffFailedError(f"the answer has no usable kv_report: {error}") from error
    if report.receive_outcome not in ("", RECEIVED):
        raise HandoffFailedError(
            f"the blocks did not come: {report.receive_outcome}", outcome=report.receive_outcome
        )
    if not report.num_received_bytes or report.kv_ready_s is None:
        return []
    return [
        HandoffSample(
            num_tokens=num_tokens,
            num_bytes=report.num_received_bytes,
            moved_s=report.kv_ready_s - report.arrived_s,
            is_reported=True,
        )
    ]


def _timed(target: InstanceFacts, num_tokens: int, took_s: float, again_s: float) -> HandoffSample:
    assert target.info is not None
    layout = target.info.layout
    return HandoffSample(
        num_tokens=num_tokens,
        num_bytes=-(-num_tokens // layout.block_size_tokens) * layout.block_bytes,
        moved_s=max(CLIENT_NOISE_S, took_s - again_s),
        is_reported=False,
    )
