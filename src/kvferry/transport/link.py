"""What all links have in common: states, checks, the fate of transfers when a link ends, and the
envelope of their metadata.

Knows nothing of how bytes move; a transport fills in the underscored methods.
"""

from __future__ import annotations

import abc
import enum
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from kvferry.errors import (
    FerryError,
    IncompatiblePeerError,
    LocalProtocolError,
    PeerUnreachableError,
    ProtocolError,
    RemoteProtocolError,
    TransferError,
)
from kvferry.transport.base import Link, Transfer, TransferStatus
from kvferry.transport.geometry import Geometry, Indices, block_bytes_of, pair_blocks
from kvferry.transport.peer_watch import PeerWatch

MAX_METADATA_BYTES = 256 * 1024
_MARK = b"kvferry-link-1:"
_DIGEST_BYTES = 16

T = TypeVar("T")


class Operation(enum.StrEnum):
    """Direction of a transfer, seen from the side that posts it."""

    READ = "READ"
    WRITE = "WRITE"


class LinkState(enum.Enum):
    """Where a link is in its life."""

    OPEN = "open"
    CONNECTED = "connected"
    BROKEN = "broken"
    """An error ended it: only disconnecting is left."""
    CLOSED = "closed"


class Work(abc.ABC):
    """What a transport has to do for one transfer."""

    @abc.abstractmethod
    def advance(self) -> TransferStatus:
        """Go on with it. Raises ``TransferError`` or ``ProtocolError`` as another way of ERROR."""

    @abc.abstractmethod
    def free(self) -> None:
        """Give back the resources of work that is DONE."""


@dataclass(slots=True, eq=False)
class PostedTransfer(Transfer):
    """A transfer that a ``TrackedLink`` made; ``status`` is what the last poll saw."""

    owner: TrackedLink
    num_bytes: int
    work: Work | None
    status: TransferStatus = TransferStatus.IN_PROGRESS


class TrackedLink(Link):
    """A link that keeps count of its own transfers.

    An error of one transfer ends the whole link, because only tearing our end down proves that
    nothing which was posted can still land. So ERROR, like DONE, means that memory is free of it.
    """

    def __init__(self, peer_name: str, geometry: Geometry, *, peer_writes: bool) -> None:
        self.peer_name = peer_name
        self.state = LinkState.OPEN
        self._geometry = geometry
        self._peer_geometry: Geometry = ()
        self._peer_writes = peer_writes
        self._watch: PeerWatch | None = None
        self._has_ended = False
        self._transfers: set[PostedTransfer] = set()

    # -- what a transport fills in -------------------------------------------------------------
    @abc.abstractmethod
    def _attach(self, peer_metadata: bytes) -> None:
        """Connect, and set ``_peer_geometry`` and, where it can be watched, ``_watch``."""

    @abc.abstractmethod
    def _post(self, operation: Operation, local: Indices, remote: Indices) -> Work:
        """Post a transfer of at least one block."""

    @abc.abstractmethod
    def _end(self) -> bool:
        """Tear our end down; return whether nothing of ours is posted any more. Repeatable."""

    @abc.abstractmethod
    def _say_done(self) -> None:
        """Tell the peer, where it can be told, that our end is torn down. Repeatable."""

    # -- Link ----------------------------------------------------------------------------------
    def connect(self, peer_metadata: bytes) -> None:
        """Attach to the peer's end; after an error only disconnecting is left."""
        if self.state is not LinkState.OPEN:
            raise LocalProtocolError(f"connect on a link that is {self.state.value}")
        try:
            self._attach(peer_metadata)
        except FerryError:
            self._break()
            raise
        self.state = LinkState.CONNECTED

    def read(self, local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> Transfer:
        """Post a READ."""
        return self._start(Operation.READ, local_blocks, remote_blocks)

    def write(self, local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> Transfer:
        """Post a WRITE."""
        return self._start(Operation.WRITE, local_blocks, remote_blocks)

    def poll(self, transfer: Transfer) -> TransferStatus:
        """Advance and return the state of ``transfer``."""
        posted = self._own(transfer)
        if posted.status is not TransferStatus.IN_PROGRESS or posted.work is None:
            return posted.status
        try:
            posted.status = posted.work.advance()
        except (TransferError, ProtocolError):
            self._break()
        else:
            if posted.status is TransferStatus.ERROR:
                posted.status = TransferStatus.IN_PROGRESS
                self._break()
        return posted.status

    def release(self, transfer: Transfer) -> None:
        """Give back a terminal transfer's resources."""
        posted = self._own(transfer)
        if posted.status is TransferStatus.IN_PROGRESS:
            raise LocalProtocolError("release of a transfer that is in progress")
        self._transfers.discard(posted)
        work, posted.work = posted.work, None
        if work is not None:
            work.free()

    def disconnect(self) -> None:
        """Tear this end down."""
        if self.state is LinkState.CLOSED and self._has_ended:
            return
        self._break()
        self.state = LinkState.CLOSED
        if self._has_ended:
            self._say_done()

    def is_quiet(self) -> bool:
        """Whether nothing that either side posted can still touch local memory."""
        if self.state is not LinkState.CLOSED or not self._has_ended:
            return False
        if not self._peer_writes or self._watch is None:
            return True
        return self._watch.cannot_write_directly()

    def is_blind(self) -> bool:
        """Whether nothing could prove the peer's death, and it may matter."""
        is_blind = self._watch is not None and self._watch.is_blind
        return is_blind and self._peer_writes and not self.is_quiet()

    def note_peer_writes(self) -> None:
        """Note that the peer is told of local blocks from now on."""
        self._peer_writes = True

    # -- inside --------------------------------------------------------------------------------
    def _start(
        self, operation: Operation, local_blocks: Sequence[int], remote_blocks: Sequence[int]
    ) -> Transfer:
        if self.state is LinkState.BROKEN:
            raise PeerUnreachableError(f"the link to {self.peer_name} broke")
        if self.state is not LinkState.CONNECTED:
            raise LocalProtocolError(f"{operation} on a link that is {self.state.value}")
        local, remote = pair_blocks(
            local_blocks,
            remote_blocks,
            self._geometry[0].num_blocks,
            self._peer_geometry[0].num_blocks,
        )
        if not len(local):
            return PostedTransfer(self, 0, None, TransferStatus.DONE)
        try:
            work = self._post(operation, local, remote)
        except (TransferError, ProtocolError):
            self._break()  # Part of it may have been posted.
            raise
        posted = PostedTransfer(self, len(local) * block_bytes_of(self._geometry), work)
        self._transfers.add(posted)
        return posted

    def _break(self) -> None:
        """End everything of ours that is posted; the peer's WRITEs may go on."""
        self.state = LinkState.BROKEN
        if self._has_ended:
            return
        for transfer in self._transfers:
            transfer.work = None
        self._has_ended = self._end()
        if not self._has_ended:
            return
        for transfer in self._transfers:
            if transfer.status is TransferStatus.IN_PROGRESS:
                transfer.status = TransferStatus.ERROR
        self._transfers.clear()

    def _own(self, transfer: Transfer) -> PostedTransfer:
        if not isinstance(transfer, PostedTransfer) or transfer.owner is not self:
            raise LocalProtocolError("a transfer of another link")
        return transfer


def encode_metadata(metadata: msgspec.Struct) -> bytes:
    """Return the bytes that a peer's ``decode_metadata`` takes: a mark, a digest and msgpack.

    The digest guards against damage, not against forgery: who may send metadata at all is decided
    by the control plane. Raises ``LocalProtocolError`` if there would be too many bytes.
    """
    payload = msgspec.msgpack.encode(metadata)
    encoded = _MARK + _digest(payload) + payload
    if len(encoded) > MAX_METADATA_BYTES:
        raise LocalProtocolError(f"link metadata of {len(encoded)} bytes is too large")
    return encoded


def decode_metadata(data: bytes, kind: type[T]) -> T:
    """Return the struct in ``data``, which is never pickled. Whatever a newer peer adds is ignored:
    fields of a map, elements at the end of an array.

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
