"""What the two legs of a request say to an engine: bodies out, transfer parameters back. Pure.

There are two dialects, with the same methods: kvferry's own, which FerryConnector speaks in vLLM,
and that of vLLM's NIXL connectors. Bodies are top-level fields, whose values may be encoded
already: what prefill offers is relayed as the bytes that came, fields unknown here included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from kvferry.client.engine_kinds import EngineKind, NixlAddress
from kvferry.client.nixl_history import NixlHistory, history_in, is_plain_prompt
from kvferry.errors import LocalProtocolError
from kvferry.protocol.headers import REQUEST_ID_HEADER
from kvferry.protocol.ids import TransferId
from kvferry.protocol.params import (
    PROGRESS_FIELD,
    REPORT_FIELD,
    TRANSFER_FIELD,
    KvTransferParams,
    Mode,
    OnFailure,
    PeerAddress,
    Role,
    emit_params,
)

Json = dict[str, object]
Fields = Mapping[str, object]
Peer = PeerAddress | NixlAddress
"""Who has computed a prompt, as its kind of engine is named."""
History = PeerAddress | NixlHistory
"""Who probably holds blocks of a prompt, or which blocks those are."""

_NOT_NEEDED = "not_needed"
_TRANSFER_FIELD_BYTES = TRANSFER_FIELD.encode()
_ASK_NIXL_PREFILL: Fields = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(frozen=True, slots=True)
class DialectTraits:
    """What one kind of engine can do, as far as who drives it depends on that."""

    tells_progress: bool = False
    """A prefill leg may be answered as a stream of how far it is."""
    ends_transfers: bool = False
    """A handoff can be ended by ``DELETE /kvferry/transfers/{id}``; else closing a leg's connection
    is all there is."""
    checks_offers: bool = False
    """What is offered is looked up by transfer id and checked by content, so that an offer may go
    to another instance after one has failed with it."""


class KvferryDialect:
    """kvferry engines, and vLLM with FerryConnector: ``kv_transfer_params`` are kvferry's own.

    A prefill leg keeps the client's sampling parameters: the engine ends it after one token, which
    it samples as the client asked. vLLM's server knows neither progress nor reports, and a handoff
    there ends with the connection of its leg.
    """

    def __init__(self, kind: EngineKind = EngineKind.KVFERRY) -> None:
        is_own = kind is not EngineKind.VLLM
        self.traits = DialectTraits(is_own, is_own, checks_offers=True)
        self._unknown_fields = () if is_own else (REPORT_FIELD,)

    def leg_headers(self, transfer_id: TransferId) -> dict[str, str]:
        """Return what a leg's headers say of the handoff: nothing, its body names it."""
        del transfer_id
        return {}

    def prefill_fields(
        self,
        fields: Fields,
        transfer_id: TransferId,
        mode: Mode,
        *,
        wants_progress: bool = False,
        history: History | None = None,
    ) -> Json:
        """Return the body of a prefill leg: the client's ``fields``, unstreamed, with that role.

        ``wants_progress``: it may be told on the way. A ``history`` of the other dialect is none.
        """
        params = KvTransferParams(
            transfer_id=transfer_id,
            role=Role.PREFILL,
            mode=mode,
            history=history if isinstance(history, PeerAddress) else None,
        )
        # The mode is written although it is the default: an engine reads what it is told.
        emitted = {**emit_params(params), "mode": mode.value}
        kept = _without(fields, "stream_options", *self._unknown_fields)
        asked = {**kept, "stream": False, TRANSFER_FIELD: emitted}
        if wants_progress and self.traits.tells_progress:
            asked[PROGRESS_FIELD] = True
        return asked

    def push_params(
        self, transfer_id: TransferId, peer: Peer, on_failure: OnFailure
    ) -> msgspec.Raw:
        """Return the transfer parameters of a decode leg that ``peer`` pushes to.

        Raises ``LocalProtocolError`` for a peer that is only known by its NIXL address.
        """
        if not isinstance(peer, PeerAddress):
            raise LocalProtocolError(f"{peer} has no control port to register at")
        params = KvTransferParams(
            transfer_id=transfer_id, role=Role.DECODE, mode=Mode.PUSH, peer=peer
        )
        return _raw({**emit_params(params), "on_failure": on_failure.value})

    def decode_fields(
        self, fields: Fields, offered: msgspec.Raw, retention_s: float | None = None
    ) -> Json:
        """Return the body of a decode leg that takes what prefill ``offered``, as it came.

        ``retention_s``: for how long to retain; None leaves it to the instance.
        """
        if retention_s is not None:
            offered = _raw({**_fields_decoder.decode(offered), "retention_s": retention_s})
        return {**_without(fields, *self._unknown_fields), TRANSFER_FIELD: offered}

    def offered_params(self, prefill_answer: bytes) -> msgspec.Raw | None:
        """Return the transfer parameters in a prefill answer.

        An answer that is not a JSON object, or has none, offers nothing.
        """
        return _offer_in(prefill_answer)

    def peer_in(self, offered: msgspec.Raw) -> PeerAddress | None:
        """Return who offers, at whose control port the blocks are; None where it is not said."""
        try:
            return _offer_decoder.decode(offered).peer
        except (msgspec.DecodeError, RecursionError):
            return None

    def is_not_needed(self, prefill_answer: bytes) -> bool:
        """Whether prefill ended early because decode needs nothing of it."""
        try:
            choices = _ended_answer_decoder.decode(prefill_answer).choices
        except (msgspec.DecodeError, RecursionError):
            return False
        return any(choice.finish_reason == _NOT_NEEDED for choice in choices)

    def history_in(self, fields: Fields, decode_answer: bytes) -> NixlHistory | None:
        """Return None: what is kept for a later turn is found by content."""
        del fields, decode_answer
        return None


class NixlDialect:
    """vLLM with NixlConnector or NixlPushConnector: decode gets what prefill answers.

    Prefill is asked for one token that nobody will see, since decode samples the first itself.
    By pull, what decode keeps for a later turn (``bidirectional_kv_xfer``) is read back once, by
    the next prefill leg. By push, both legs are matched by their request ids, so each attempt has
    one of its own, whatever the client has sent. Retention is vLLM's own.
    """

    traits = DialectTraits()

    def __init__(self, kind: EngineKind = EngineKind.VLLM_NIXL) -> None:
        self._pushes = kind is EngineKind.VLLM_NIXL_PUSH

    def leg_headers(self, transfer_id: TransferId) -> dict[str, str]:
        """Return what a leg's headers say of the handoff: the request's id, where that matters."""
        return {REQUEST_ID_HEADER: transfer_id} if self._pushes else {}

    def prefill_fields(
        self,
        fields: Fields,
        transfer_id: TransferId,
        mode: Mode,
        *,
        wants_progress: bool = False,
        history: History | None = None,
    ) -> Json:
        """Return the body of a prefill leg: the client's ``fields``, unstreamed, for one token.

        A ``history`` of the other dialect is none, nor is one of a prompt that is cut or added to.
        """
        del transfer_id, mode, wants_progress
        params: Json = dict(_ASK_NIXL_PREFILL)
        if isinstance(history, NixlHistory) and is_plain_prompt(fields):
            params |= _fields_decoder.decode(history.params)
        kept = _without(fields, "stream_options", "min_tokens", REPORT_FIELD)
        asked = {**kept, "stream": False, "max_tokens": 1, TRANSFER_FIELD: params}
        return {**asked, "max_completion_tokens": 1} if "messages" in asked else asked

    def push_params(
        self, transfer_id: TransferId, peer: Peer, on_failure: OnFailure
    ) -> msgspec.Raw:
        """Return where decode registers its blocks; what it does on failure is vLLM's policy.

        Raises ``LocalProtocolError`` for NixlConnector, which pulls only, and for other peers.
        """
        del on_failure
        if not self._pushes:
            raise LocalProtocolError("NixlConnector does not push")
        if not isinstance(peer, NixlAddress):
            raise LocalProtocolError(f"{peer.instance_id} has no known NIXL address")
        return _raw(
            {
                "do_remote_decode": False,
                "do_remote_prefill": True,
                "remote_engine_id": peer.engine_id,
                "remote_request_id": transfer_id,
                "remote_block_ids": None,
                "remote_host": peer.host,
                "remote_port": peer.port,
                "tp_size": peer.tp_size,
            }
        )

    def decode_fields(
        self, fields: Fields, offered: msgspec.Raw, retention_s: float | None = None
    ) -> Json:
        """Return the body of a decode leg that takes what prefill ``offered``, as it came."""
        del retention_s
        return {**_without(fields, REPORT_FIELD), TRANSFER_FIELD: offered}

    def offered_params(self, prefill_answer: bytes) -> msgspec.Raw | None:
        """Return the offer, None for an answer without one or with one that is not for decode."""
        offered = _offer_in(prefill_answer)
        if offered is None:
            return None
        try:
            return offered if _direction_decoder.decode(offered).do_remote_prefill else None
        except (msgspec.DecodeError, RecursionError):
            return None

    def peer_in(self, offered: msgspec.Raw) -> NixlAddress | None:
        """Return the engine whose side channel tells where the blocks are; None: it is not said."""
        try:
            told = _nixl_offer_decoder.decode(offered)
        except (msgspec.DecodeError, RecursionError):
            return None
        engine_id, host, port = told.remote_engine_id, told.remote_host, told.remote_port
        return NixlAddress(engine_id, host, port, told.tp_size)

    def is_not_needed(self, prefill_answer: bytes) -> bool:
        """Return False: prefill always runs to its end."""
        del prefill_answer
        return False

    def history_in(self, fields: Fields, decode_answer: bytes) -> NixlHistory | None:
        """Return the blocks of the prompt that an unstreamed answer names for the next turn."""
        is_readable = not self._pushes and is_plain_prompt(fields)
        return history_in(decode_answer) if is_readable else None


Dialect = KvferryDialect | NixlDialect
"""How one kind of engine is asked for the two legs of a handoff."""


def dialect_of(kind: EngineKind) -> Dialect:
    """Return how instances of ``kind`` are spoken to."""
    is_nixl = kind in (EngineKind.VLLM_NIXL, EngineKind.VLLM_NIXL_PUSH)
    return NixlDialect(kind) if is_nixl else KvferryDialect(kind)


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


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"")


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _EndedAnswer(msgspec.Struct):
    choices: tuple[_Choice, ...] = ()


class _Offer(msgspec.Struct):
    peer: PeerAddress | None = None


class _Direction(msgspec.Struct):
    do_remote_prefill: bool


class _NixlOffer(msgspec.Struct):
    remote_engine_id: str
    remote_host: str
    remote_port: int
    tp_size: int = 1


_prefill_answer_decoder = msgspec.json.Decoder(_PrefillAnswer)
_ended_answer_decoder = msgspec.json.Decoder(_EndedAnswer)
_offer_decoder = msgspec.json.Decoder(_Offer)
_direction_decoder = msgspec.json.Decoder(_Direction)
_nixl_offer_decoder = msgspec.json.Decoder(_NixlOffer)
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _offer_in(prefill_answer: bytes) -> msgspec.Raw | None:
    try:
        offered = _prefill_answer_decoder.decode(prefill_answer).kv_transfer_params
    except (msgspec.DecodeError, RecursionError):
        return None
    return offered if bytes(offered).startswith(b"{") else None


def _without(fields: Fields, *names: str) -> Json:
    return {name: value for name, value in fields.items() if name not in names}


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
