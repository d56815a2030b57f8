"""What the two legs of a request say to an engine: bodies out, transfer parameters back.

Knows JSON fields only; a dialect is pure. What prefill offers is relayed as the bytes that came,
fields unknown here included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec
from multidict import CIMultiDict

from kvferry.protocol.ids import TransferId
from kvferry.protocol.params import (
    KvTransferParams,
    Mode,
    OnFailure,
    PeerAddress,
    Role,
    emit_params,
)
from kvferry.client.kept_blocks import KeptBlocks
from kvferry.protocol.params import TRANSFER_FIELD
from kvferry.router.parsing import ParsedBody

PROGRESS_FIELD = "kv_progress"
_FALSE = msgspec.Raw(b"false")
_TRUE = msgspec.Raw(b"true")
_TRANSFER_FIELD_BYTES = TRANSFER_FIELD.encode()


@dataclass(frozen=True, slots=True)
class DialectTraits:
    """What one kind of engine can do, as far as the router's steps depend on it."""

    tells_progress: bool
    """A prefill leg may be answered as a stream of how far it is."""
    ends_transfers: bool
    """A handoff can be ended by ``DELETE /kvferry/transfers/{id}``; else closing a leg's connection
    is all there is."""
    checks_offers: bool
    """What is offered is looked up by transfer id and checked by content, so that an offer may go
    to another instance after one has failed with it."""


class Dialect(Protocol):
    """How one kind of engine is asked for the two legs of a handoff."""

    @property
    def traits(self) -> DialectTraits:
        """What such engines can do."""
        ...

    def leg_headers(self, headers: CIMultiDict[str], transfer_id: TransferId) -> CIMultiDict[str]:
        """Return the headers of a leg of a handoff, before a signature is added."""
        ...

    def prefill_body(
        self,
        body: ParsedBody,
        transfer_id: TransferId,
        mode: Mode,
        *,
        wants_progress: bool = False,
        history: PeerAddress | KeptBlocks | None = None,
    ) -> bytes:
        """Return the body of a prefill leg.

        ``wants_progress``: it may be told on the way. ``history``: who probably holds blocks of
        the prompt, or which blocks those are, as this kind of engine names it.
        """
        ...

    def push_params(
        self, transfer_id: TransferId, peer: PeerAddress, on_failure: OnFailure
    ) -> msgspec.Raw:
        """Return the transfer parameters of a decode leg that ``peer`` pushes to."""
        ...

    def decode_body(
        self, body: ParsedBody, offered: msgspec.Raw, retention_s: float | None = None
    ) -> bytes:
        """Return the body of a decode leg that takes what prefill ``offered``.

        ``retention_s``: for how long to retain; None leaves it to the instance.
        """
        ...

    def offered_params(self, prefill_answer: bytes) -> msgspec.Raw | None:
        """Return the transfer parameters in a prefill answer, None when it has none."""
        ...

    def is_not_needed(self, prefill_answer: bytes) -> bool:
        """Whether prefill ended early because decode needs nothing of it."""
        ...

    def kept_blocks(self, body: ParsedBody, decode_answer: bytes) -> KeptBlocks | None:
        """Return the blocks that an answer names for a later turn's read, where it does."""
        ...


_NOTHING = msgspec.Raw(b"")
_NOT_NEEDED = "not_needed"


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = _NOTHING


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _EndedAnswer(msgspec.Struct):
    choices: tuple[_Choice, ...] = ()


_prefill_answer_decoder = msgspec.json.Decoder(_PrefillAnswer)
_ended_answer_decoder = msgspec.json.Decoder(_EndedAnswer)
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


class KvferryDialect:
    """kvferry engines: the client's body with ``kv_transfer_params`` added.

    A prefill leg keeps the sampling parameters: the engine itself ends a prefill request after one
    token and samples that token as the client asked.
    """

    traits = DialectTraits(tells_progress=True, ends_transfers=True, checks_offers=True)

    def leg_headers(self, headers: CIMultiDict[str], transfer_id: TransferId) -> CIMultiDict[str]:
        """Return them as they are: a handoff is named in the body."""
        del transfer_id
        return headers

    def prefill_body(
        self,
        body: ParsedBody,
        transfer_id: TransferId,
        mode: Mode,
        *,
        wants_progress: bool = False,
        history: PeerAddress | KeptBlocks | None = None,
    ) -> bytes:
        """Return the client's body, unstreamed, with the prefill role."""
        params = KvTransferParams(
            transfer_id=transfer_id,
            role=Role.PREFILL,
            mode=mode,
            history=history if isinstance(history, PeerAddress) else None,
        )
        # The mode is written although it is the default: an engine reads what it is told.
        emitted = {**emit_params(params), "mode": mode.value}
        fields = body.fields | {
            "stream": _FALSE,
            TRANSFER_FIELD: msgspec.Raw(msgspec.json.encode(emitted)),
        }
        fields.pop("stream_options", None)
        if wants_progress:
            fields[PROGRESS_FIELD] = _TRUE
        return msgspec.json.encode(fields)

    def push_params(
        self, transfer_id: TransferId, peer: PeerAddress, on_failure: OnFailure
    ) -> msgspec.Raw:
        """Return the decode role, mode push, who pushes, and what to do when it fails."""
        params = KvTransferParams(
            transfer_id=transfer_id, role=Role.DECODE, mode=Mode.PUSH, peer=peer
        )
        emitted = {**emit_params(params), "on_failure": on_failure.value}
        return msgspec.Raw(msgspec.json.encode(emitted))

    def decode_body(
        self, body: ParsedBody, offered: msgspec.Raw, retention_s: float | None = None
    ) -> bytes:
        """Return the client's body with what prefill offered, each of its fields as it came."""
        if retention_s is not None:
            fields = _fields_decoder.decode(offered)
            fields["retention_s"] = msgspec.Raw(msgspec.json.encode(retention_s))
            offered = msgspec.Raw(msgspec.json.encode(fields))
        return msgspec.json.encode(body.fields | {TRANSFER_FIELD: offered})

    def offered_params(self, prefill_answer: bytes) -> msgspec.Raw | None:
        """Return the offer; an answer that is not a JSON object, or has none, offers nothing."""
        return offer_in(prefill_answer)

    def is_not_needed(self, prefill_answer: bytes) -> bool:
        """Whether the answer's choice ended as ``not_needed``."""
        try:
            choices = _ended_answer_decoder.decode(prefill_answer).choices
        except (msgspec.DecodeError, RecursionError):
            return False
        return any(choice.finish_reason == _NOT_NEEDED for choice in choices)

    def kept_blocks(self, body: ParsedBody, decode_answer: bytes) -> KeptBlocks | None:
        """Return None: what is kept is found by content."""
        del body, decode_answer
        return None


def offer_in(prefill_answer: bytes) -> msgspec.Raw | None:
    """Return the transfer parameters of an answer, None where it has no object of them."""
    try:
        offered = _prefill_answer_decoder.decode(prefill_answer).kv_transfer_params
    except (msgspec.DecodeError, RecursionError):
        return None
    return offered if bytes(offered).startswith(b"{") else None


def hide_transfer_params(answer: bytes) -> bytes:
    """Return an engine's JSON answer without top-level transfer parameters.

    Anything that is not a JSON object, or has none, is returned as it is.
    """
    if _TRANSFER_FIELD_BYTES not in answer:
        return answer
    try:
        fields = _fields_decoder.decode(answer)
    except (msgspec.DecodeError, RecursionError):
        return answer
    if fields.pop(TRANSFER_FIELD, None) is None:
        return answer
    return msgspec.json.encode(fields)
