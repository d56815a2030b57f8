"""A client of control ports: asks who is there, why nobody answers, and ends offers.

Owns the ZeroMQ context and, for each question, one socket. With a cluster key the instance must
prove that it knows it, and the other way round.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from kvferry.client.control_answer import ControlAnswer, ControlEnd
from kvferry.errors import (
    FerryError,
    IncompatiblePeerError,
    PeerUnreachableError,
    RemoteProtocolError,
)
from kvferry.protocol.codec import decode, derive_curve_keys, encode
from kvferry.protocol.ids import InstanceId, TransferId, new_epoch
from kvferry.protocol.messages import (
    Envelope,
    InstanceInfo,
    InstanceQuery,
    Message,
    Release,
    ReleaseOutcome,
)
from kvferry.protocol.params import PeerAddress

MAX_INFO_BYTES = 256 * 1024
"""Far more than an instance has to say of itself; a larger answer ends the connection."""
_MAX_QUEUED_ANSWERS = 4
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
_HANDSHAKE_FAILED = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)
_WATCHED = (
    zmq.Event.CONNECTED | zmq.Event.HANDSHAKE_SUCCEEDED | _HANDSHAKE_FAILED | zmq.Event.DISCONNECTED
)


@dataclass(slots=True)
class _Connection:
    """What ZeroMQ says has happened to a connection so far."""

    was_connected: bool = False
    is_open: bool = False
    """The handshake is done, so what was sent has been taken."""
    is_refused: bool = False
    """The handshake has failed; ZeroMQ would try again for ever."""

    def note(self, event: int) -> None:
        if event & zmq.Event.CONNECTED:
            self.was_connected = True
        elif event & zmq.Event.HANDSHAKE_SUCCEEDED:
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


class ControlPorts:
    """Questions to control ports. On the event loop, and to be closed."""

    def __init__(self, cluster_key: bytes | None) -> None:
        self._context = zmq.asyncio.Context()
        self._keys = None if cluster_key is None else derive_curve_keys(cluster_key)

    async def ask(self, address: str) -> InstanceInfo:
        """Return what the instance at ``address`` says of itself; the caller sets the deadline.

        A new connection each time: what is asked for is whoever answers there now. Raises as
        ``tell``, and ``RemoteProtocolError`` for another answer.
        """
        message = (await self.tell(address, InstanceQuery())).message
        if not isinstance(message, InstanceInfo):
            raise RemoteProtocolError(f"{type(message).__name__} in answer to who is there")
        return message

    async def tell(self, address: str, message: Message) -> Envelope:
        """Send ``message`` to ``address`` and return the answer; the caller sets the deadline.

        Raises ``PeerUnreachableError`` for an address that can't be used, ``RemoteProtocolError``
        or ``IncompatiblePeerError`` for an answer that can't. A port where nobody answers, or
        nobody with the same cluster key, never does.
        """
        try:
            with self._socket() as socket:
                socket.connect(address)
                return await _exchange(socket, _SEQUENCE, message)
        except zmq.ZMQError as error:
            raise PeerUnreachableError(f"control port {address}: {error}") from error

    async def find_out(self, address: str, timeout_s: float) -> ControlAnswer:
        """Return who answers at ``address`` within ``timeout_s``, or why nobody does.

        What ZeroMQ does on a connection (connected, handshake failed) says what a mere silence
        would not: that nobody listens, or that the cluster key is another one. What is no answer
        may be another program's: so the port is then asked once more, plainly, whether it speaks
        ZeroMQ's protocol at all.
        """
        found = await self._find_out(address, timeout_s)
        greeting_wait_s = min(timeout_s, _MAX_GREETING_WAIT_S)
        if found.end in _NO_ANSWERS and await _is_other_program(address, greeting_wait_s):
            return ControlAnswer(address=address, end=ControlEnd.OTHER_PROGRAM)
        return found

    async def _find_out(self, address: str, timeout_s: float) -> ControlAnswer:
        connection, end_s = _Connection(), time.monotonic() + timeout_s
        with self._socket() as socket:
            monitor = socket.get_monitor_socket(_WATCHED)
            refused = asyncio.ensure_future(_refused(monitor, connection))
            answered = asyncio.ensure_future(_answered(socket, address))
            both = (refused, answered)
            try:
                await asyncio.wait(both, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                if not answered.done():
                    end = connection.end(has_key=self._keys is not None)
                    return ControlAnswer(address=address, end=end)
                found = answered.result()
                if found.end is not ControlEnd.ANSWERED:
                    return found
                left_s = end_s - time.monotonic()
                return replace(found, round_trip_s=await _round_trip_s(socket, left_s))
            finally:
                for task in both:
                    task.cancel()
                await asyncio.gather(*both, return_exceptions=True)
                socket.disable_monitor()
                monitor.close(linger=0)

    async def cancel(
        self,
        by: InstanceId,
        transfer_id: TransferId,
        holders: Sequence[PeerAddress],
        limit_s: float,
    ) -> bool:
        """Have every holder drop what it offers under ``transfer_id``, as its receiver would.

        ``holders`` has each rank of an instance. Returns whether all have answered, each within
        ``limit_s``. A holder of another epoch has nothing to drop, and says so alike.
        """
        told = await asyncio.gather(
            *(self._cancel(by, transfer_id, holder, limit_s) for holder in holders)
        )
        return all(told)

    async def _cancel(
        self, by: InstanceId, transfer_id: TransferId, holder: PeerAddress, limit_s: float
    ) -> bool:
        message = Release(by, new_epoch(), transfer_id, holder.epoch, ReleaseOutcome.CANCELLED)
        try:
            async with asyncio.timeout(limit_s):
                await self.tell(holder.control_address, message)
        except (TimeoutError, FerryError):
            return False
        return True

    def close(self) -> None:
        """Close all."""
        self._context.destroy(linger=0)

    @contextlib.contextmanager
    def _socket(self) -> Iterator[zmq.asyncio.Socket]:
        socket: zmq.asyncio.Socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_INFO_BYTES)
        socket.setsockopt(zmq.RCVHWM, _MAX_QUEUED_ANSWERS)
        if self._keys is not None:
            self._keys.prove_to_server(socket)
        try:
            yield socket
        finally:
            socket.close(linger=0)


async def _exchange(socket: zmq.asyncio.Socket, sequence: int, message: Message) -> Envelope:
    """Send a message and return its answer. Raises as ``ControlPorts.tell``."""
    await socket.send(encode(sequence, message))
    while True:
        frames = await socket.recv_multipart()
        if len(frames) != 1:
            raise RemoteProtocolError(f"an answer of {len(frames)} frames")
        envelope = decode(frames[0])
        if envelope.sequence == sequence:
            return envelope


async def _refused(monitor: zmq.asyncio.Socket, connection: _Connection) -> None:
    """Note what happens to a connection, and return once the other side refuses it."""
    while not connection.is_refused:
        message = await recv_monitor_message(monitor)
        connection.note(int(message["event"]))


async def _answered(socket: zmq.asyncio.Socket, address: str) -> ControlAnswer:
    """Return what whoever accepts the connection answers to who is there."""
    try:
        socket.connect(address)
        envelope = await _exchange(socket, _SEQUENCE, InstanceQuery())
    except zmq.ZMQError as error:
        return ControlAnswer(address=address, end=ControlEnd.BAD_ADDRESS, detail=str(error))
    except IncompatiblePeerError as error:
        detail = f"it speaks protocol version {error.theirs}"
        return ControlAnswer(address=address, end=ControlEnd.NOT_UNDERSTOOD, detail=detail)
    except FerryError as error:
        return ControlAnswer(address=address, end=ControlEnd.NOT_UNDERSTOOD, detail=str(error))
    if not isinstance(envelope.message, InstanceInfo):
        detail = f"a {type(envelope.message).__name__}"
        return ControlAnswer(address=address, end=ControlEnd.NOT_UNDERSTOOD, detail=detail)
    return ControlAnswer(
        address=address,
        end=ControlEnd.ANSWERED,
        protocol_version=envelope.version,
        info=envelope.message,
    )


async def _round_trip_s(socket: zmq.asyncio.Socket, limit_s: float) -> float | None:
    """Ask again, over the connection that is there by now; None: no answer within ``limit_s``."""
    started_s = time.monotonic()
    try:
        async with asyncio.timeout(limit_s):
            await _exchange(socket, _SEQUENCE + 1, InstanceQuery())
    except (TimeoutError, FerryError):
        return None
    return time.monotonic() - started_s


async def _is_other_program(address: str, limit_s: float) -> bool:
    """Whether something is heard at ``address`` that does not begin as ZeroMQ does."""
    try:
        parts = urlsplit(address)
        async with asyncio.timeout(limit_s):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            with contextlib.closing(writer):
                writer.write(_SIGNATURE + _PROVOCATION)
                # One that only closes may be a forwarder with nobody behind it.
                return await reader.read(1) not in (b"", _SIGNATURE[:1])
    except (OSError, ValueError):
        return False  # Nothing was heard, which a process that stands still would do too.
