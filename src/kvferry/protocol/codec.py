"""Encode and decode control messages, with the size limit checked first.

A message of an unsupported version is told apart from a malformed one: the version is decoded from
the envelope's header before the body is looked at.
"""

from __future__ import annotations

import msgspec

from kvferry.errors import IncompatiblePeerError, LocalProtocolError, RemoteProtocolError
from kvferry.protocol.messages import Envelope, Message
from kvferry.protocol.version import PROTOCOL_VERSION, is_supported

MAX_MESSAGE_BYTES = 4 * 1024 * 1024


class _Header(msgspec.Struct, frozen=True):
    version: int
    sequence: int


_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(_Header)
_envelope_decoder = msgspec.msgpack.Decoder(Envelope)


def encode(sequence: int, message: Message) -> bytes:
    """Return the bytes of one message. Raises ``LocalProtocolError`` if it is too large to send."""
    encoded = _encoder.encode(Envelope(PROTOCOL_VERSION, sequence, message))
    if len(encoded) > MAX_MESSAGE_BYTES:
        raise LocalProtocolError(
            f"a {type(message).__name__} of {len(encoded)} bytes exceeds {MAX_MESSAGE_BYTES}"
        )
    return encoded


def decode(data: bytes | memoryview) -> Envelope:
    """Return the envelope in ``data``.

    Raises ``RemoteProtocolError`` for anything oversized or malformed, ``IncompatiblePeerError``
    for a version that this process does not speak.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise RemoteProtocolError(f"message of {len(data)} bytes exceeds {MAX_MESSAGE_BYTES}")
    try:
        header = _header_decoder.decode(data)
        if not is_supported(header.version):
            raise IncompatiblePeerError("protocol_version", PROTOCOL_VERSION, header.version)
        return _envelope_decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise RemoteProtocolError(f"malformed message: {error}") from error
