"""The control sockets: one that peers talk to, one per peer that is talked to.

Owns framing, limits and authentication. Knows nothing of what the messages mean. All sockets belong
to the mover's thread. With a cluster key both ends prove by CurveZMQ that they know it, and all is
encrypted; the key pair is derived from the cluster key, so both sides have the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import zmq
from zmq.auth.thread import ThreadAuthenticator

from kvferry.connector.config import ExchangeConfig, endpoint
from kvferry.errors import (
    CapacityError,
    ConfigError,
    FerryError,
    IncompatiblePeerError,
    RemoteProtocolError,
)
from kvferry.protocol import messages
from kvferry.protocol.codec import MAX_MESSAGE_BYTES, decode, derive_curve_keys, encode

MAX_QUEUED_MESSAGES = 10_000
MAX_MESSAGES_PER_TURN = 256
"""Read from one socket before the others, and transfers, get their turn."""
CLOSE_LINGER_MS = 200
MAX_RECONNECT_INTERVAL_MS = 5000
"""A peer that is gone is not called ten times a second for ever."""

CountMalformed = Callable[[str], None]
"""Called with ``malformed`` or ``version`` for each message that is dropped."""


class _OnlyOurKey:
    """Accepts clients that hold the cluster's secret key, by its public half."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, _domain: str, key: bytes) -> bool:
        """Whether ``key`` (Z85) is the cluster's."""
        return key == self._public


class ControlContext:
    """The ZeroMQ context of one instance, with authentication where there is a cluster key.

    ``poller`` has all of its sockets in it.
    """

    def __init__(
        self, cluster_key: bytes | None, count_malformed: CountMalformed = lambda _: None
    ) -> None:
        self.count_malformed = count_malformed
        self.poller = zmq.Poller()
        self._context = zmq.Context()
        self._keys = derive_curve_keys(cluster_key) if cluster_key is not None else None
        self._authenticator: ThreadAuthenticator | None = None
        if self._keys is not None:
            self._authenticator = ThreadAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback(
                "*", credentials_provider=_OnlyOurKey(self._keys.public)
            )

    def server_socket(self) -> zmq.Socket[bytes]:
        """Return an unbound ROUTER."""
        socket = self._socket(zmq.ROUTER)
        if self._keys is not None:
            self._keys.demand_from_clients(socket)
        return socket

    def client_socket(self) -> zmq.Socket[bytes]:
        """Return an unconnected DEALER."""
        socket = self._socket(zmq.DEALER)
        if self._keys is not None:
            self._keys.prove_to_server(socket)
        return socket

    def close(self) -> None:
        """Close what is left open; all sockets must be closed before."""
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.LINGER, CLOSE_LINGER_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_INTERVAL_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
        socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
        return socket


@dataclass(frozen=True, slots=True)
class Received:
    """One request and where its reply goes."""

    identity: bytes
    envelope: messages.Envelope


class ControlServer:
    """The socket that peers send requests to."""

    def __init__(self, context: ControlContext, config: ExchangeConfig) -> None:
        self.socket = context.server_socket()
        self._context = context
        bound = endpoint(config.control_host, config.control_port)
        try:
            self.socket.bind(bound if config.control_port else bound.rsplit(":", 1)[0] + ":*")
        except zmq.ZMQError as error:
            self.socket.close(0)
            raise ConfigError(f"the control port cannot be opened at {bound}: {error}") from error
        last = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        port = int(last.rsplit(":", 1)[1])
        self.address = endpoint(config.advertise_host or config.control_host, port)
        context.poller.register(self.socket, zmq.POLLIN)

    def receive(self) -> list[Received]:
        """Return the well-formed requests that have arrived; others are counted and dropped."""
        arrived = _receive(self._context, self.socket, num_frames=2)
        return [Received(frames[0], envelope) for frames, envelope in arrived]

    def reply(self, to: Received, message: messages.Message) -> None:
        """Answer a request. A peer that has gone, or reads nothing, loses its reply."""
        data = encode(to.envelope.sequence, message)
        try:
            self.socket.send_multipart([to.identity, data], zmq.NOBLOCK)
        except zmq.Again:
            self._context.count_malformed("reply_dropped")

    def notify(self, identity: bytes, notice: messages.Notice) -> None:
        """Send a notice; one that is lost is asked for again by the receiver's heartbeat."""
        try:
            self.socket.send_multipart(
                [identity, encode(messages.NOTICE_SEQUENCE, notice)], zmq.NOBLOCK
            )
        except zmq.Again:
            self._context.count_malformed("notice_dropped")

    def close(self) -> None:
        """Close the socket; the port is free afterwards."""
        self._context.poller.unregister(self.socket)
        self.socket.close()


class ControlClient:
    """The socket to one peer."""

    def __init__(self, context: ControlContext, address: str) -> None:
        try:
            self.socket = context.client_socket()
        except zmq.ZMQError as error:
            raise CapacityError(f"no socket for {address!r}: {error}") from error
        self._context = context
        self._next_sequence = 0
        try:
            self.socket.connect(address)
        except zmq.ZMQError as error:
            self.socket.close(0)
            raise RemoteProtocolError(f"control address {address!r}: {error}") from error
        context.poller.register(self.socket, zmq.POLLIN)

    def send(self, message: messages.Message) -> int | None:
        """Send without waiting; return the sequence number, or None if the queue is full."""
        self._next_sequence += 1
        try:
            self.socket.send(encode(self._next_sequence, message), zmq.NOBLOCK)
        except zmq.Again:
            return None
        return self._next_sequence

    def receive(self) -> list[messages.Envelope]:
        """Return the well-formed replies that have arrived."""
        return [envelope for _, envelope in _receive(self._context, self.socket, num_frames=1)]

    def close(self) -> None:
        """Close the socket; what is queued is sent for at most the linger time."""
        self._context.poller.unregister(self.socket)
        self.socket.close()


def _receive(
    context: ControlContext, socket: zmq.Socket[bytes], *, num_frames: int
) -> Iterator[tuple[list[bytes], messages.Envelope]]:
    """Yield what has arrived. A message that cannot be used is the peer's fault: it is counted and
    dropped, and must not end this thread."""
    for _ in range(MAX_MESSAGES_PER_TURN):
        try:
            frames = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        if len(frames) != num_frames:
            context.count_malformed("malformed")
            continue
        try:
            envelope = decode(frames[-1])
        except IncompatiblePeerError:
            context.count_malformed("version")
        except FerryError:
            context.count_malformed("malformed")
        else:
            yield frames, envelope
