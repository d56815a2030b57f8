"""What both ends of a control connection share: the encoding of messages, and the keys.

The size limit is checked first. A message of an unsupported version is told apart from a malformed
one: the version is decoded from the envelope's header before the body is looked at.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
from zmq.utils import z85

from kvferry.errors import IncompatiblePeerError, LocalProtocolError, RemoteProtocolError
from kvferry.protocol.ids import PROTOCOL_VERSION, is_supported
from kvferry.protocol.messages import Envelope, Message

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


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A CurveZMQ key pair in Z85 text."""

    public: bytes
    secret: bytes

    def prove_to_server(self, socket: zmq.Socket[Any]) -> None:
        """Have an unconnected socket reach only who has these keys, too."""
        socket.curve_serverkey = self.public
        self._identify(socket)

    def demand_from_clients(self, socket: zmq.Socket[Any]) -> None:
        """Have an unbound socket talk CurveZMQ; who is let in, an authenticator says."""
        socket.curve_server = True
        self._identify(socket)

    def _identify(self, socket: zmq.Socket[Any]) -> None:
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret


def derive_curve_keys(cluster_key: bytes) -> CurveKeys:
    """Return the key pair that everyone with this cluster key has."""
    raw = hashlib.blake2b(cluster_key, digest_size=32, person=b"kvferry-curve").digest()
    secret = z85.encode(raw)
    return CurveKeys(zmq.curve_public(secret), secret)
