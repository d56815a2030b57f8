"""Signatures of HTTP bodies that carry ``kv_transfer_params``, made with the cluster key.

The header says ``t=<unix expiry seconds>,id=<transfer id>,v1=<hex>``, where v1 is HMAC-SHA256 over
expiry, transfer id and BLAKE2b-256 of the raw body (byte by byte in ``docs/protocol.md``). The
expiry is a wall-clock time, as any machine may check it; the caller passes the time in.
"""

from __future__ import annotations

import hashlib
import hmac
import re

from kvferry.errors import LocalProtocolError, RemoteProtocolError
from kvferry.protocol.ids import MAX_TRANSFER_ID_CHARS, TRANSFER_ID_PATTERN, TransferId

SIGNATURE_HEADER = "X-Kvferry-Signature"
SIGNATURE_VALIDITY_S = 60
"""How long what is signed now may be on its way."""

_HEADER = re.compile(r"t=([0-9]{1,15}),id=([^,]+),v1=([0-9a-f]{64})", re.ASCII)


def sign(key: bytes, body: bytes, transfer_id: TransferId, expires_at_s: int) -> str:
    """Return the header's value for ``body``, good until ``expires_at_s`` (unix seconds).

    Raises ``LocalProtocolError`` for an id or a time that does not fit the header.
    """
    if not _is_transfer_id(transfer_id):
        raise LocalProtocolError(f"transfer id {transfer_id!r} does not fit a header")
    if not 0 <= expires_at_s < 10**15:
        raise LocalProtocolError(f"expiry {expires_at_s} is not a time in unix seconds")
    return f"t={expires_at_s},id={transfer_id},v1={_mac(key, body, transfer_id, expires_at_s)}"


def signature_headers(
    key: bytes | None, body: bytes, transfer_id: TransferId, now_s: float
) -> dict[str, str]:
    """Return the headers that sign ``body`` at ``now_s`` (unix seconds): none without a key.

    Raises as ``sign``.
    """
    if key is None:
        return {}
    expires_at_s = int(now_s) + SIGNATURE_VALIDITY_S
    return {SIGNATURE_HEADER: sign(key, body, transfer_id, expires_at_s)}


def verify(key: bytes, body: bytes, header: str, now_s: float) -> TransferId:
    """Return the transfer id that ``header`` signs for ``body`` at ``now_s`` (unix seconds).

    Raises ``RemoteProtocolError`` if it is malformed, wrong or expired. That the body's own
    ``transfer_id`` is the same is for the caller to check.
    """
    match = _HEADER.fullmatch(header)
    if match is None or not _is_transfer_id(match[2]):
        raise RemoteProtocolError("the signature header is malformed")
    expires_at_s, transfer_id = int(match[1]), TransferId(match[2])
    # Before the expiry, so that what a wrong key is told does not depend on the time.
    if not hmac.compare_digest(_mac(key, body, transfer_id, expires_at_s), match[3]):
        raise RemoteProtocolError("the signature does not fit the body")
    if now_s >= expires_at_s:
        raise RemoteProtocolError("the signature has expired")
    return transfer_id


def _is_transfer_id(text: str) -> bool:
    return len(text) <= MAX_TRANSFER_ID_CHARS and bool(re.match(TRANSFER_ID_PATTERN, text))


def _mac(key: bytes, body: bytes, transfer_id: TransferId, expires_at_s: int) -> str:
    encoded_id = transfer_id.encode("ascii")
    signed = b"".join(
        (
            b"kvferry-http-v1\n",
            expires_at_s.to_bytes(8, "little"),
            len(encoded_id).to_bytes(8, "little"),
            encoded_id,
            hashlib.blake2b(body, digest_size=32, person=b"kvferry-body").digest(),
        )
    )
    return hmac.new(key, signed, hashlib.sha256).hexdigest()
