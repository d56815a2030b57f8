"""What the two legs of a request say to an engine: bodies out, transfer parameters back.

Knows JSON fields only; a dialect is pure. What prefill offers is relayed as the bytes that came,
fields unknown here included.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from kvferry.protocol.ids import TransferId
from kvferry.protocol.params import KvTransferParams, Mode, Role, emit_params
from kvferry.router.parsing import TRANSFER_FIELD, ParsedBody

_FALSE = msgspec.Raw(b"false")
_TRANSFER_FIELD_BYTES = TRANSFER_FIELD.encode()


class Dialect(Protocol):
    """How one kind of engine is asked for the two legs of a handoff."""

    def prefill_body(self, body: ParsedBody, transfer_id: TransferId, mode: Mode) -> bytes:
        """Return the body of a prefill leg."""
        ...

    def decode_body(self, body: ParsedBody, offered: msgspec.Raw) -> bytes:
        """Return the body of a decode leg that takes what prefill ``offered``."""
        ...

    def offered_params(self, prefill_answer: bytes) -> msgspec.Raw | None:
        """Return the transfer parameters in a prefill answer, None when it has none."""
        ...


_NOTHING = msgspec.Raw(b"")


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = _NOTHING


_prefill_answer_decoder = msgspec.json.Decoder(_PrefillAnswer)
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


class KvferryDialect:
    """kvferry engines: the client's body with ``kv_transfer_params`` added.

    A prefill leg keeps the sampling parameters: the engine itself ends a prefill request after one
    token and samples that token as the client asked.
    """

    def prefill_body(self, body: ParsedBody, transfer_id: TransferId, mode: Mode) -> bytes:
        """Return the client's body, unstreamed, with the prefill role."""
        params = KvTransferParams(transfer_id=transfer_id, role=Role.PREFILL, mode=mode)
        # The mode is written although it is the default: an engine reads what it is told.
        emitted = {**emit_params(params), "mode": mode.value}
        fields = body.fields | {
            "stream": _FALSE,
            TRANSFER_FIELD: msgspec.Raw(msgspec.json.encode(emitted)),
        }
        fields.pop("stream_options", None)
        return msgspec.json.encode(fields)

    def decode_body(self, body: ParsedBody, offered: msgspec.Raw) -> bytes:
        """Return the client's body with what prefill offered, byte for byte."""
        return msgspec.json.encode(body.fields | {TRANSFER_FIELD: offered})

    def offered_params(self, prefill_answer: bytes) -> msgspec.Raw | None:
        """Return the offer; an answer that is not a JSON object, or has none, offers nothing."""
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
