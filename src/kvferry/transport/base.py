"""The transport interface: register, connect, read, write, poll, release, disconnect.

One ``Transport`` per process, one ``Link`` per peer. All calls to a transport and its links come
from one thread (the mover's). A posted transfer cannot be cancelled: memory that it may touch stays
out of use until ``poll`` says DONE or ERROR, or ``disconnect`` has been called and
``is_quiet`` says so. Lifecycle of a link: open → (exchange metadata) → connect → read / write →
poll → release → disconnect.
"""

from __future__ import annotations

import abc
import ctypes
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


class MemoryKind(enum.StrEnum):
    """Where a region lies."""

    DRAM = "DRAM"
    VRAM = "VRAM"


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """``num_blocks`` runs of ``block_bytes``; block ``i`` begins at ``address + i * stride_bytes``.

    A block-first pool is one region with ``stride_bytes == block_bytes``. Where a block consists of
    several runs (one per layer), each is a region, and block ``i`` is run ``i`` of every region.
    """

    address: int
    block_bytes: int
    stride_bytes: int
    num_blocks: int
    kind: MemoryKind = MemoryKind.DRAM
    device_index: int = 0


def address_of(view: memoryview) -> int:
    """Return the address of the first byte of a writable ``view``."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class TransferStatus(enum.Enum):
    """State of a posted transfer."""

    IN_PROGRESS = "in_progress"
    DONE = "done"
    ERROR = "error"


class Transfer(abc.ABC):
    """One posted READ or WRITE; made by ``Link.read`` and ``Link.write`` only."""

    num_bytes: int


class Link(abc.ABC):
    """The local end of the connection to one peer."""

    @property
    @abc.abstractmethod
    def local_metadata(self) -> bytes:
        """What the peer needs to connect to this end; opaque, at most 256 KiB, never pickled."""

    @abc.abstractmethod
    def connect(self, peer_metadata: bytes) -> None:
        """Attach to the peer's end. Prepares descriptor lists once, for all blocks of both sides.

        Raises ``RemoteProtocolError`` if the metadata is malformed or describes other geometry,
        ``IncompatiblePeerError`` if it means nothing here, ``PeerUnreachableError`` if the peer is
        not there.
        """

    @abc.abstractmethod
    def read(self, local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> Transfer:
        """Post a READ of ``remote_blocks[k]`` into ``local_blocks[k]`` for every k.

        Neighbouring blocks are coalesced. May do the whole copy before it returns. Raises
        ``PeerUnreachableError`` or ``TransferFailedError`` if nothing was posted,
        ``LocalProtocolError`` for unequal lengths or numbers out of range.
        """

    @abc.abstractmethod
    def write(self, local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> Transfer:
        """Post a WRITE of ``local_blocks[k]`` into ``remote_blocks[k]``; otherwise as ``read``."""

    @abc.abstractmethod
    def poll(self, transfer: Transfer) -> TransferStatus:
        """Advance and return the state of ``transfer``; DONE and ERROR are final."""

    @abc.abstractmethod
    def release(self, transfer: Transfer) -> None:
        """Give back a terminal transfer's resources; safe to repeat.

        Raises ``LocalProtocolError`` while it is in progress: releasing is not stopping.
        """

    @abc.abstractmethod
    def progress(self) -> None:
        """Serve what the peer has posted; called every millisecond or so while the peer is known
        to read or write, and never otherwise."""

    @abc.abstractmethod
    def disconnect(self) -> None:
        """Tear this end down; safe to repeat. Transfers that this end posted are ended by it."""

    @abc.abstractmethod
    def is_quiet(self) -> bool:
        """Whether, after ``disconnect``, it is proven that nothing which either side posted can
        still touch local memory (a stopped peer on this host may continue: not quiet)."""

    def note_peer_writes(self) -> None:  # noqa: B027  # optional: a link may expect it always
        """Note that from now on the peer is told of local blocks to write into, on a link that was
        opened with ``peer_writes=False``."""


class Transport(abc.ABC):
    """One process's end of one way to move bytes."""

    name: ClassVar[str]

    @abc.abstractmethod
    def allocate(self, num_bytes: int) -> memoryview:
        """Return zeroed, page-aligned, pre-faulted host memory that ``register`` will take.

        Writable, format "B". Lives until ``close``. Raises ``CapacityError``.
        """

    @abc.abstractmethod
    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Make ``regions`` readable and writable by peers; called once, before any link."""

    @abc.abstractmethod
    def open_link(self, peer_name: str, *, peer_writes: bool = True) -> Link:
        """Return a fresh, unconnected local end for one peer (the name is for logs).

        ``peer_writes=False`` states that the peer will never be told of local blocks to write
        into. Then ending our own transfers is all that quiet takes.
        """

    def num_blind_links(self) -> int:
        """Return how many peers may write into memory here and could die without any proof of it,
        so that what they might touch would stay out of use. May be called from any thread."""
        return 0

    @abc.abstractmethod
    def close(self) -> None:
        """Disconnect every link and give memory back; safe to repeat."""
