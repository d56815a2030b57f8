"""The envelope of link metadata: a mark, a digest and a msgpack struct. Never pickled.

Whatever a newer peer adds is ignored: fields of a map, elements at the end of an array.

The digest guards against damage, not against forgery: who may send metadata at all is decided by
the control plane.
"""

from __future__ import annotations

import hashlib
from typing import TypeVar

import msgspec

from kvferry.errors import IncompatiblePeerError, LocalProtocolError, RemoteProtocolError

MAX_METADATA_BYTES = 256 * 1024
_MARK = b"kvferry-link-1:"
_DIGEST_BYTES = 16

T = TypeVar("T")


def encode_metadata(metadata: msgspec.Struct) -> bytes:
    """Return the bytes that a peer's ``decode_metadata`` takes.

    Raises ``LocalProtocolError`` if they would be too many.
    """
    payload = msgspec.msgpack.encode(metadata)
    encoded = _MARK + _digest(payload) + payload
    if len(encoded) > MAX_METADATA_BYTES:
        raise LocalProtocolError(f"link metadata of {len(encoded)} bytes is too large")
    return encoded


def decode_metadata(data: bytes, kind: type[T]) -> T:
    """Return the struct in ``data``.

    Raises ``RemoteProtocolError`` for anything damaged, ``IncompatiblePeerError`` for what has
    arrived as it was meant and means nothing here: another transport's, or a newer kind of memory.
    """
    if len(data) > MAX_METADATA_BYTES:
        raise RemoteProtocolError(f"link metadata of {len(data)} bytes is too large")
    head = len(_MARK) + _DIGEST_BYTES
    payload = bytes(data[head:])
    if data[: len(_MARK)] != _MARK or data[len(_MARK) : head] != _digest(payload):
        raise RemoteProtocolError("malformed link metadata")
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except msgspec.ValidationError as error:
        raise IncompatiblePeerError("transport_metadata", kind.__name__, str(error)) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"malformed link metadata: {error}") from error


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=_DIGEST_BYTES).digest()
