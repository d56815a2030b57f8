"""Asks one control port who is there, and finds out why it does not answer.

Owns a socket and its monitor for one question; blocks for at most the given time. What ZeroMQ does
on a connection (connected, handshake failed) says what a mere silence would not: that nobody
listens, or that the cluster key is another one. What is no answer may be another program's: so the
port is then asked once more, plainly, whether it speaks ZeroMQ's protocol at all.
"""

from __future__ import annotations

import socket as plain_socket
import time
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvferry.doctor.facts import ControlEnd, ControlFacts
from kvferry.errors import FerryError, IncompatiblePeerError
from kvferry.protocol.codec import MAX_MESSAGE_BYTES, decode, encode
from kvferry.protocol.curve_keys import derive_curve_keys
from kvferry.protocol.messages import InstanceInfo, InstanceQuery

_SEQUENCE = 1
_SIGNATURE = b"\xff\0\0\0\0\0\0\0\1\x7f"
"""What either side of ZeroMQ's protocol sends first."""
_PROVOCATION = b"\r\n\r\n"
"""Ends the first line and the head of whatever else the port may wait for."""
_MAX_GREETING_WAIT_S = 1.0
_NO_ANSWERS = frozenset(
    {
        ControlEnd.KEY_REFUSED,
        ControlEnd.KEY_WANTED,
        ControlEnd.SILENT,
        ControlEnd.NOT_UNDERSTOOD,
    }
)
_CONNECTED = zmq.Event.CONNECTED
_HANDSHAKE_DONE = zmq.Event.HANDSHAKE_SUCCEEDED
_HANDSHAKE_FAILED = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)
_WATCHED = _CONNECTED | _HANDSHAKE_DONE | _HANDSHAKE_FAILED | zmq.Event.DISCONNECTED


@dataclass(slots=True)
class _Connection:
    """What has happened to the connection so far."""

    was_connected: bool = False
    is_open: bool = False
    """The handshake is done, so what was sent has been taken."""
    is_refused: bool = False
    """The handshake has failed; ZeroMQ would try again for ever."""

    def note(self, event: int) -> None:
        if event & _CONNECTED:
            self.was_connected = True
        elif event & _HANDSHAKE_DONE:
            self.is_open = True
        elif event & _HANDSHAKE_FAILED or (event & zmq.Event.DISCONNECTED and not self.is_open):
            self.is_refused = True

    def end(self, *, has_key: bool) -> ControlEnd:
        """How a question without an answer has ended."""
        if self.is_open:
            return ControlEnd.SILENT
        if self.is_refused:
            return ControlEnd.KEY_REFUSED if has_key else ControlEnd.KEY_WANTED
        return ControlEnd.SILENT if self.was_connected else ControlEnd.NOBODY


def ask_control_port(address: str, cluster_key: bytes | None, timeout_s: float) -> ControlFacts:
    """Return what answers at ``address`` (``tcp://host:port``) within ``timeout_s``."""
    found = _ask(address, cluster_key, timeout_s)
    if found.end in _NO_ANSWERS and _is_other_program(
        address, min(timeout_s, _MAX_GREETING_WAIT_S)
    ):
        return ControlFacts(address=address, end=ControlEnd.OTHER_PROGRAM)
    return found


def _ask(address: str, cluster_key: bytes | None, timeout_s: float) -> ControlFacts:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = control_socket(context, cluster_key)
    monitor = socket.get_monitor_socket(_WATCHED)
    try:
        socket.connect(address)
        socket.send(encode(_SEQUENCE, InstanceQuery()))
        has_key, deadline = cluster_key is not None, _Deadline(timeout_s)
        found = _wait(address, socket, monitor, deadline, has_key=has_key)
        if found.end is ControlEnd.ANSWERED:
            found = replace(found, round_trip_s=_round_trip_s(socket, deadline))
        return found
    except zmq.ZMQError as error:
        return ControlFacts(address=address, end=ControlEnd.BAD_ADDRESS, detail=str(error))
    finally:
        socket.disable_monitor()
        monitor.close(0)
        socket.close(0)
        context.term()


def _is_other_program(address: str, timeout_s: float) -> bool:
    """Whether something is heard at ``address`` that does not begin as ZeroMQ does."""
    try:
        parts = urlsplit(address)
        asked = (parts.hostname or "", parts.port or 0)
        with plain_socket.create_connection(asked, timeout_s) as connection:
            connection.sendall(_SIGNATURE + _PROVOCATION)
            # One that only closes may be a forwarder with nobody behind it.
            return connection.recv(1) not in (b"", _SIGNATURE[:1])
    except (OSError, ValueError):
        return False  # Nothing was heard, which a process that stands still would do too.


class _Deadline:
    def __init__(self, timeout_s: float) -> None:
        self._end_s = time.monotonic() + timeout_s

    def left_ms(self) -> int:
        return max(0, int(1e3 * (self._end_s - time.monotonic())))


def control_socket(
    context: zmq.Context[zmq.Socket[bytes]], cluster_key: bytes | None
) -> zmq.Socket[bytes]:
    """Return a socket for one control port, which must have the same cluster key."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    if cluster_key is not None:
        keys = derive_curve_keys(cluster_key)
        socket.curve_serverkey = keys.public
        socket.curve_publickey = keys.public
        socket.curve_secretkey = keys.secret
    return socket


def _wait(
    address: str,
    socket: zmq.Socket[bytes],
    monitor: zmq.Socket[bytes],
    deadline: _Deadline,
    *,
    has_key: bool,
) -> ControlFacts:
    connection = _Connection()
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(monitor, zmq.POLLIN)
    while not connection.is_refused:
        ready = dict(poller.poll(deadline.left_ms()))
        if not ready:
            break
        # The monitor first: when both are ready the handshake came before the answer.
        if monitor in ready:
            message = recv_monitor_message(monitor, zmq.NOBLOCK)
            connection.note(int(message["event"]))
        elif socket in ready:
            return _answered(address, socket.recv_multipart(zmq.NOBLOCK))
    return ControlFacts(address=address, end=connection.end(has_key=has_key))


def _round_trip_s(socket: zmq.Socket[bytes], deadline: _Deadline) -> float | None:
    """Ask again, over the connection that is there by now; None: no answer in the time left."""
    started_s = time.monotonic()
    socket.send(encode(_SEQUENCE + 1, InstanceQuery()))
    if not socket.poll(deadline.left_ms()):
        return None
    return time.monotonic() - started_s


def _answered(address: str, frames: list[bytes]) -> ControlFacts:
    try:
        envelope = decode(frames[-1])
    except IncompatiblePeerError as error:
        return _not_understood(address, f"it speaks protocol version {error.theirs}")
    except FerryError as error:
        return _not_understood(address, str(error))
    if not isinstance(envelope.message, InstanceInfo):
        return _not_understood(address, f"a {type(envelope.message).__name__}")
    return ControlFacts(
        address=address,
        end=ControlEnd.ANSWERED,
        protocol_version=envelope.version,
        info=envelope.message,
    )


def _not_understood(address: str, detail: str) -> ControlFacts:
    return ControlFacts(address=address, end=ControlEnd.NOT_UNDERSTOOD, detail=detail)
