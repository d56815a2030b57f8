"""Real handoffs between two instances, over HTTP alone: what they cost, or why they fail.

Owns the two legs and their times. kvferry's own engine reports bytes and times in its answer. vLLM
does not: there the same handoff is made again, which finds its blocks in the target's own cache,
and what the first one took longer is the move. Nothing of a prompt is retained, and an offer that
nobody takes is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from dataclasses import dataclass, field

import msgspec

from kvferry.client.dialects import Json, KvferryDialect
from kvferry.client.http_client import Reply
from kvferry.doctor.facts import HandoffPlan, HandoffSample, InstanceFacts, PairFacts
from kvferry.doctor.handoff_checks import CLIENT_NOISE_S, seems_slow
from kvferry.doctor.questions import Questions
from kvferry.errors import FerryError, MeasurementError, PeerUnreachableError
from kvferry.protocol.ids import InstanceId, TransferId, new_transfer_id
from kvferry.protocol.kv_report import KvReport
from kvferry.protocol.params import REPORT_FIELD, Mode, PeerAddress
from kvferry.protocol.signing import signature_headers

RECEIVED = "received"
MIN_SHORT_TOKENS = 80
"""Above the default recompute threshold, below which nothing is moved."""
MAX_POOL_SHARE = 0.2
"""Of the smaller pool for one prompt: finished prefills may hold a quarter by default."""
MAX_FURTHER_SAMPLES = 6
"""Of the long prompt, where it seems slow: other work on the host makes any one of them so."""
_MAX_TOKENS = 2
"""The first may come with the handoff; the second needs the blocks."""
_FIRST_TOKEN_ID, _LAST_TOKEN_ID = 3, 250
"""Ids that any vocabulary has."""
_COUNT_WAIT_S = 3.0
_COUNT_INTERVAL_S = 0.1
_DOCTOR = InstanceId("kvferry-doctor")
_LEGS = KvferryDialect()
"""FerryConnector is asked alike: nothing is in these bodies that vLLM does not know."""


class HandoffFailedError(MeasurementError):
    """A leg was answered otherwise than it should be. ``remedy`` is one sentence."""

    def __init__(self, message: str, *, outcome: str = "", remedy: str = "") -> None:
        super().__init__(message)
        self.outcome = outcome
        self.remedy = remedy


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


@dataclass(slots=True, kw_only=True)
class HandoffProbe:
    """Hands random prompts, which no cache knows, over from one instance to another."""

    questions: Questions
    plan: HandoffPlan
    cluster_key: bytes | None
    rng: random.Random
    source: InstanceFacts
    target: InstanceFacts
    _short: list[HandoffSample] = field(init=False, default_factory=list)
    _long: list[HandoffSample] = field(init=False, default_factory=list)
    _answered_by: PeerAddress | None = field(init=False, default=None)

    async def measure(self) -> PairFacts:
        """Return what handoffs cost, or why the first one failed."""
        lengths = lengths_of(self.plan, self.source, self.target)
        try:
            if lengths is None:
                raise HandoffFailedError(
                    "the pools or the model's length are too small for a prompt to move",
                    remedy="give the instances more KV memory",
                )
            return self._facts(outcome=await self._sample(lengths))
        except HandoffFailedError as error:
            return self._facts(error=str(error), outcome=error.outcome, remedy=error.remedy)
        except FerryError as error:
            return self._facts(error=str(error))

    def _facts(self, *, error: str = "", outcome: str = "", remedy: str = "") -> PairFacts:
        return PairFacts(
            source_url=self.source.url,
            target_url=self.target.url,
            short=tuple(self._short),
            long=tuple(self._long),
            outcome=outcome,
            error=error,
            remedy=remedy,
            answered_by=self._answered_by,
        )

    @property
    def _is_reported(self) -> bool:
        """Whether the target's answers say what was moved."""
        return self.target.http.info is not None

    async def _sample(self, lengths: Lengths) -> str:
        """Hand over as planned; return the outcome of a receive that failed, if one did."""
        before = {} if self._is_reported else await self.questions.pulls(self.target.url)
        await self._hand_over(lengths.short)
        if not self._is_reported:
            await self._require_counted(before)
        for _ in range(self.plan.repeats):
            self._short += await self._hand_over(lengths.short)
            self._long += await self._hand_over(lengths.long)
        if not self._long:
            raise HandoffFailedError(
                f"the target computed {lengths.long} tokens itself",
                remedy="lower its recompute threshold, or try with more --tokens",
            )
        for _ in range(MAX_FURTHER_SAMPLES):
            if not seems_slow(self._facts(), self.source, self.target):
                break
            self._long += await self._hand_over(lengths.long)
        return "" if self._is_reported else _failed(await self._outcomes(before))

    async def _hand_over(self, num_tokens: int) -> list[HandoffSample]:
        """Hand one prompt over; return nothing where the target preferred to compute it."""
        draw = self.rng.randint
        body: Json = {
            "prompt": [draw(_FIRST_TOKEN_ID, _LAST_TOKEN_ID) for _ in range(num_tokens)],
            "max_tokens": _MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": secrets.token_hex(16),
        }
        answer = await self._both_legs(body)
        if self._is_reported:
            return _reported(answer, num_tokens)
        # As a handoff again, since a request of its own would be retained as a conversation.
        again = await self._both_legs(body)
        return [_timed(self.target, num_tokens, answer.elapsed_s - again.elapsed_s)]

    async def _both_legs(self, body: Json) -> Reply:
        """Return decode's answer."""
        transfer_id = new_transfer_id()
        offered = await self._prefill(body, transfer_id)
        self._answered_by = holder = _LEGS.peer_in(offered)
        try:
            if self.source.is_another(holder):
                raise HandoffFailedError("")  # No result would be the source's: said of its port.
            # Nothing of it is worth keeping for a next turn.
            fields = _LEGS.decode_fields(body, offered, retention_s=0)
            if self._is_reported:
                fields[REPORT_FIELD] = True
            answer = await self._complete(self.target, fields, transfer_id)
            if self._is_reported:
                _require_received(answer)
        except FerryError:
            await self._withdraw(transfer_id, holder)
            raise
        return answer

    async def _prefill(self, body: Json, transfer_id: TransferId) -> msgspec.Raw:
        """Return what prefill offers. Raises ``HandoffFailedError`` if it offers nothing."""
        source, fields = self.source, _LEGS.prefill_fields(body, transfer_id, Mode.PULL)
        answer = await self._complete(source, fields, transfer_id)
        offered = _LEGS.offered_params(answer.body)
        if offered is not None:
            return offered
        if source.http.info is None:
            remedy = "look whether the server runs FerryConnector with kv_role kv_both"
        elif source.http.user_key is not None:
            remedy = source.http.user_key.remedy
        elif self.cluster_key is None:
            remedy = "give the instances' cluster key: without it their transfers are not obeyed"
        else:
            remedy = "give the cluster key that the instances have, and synchronise the clocks"
        raise HandoffFailedError(
            f"{source.name} ignored the transfer parameters of a prefill leg", remedy=remedy
        )

    async def _complete(self, at: InstanceFacts, fields: Json, transfer_id: TransferId) -> Reply:
        """Return the answer to one leg. Raises ``HandoffFailedError`` unless it is a success."""
        encoded = msgspec.json.encode({**fields, "model": at.http.model})
        try:
            reply = await self.questions.http.ask(
                f"{at.url}/v1/completions",
                method="POST",
                body=encoded,
                headers=self._signature(encoded, transfer_id),
                timeout_s=self.plan.timeout_s,
            )
        except PeerUnreachableError as error:
            raise HandoffFailedError(f"{at.name}: {error}") from error
        if reply.status != 200:
            raise HandoffFailedError(f"{at.name} answered {reply.status}: {reply.text}")
        return reply

    def _signature(self, body: bytes, transfer_id: TransferId) -> dict[str, str]:
        return signature_headers(self.cluster_key, body, transfer_id, time.time())

    async def _withdraw(self, transfer_id: TransferId, holder: PeerAddress | None) -> None:
        """Have what the source holds dropped at once; otherwise its lease would end it."""
        source = self.source
        if source.http.info is not None:
            with contextlib.suppress(PeerUnreachableError):
                await self.questions.http.ask(
                    f"{source.url}/kvferry/transfers/{transfer_id}",
                    method="DELETE",
                    headers=self._signature(b"", transfer_id),
                )
        elif holder is not None:
            num_ranks, control = 1, source.control
            if control is not None and control.info is not None:
                num_ranks = control.info.layout.tensor_parallel_size
                if control.info.epoch == holder.epoch:
                    # Where the doctor has had an answer: the other may be for peers only.
                    holder = PeerAddress(holder.instance_id, holder.epoch, control.address)
            holders = [holder.of_rank(rank) for rank in range(num_ranks)]
            limit_s = self.questions.http.timeout_s
            await self.questions.ports.cancel(_DOCTOR, transfer_id, holders, limit_s)

    async def _require_counted(self, before: dict[str, float]) -> None:
        """Raise ``HandoffFailedError`` unless the target counts a receive that went well."""
        deadline_s = time.monotonic() + _COUNT_WAIT_S
        while not (counts := await self._outcomes(before)):
            if time.monotonic() > deadline_s:
                raise HandoffFailedError(
                    f"{self.target.name} counts no receive in its metrics",
                    remedy="look whether it runs FerryConnector, and at its recompute threshold",
                )
            await asyncio.sleep(_COUNT_INTERVAL_S)
        failed = _failed(counts)
        if failed:
            raise HandoffFailedError(f"the blocks did not come: {failed}", outcome=failed)

    async def _outcomes(self, before: dict[str, float]) -> list[str]:
        """Return the outcomes of which the target counts more than before."""
        counts = await self.questions.pulls(self.target.url)
        return [outcome for outcome, count in counts.items() if count > before.get(outcome, 0)]


def _failed(outcomes: list[str]) -> str:
    """Return the first outcome that is a failure, empty if there is none."""
    return next((outcome for outcome in outcomes if outcome != RECEIVED), "")


class _Answer(msgspec.Struct, frozen=True):
    kv_report: KvReport


def _report_in(answer: Reply) -> KvReport:
    try:
        return msgspec.json.decode(answer.body, type=_Answer).kv_report
    except msgspec.MsgspecError as error:
        raise HandoffFailedError(f"the answer has no usable kv_report: {error}") from error


def _require_received(answer: Reply) -> None:
    """Raise ``HandoffFailedError`` if a receive was tried and failed."""
    outcome = _report_in(answer).receive_outcome
    if outcome not in ("", RECEIVED):
        raise HandoffFailedError(f"the blocks did not come: {outcome}", outcome=outcome)


def _reported(answer: Reply, num_tokens: int) -> list[HandoffSample]:
    report = _report_in(answer)
    if not report.num_received_bytes or report.arrived_s is None or report.kv_ready_s is None:
        return []
    return [
        HandoffSample(
            num_tokens=num_tokens,
            num_bytes=report.num_received_bytes,
            moved_s=report.kv_ready_s - report.arrived_s,
            is_reported=True,
        )
    ]


def _timed(target: InstanceFacts, num_tokens: int, longer_s: float) -> HandoffSample:
    assert target.info is not None
    layout = target.info.layout
    return HandoffSample(
        num_tokens=num_tokens,
        num_bytes=-(-num_tokens // layout.block_size_tokens) * layout.block_bytes,
        moved_s=max(CLIENT_NOISE_S, longer_s),
        is_reported=False,
    )
