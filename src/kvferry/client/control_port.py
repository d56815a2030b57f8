"""Asks an instance at its control port who it is, where its HTTP side does not say.

Owns the ZeroMQ context and, for each question, one socket. Nothing else is ever sent to a control
port. With a cluster key the instance must prove that it knows it, and the other way round.
"""

from __future__ import annotations

import zmq
import zmq.asyncio

from kvferry.errors import PeerUnreachableError, RemoteProtocolError
from kvferry.protocol.codec import decode, encode
from kvferry.protocol.curve_keys import derive_curve_keys
from kvferry.protocol.messages import InstanceInfo, InstanceQuery

MAX_INFO_BYTES = 256 * 1024
"""Far more than an instance has to say of itself; a larger answer ends the connection."""
_MAX_QUEUED_ANSWERS = 4
_SEQUENCE = 1


class ControlPorts:
    """Questions to control ports. On the event loop, and to be closed."""

    def __init__(self, cluster_key: bytes | None) -> None:
        self._context = zmq.asyncio.Context()
        self._keys = None if cluster_key is None else derive_curve_keys(cluster_key)

    async def ask(self, address: str) -> InstanceInfo:
        """Return what the instance at ``address`` says of itself; the caller sets the deadline.

        A new connection each time: what is asked for is whoever answers there now. Raises
        ``PeerUnreachableError`` for an address that can't be used, ``RemoteProtocolError`` or
        ``IncompatiblePeerError`` for an answer that can't. A port where nobody answers, or nobody
        with the same cluster key, never does.
        """
        socket = self._socket()
        try:
            socket.connect(address)
            await socket.send(encode(_SEQUENCE, InstanceQuery()))
            while True:
                frames = await socket.recv_multipart()
                if len(frames) != 1:
                    raise RemoteProtocolError(f"an answer of {len(frames)} frames")
                envelope = decode(frames[0])
                if envelope.sequence == _SEQUENCE:
                    break
        except zmq.ZMQError as error:
            raise PeerUnreachableError(f"control port {address}: {error}") from error
        finally:
            socket.close(linger=0)
        if not isinstance(envelope.message, InstanceInfo):
            kind = type(envelope.message).__name__
            raise RemoteProtocolError(f"{kind} in answer to who is there")
        return envelope.message

    def close(self) -> None:
        """Close all."""
        self._context.destroy(linger=0)

    def _socket(self) -> zmq.asyncio.Socket:
        socket: zmq.asyncio.Socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_INFO_BYTES)
        socket.setsockopt(zmq.RCVHWM, _MAX_QUEUED_ANSWERS)
        if self._keys is not None:
            socket.curve_serverkey = self._keys.public
            socket.curve_publickey = self._keys.public
            socket.curve_secretkey = self._keys.secret
        return socket
