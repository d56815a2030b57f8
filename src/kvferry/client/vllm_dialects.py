"""What the two legs of a request say to vLLM, with FerryConnector or its own connectors. Pure.

In vLLM a handoff ends with the connection of its leg, nothing is told while a prompt is computed,
and decode samples the first token itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from multidict import CIMultiDict

from kvferry.protocol.ids import TransferId
from kvferry.protocol.params import Mode, OnFailure, PeerAddress
from kvferry.client.dialect import Dialect, DialectTraits, KvferryDialect, offer_in
from kvferry.client.engine_kinds import EngineKind, NixlAddress
from kvferry.router.engines import EngineConfig
from kvferry.protocol.client_headers import REQUEST_ID_HEADER
from kvferry.client.kept_blocks import KeptBlocks, is_plain_prompt, kept_blocks_in
from kvferry.protocol.params import TRANSFER_FIELD
from kvferry.router.parsing import ParsedBody

_REPORT_FIELD = "kv_report"
_FALSE = msgspec.Raw(b"false")
_ONE = msgspec.Raw(b"1")
_NO_PEER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class _Direction(msgspec.Struct):
    do_remote_prefill: bool


_direction_decoder = msgspec.json.Decoder(_Direction)
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


class VllmDialect(KvferryDialect):
    """vLLM with FerryConnector: kvferry's own parameters, less what vLLM's server does not know.

    The connector ends a prefill request after one token, whatever the body asks for.
    """

    traits = DialectTraits(tells_progress=False, ends_transfers=False, checks_offers=True)

    def prefill_body(
        self,
        body: ParsedBody,
        transfer_id: TransferId,
        mode: Mode,
        *,
        wants_progress: bool = False,
        history: PeerAddress | KeptBlocks | None = None,
    ) -> bytes:
        """Return the client's body, unstreamed, with the prefill role; progress is never told."""
        del wants_progress
        body = _without_report(body)
        return super().prefill_body(body, transfer_id, mode, history=history)

    def decode_body(
        self, body: ParsedBody, offered: msgspec.Raw, retention_s: float | None = None
    ) -> bytes:
        """Return the client's body with what prefill offered, each of its fields as it came."""
        return super().decode_body(_without_report(body), offered, retention_s)


class NixlDialect:
    """vLLM with NixlConnector: prefill is asked for one token, decode gets what it answers.

    What decode keeps for a later turn (``bidirectional_kv_xfer``) is read back once, by the next
    prefill leg.
    """

    traits = DialectTraits(tells_progress=False, ends_transfers=False, checks_offers=False)

    def leg_headers(self, headers: CIMultiDict[str], transfer_id: TransferId) -> CIMultiDict[str]:
        """Return them as they are: prefill's answer names the handoff."""
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
        """Return the client's body, unstreamed, for one token that nobody will see."""
        del transfer_id, mode, wants_progress
        params: dict[str, object] = dict(_NO_PEER)
        if isinstance(history, KeptBlocks) and is_plain_prompt(body):
            params |= _fields_decoder.decode(history.params)
        fields = body.fields | {
            "stream": _FALSE,
            "max_tokens": _ONE,
            TRANSFER_FIELD: _raw(params),
        }
        for name in ("stream_options", "min_tokens", _REPORT_FIELD):
            fields.pop(name, None)
        if "messages" in fields:
            fields["max_completion_tokens"] = _ONE
        return msgspec.json.encode(fields)

    def push_params(
        self, transfer_id: TransferId, peer: PeerAddress, on_failure: OnFailure
    ) -> msgspec.Raw:
        """Raise: this connector pulls only, and its instances say so."""
        raise NotImplementedError(f"{type(self).__name__} does not push")

    def decode_body(
        self, body: ParsedBody, offered: msgspec.Raw, retention_s: float | None = None
    ) -> bytes:
        """Return the client's body with what prefill offered; retention is vLLM's own."""
        del retention_s
        return msgspec.json.encode(_without_report(body).fields | {TRANSFER_FIELD: offered})

    def offered_params(self, prefill_answer: bytes) -> msgspec.Raw | None:
        """Return the offer, None for an answer without one or with one that is not for decode."""
        offered = offer_in(prefill_answer)
        if offered is None:
            return None
        try:
            return offered if _direction_decoder.decode(offered).do_remote_prefill else None
        except (msgspec.DecodeError, RecursionError):
            return None

    def is_not_needed(self, prefill_answer: bytes) -> bool:
        """Return False: prefill always runs to its end."""
        del prefill_answer
        return False

    def kept_blocks(self, body: ParsedBody, decode_answer: bytes) -> KeptBlocks | None:
        """Return the blocks of the prompt that an unstreamed answer names."""
        return kept_blocks_in(decode_answer) if is_plain_prompt(body) else None


class NixlPushDialect(NixlDialect):
    """vLLM with NixlPushConnector: decode names prefill's engine, and both legs the same request.

    The two legs are matched by their request ids, so each attempt has one of its own, whatever the
    client has sent.
    """

    def __init__(self, addresses: Mapping[str, NixlAddress]) -> None:
        self._by_engine = {each.engine_id: each for each in addresses.values()}

    def leg_headers(self, headers: CIMultiDict[str], transfer_id: TransferId) -> CIMultiDict[str]:
        """Return them with the transfer id as the request's."""
        changed = headers.copy()
        changed[REQUEST_ID_HEADER] = transfer_id
        return changed

    def push_params(
        self, transfer_id: TransferId, peer: PeerAddress, on_failure: OnFailure
    ) -> msgspec.Raw:
        """Return where decode registers its blocks; what it does on failure is vLLM's policy."""
        del on_failure
        address = self._by_engine[peer.instance_id]
        return _raw(
            {
                "do_remote_decode": False,
                "do_remote_prefill": True,
                "remote_engine_id": address.engine_id,
                "remote_request_id": transfer_id,
                "remote_block_ids": None,
                "remote_host": address.host,
                "remote_port": address.port,
                "tp_size": address.tp_size,
            }
        )

    def kept_blocks(self, body: ParsedBody, decode_answer: bytes) -> KeptBlocks | None:
        """Return None: this connector reads nothing back."""
        del body, decode_answer
        return None


def dialect_of(engines: EngineConfig) -> Dialect:
    """Return how instances of the configured kind are spoken to."""
    match engines.resolved_kind:
        case EngineKind.VLLM:
            return VllmDialect()
        case EngineKind.VLLM_NIXL:
            return NixlDialect()
        case EngineKind.VLLM_NIXL_PUSH:
            return NixlPushDialect(engines.nixl_addresses)
        case _:
            return KvferryDialect()


def _without_report(body: ParsedBody) -> ParsedBody:
    """Return ``body`` without asking for a report: vLLM makes none."""
    return body.without(_REPORT_FIELD)


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
