"""Moves bytes inside one process, with faults on demand. For tests.

Instances that share a ``MemoryHub`` reach each other. A transport can be held (its posted
transfers stay in progress, as those of a stopped process do), and continued, killed or told to
fail. What was posted lands when it is continued, even after the other side has torn its end down:
the worst that a real transport on one host does.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from kvferry.errors import (
    CapacityError,
    LocalProtocolError,
    PeerUnreachableError,
    RemoteProtocolError,
    TransferFailedError,
)
from kvferry.transport.base import MemoryRegion, TransferStatus, Transport
from kvferry.transport.geometry import (
    Geometry,
    Indices,
    RegionGeometry,
    describe,
    require_matching,
    runs,
)
from kvferry.transport.link import (
    LinkState,
    Operation,
    TrackedLink,
    Work,
    decode_metadata,
    encode_metadata,
)


class MemoryMetadata(msgspec.Struct, frozen=True):
    """One link's end, as the peer sees it."""

    link_number: int
    regions: tuple[RegionGeometry, ...]


class MemoryHub:
    """The world in which instances reach each other. Tests make one."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._links: dict[int, MemoryLink] = {}

    def add(self, link: MemoryLink) -> int:
        """Return a fresh number for ``link``."""
        number = next(self._numbers)
        self._links[number] = link
        return number

    def find(self, number: int) -> MemoryLink:
        """Return the link of that number. Raises ``PeerUnreachableError`` if it has gone."""
        link = self._links.get(number)
        if link is None or link.transport.is_killed or link.state is LinkState.CLOSED:
            raise PeerUnreachableError(f"nobody has link {number}")
        return link


class _CopyWork(Work):
    """Runs of (from, to, bytes), copied at once when the poster is not held."""

    def __init__(
        self, link: MemoryLink, operation: Operation, copies: list[tuple[int, int, int]]
    ) -> None:
        self._link = link
        self.operation = operation
        self._copies = copies
        self.is_done = False

    def advance(self) -> TransferStatus:
        transport = self._link.transport
        if transport.fail_next_transfers > 0:
            transport.fail_next_transfers -= 1
            raise TransferFailedError("told to fail")
        if self.is_done:
            return TransferStatus.DONE
        if not self._link.peer_is_there():
            raise PeerUnreachableError("the peer has gone")
        if transport.is_held:
            return TransferStatus.IN_PROGRESS
        self.land()
        return TransferStatus.DONE

    def land(self) -> None:
        """Do the copy, whoever may have torn down what."""
        for source, target, num_bytes in self._copies:
            ctypes.memmove(target, source, num_bytes)
        self.is_done = True

    def free(self) -> None:
        self._copies.clear()


class MemoryLink(TrackedLink):
    """The local end of one connection inside the process."""

    def __init__(self, peer_name: str, transport: MemoryTransport, *, peer_writes: bool) -> None:
        super().__init__(peer_name, transport.geometry, peer_writes=peer_writes)
        self.transport = transport
        self.number = transport.hub.add(self)
        self.num_progress_calls = 0
        self._peer: MemoryLink | None = None
        self._said_done = False
        self._posted: list[_CopyWork] = []

    @property
    def local_metadata(self) -> bytes:
        """What the peer needs to connect to this end."""
        return encode_metadata(MemoryMetadata(self.number, self._geometry))

    def progress(self) -> None:
        """Count the call."""
        self.num_progress_calls += 1

    def is_quiet(self) -> bool:
        """Whether nothing that either side posted can still touch local memory."""
        if self.state is not LinkState.CLOSED:
            return False
        if not self._peer_writes or self._peer is None:
            return True
        return self._peer.transport.is_killed or self._peer.has_said_done()

    def has_said_done(self) -> bool:
        """Whether this end is torn down."""
        return self._said_done

    def peer_is_there(self) -> bool:
        """Whether the peer can still be reached."""
        peer = self._peer
        return peer is not None and not peer.transport.is_killed and not peer.has_said_done()

    def land_writes(self) -> None:
        """Let the WRITEs that were posted here before a hold land now."""
        for work in self._posted:
            if not work.is_done and work.operation is Operation.WRITE:
                work.land()
        self._posted.clear()

    def _attach(self, peer_metadata: bytes) -> None:
        theirs = decode_metadata(peer_metadata, MemoryMetadata)
        if theirs.link_number == self.number:
            raise RemoteProtocolError("the peer sent our own metadata")
        require_matching(self._geometry, theirs.regions)
        self._peer = self.transport.hub.find(theirs.link_number)
        self._peer_geometry = theirs.regions

    def _post(self, operation: Operation, local: Indices, remote: Indices) -> Work:
        if self.transport.fail_next_posts > 0:
            self.transport.fail_next_posts -= 1
            raise TransferFailedError("told to fail")
        if not self.peer_is_there():
            raise PeerUnreachableError(f"{self.peer_name} has gone")
        copies = []
        for ours, theirs in zip(self._geometry, self._peer_geometry, strict=True):
            for here, there, num_bytes in runs(local, remote, ours, theirs):
                pair = (there, here) if operation is Operation.READ else (here, there)
                copies.append((*pair, num_bytes))
        work = _CopyWork(self, operation, copies)
        self._posted = [known for known in self._posted if not known.is_done] + [work]
        return work

    def _end(self) -> bool:
        self._posted.clear()
        return True

    def _say_done(self) -> None:
        self._said_done = True


class MemoryTransport(Transport):
    """One instance of several in this process. Faults are attributes that tests set."""

    name: ClassVar[str] = "memory"

    def __init__(self, hub: MemoryHub) -> None:
        self.hub = hub
        self.geometry: Geometry = ()
        self.fail_next_posts = 0
        """How many of the next posts raise ``TransferFailedError``."""
        self.fail_next_transfers = 0
        """How many of the next polls end in ERROR."""
        self.is_held = False
        """While set, posted transfers stay in progress."""
        self.is_killed = False
        self.links: list[MemoryLink] = []
        self._memory: list[mmap.mmap] = []

    def allocate(self, num_bytes: int) -> memoryview:
        """Return anonymous memory."""
        try:
            memory = mmap.mmap(-1, num_bytes)
        except (OSError, ValueError, OverflowError) as error:
            raise CapacityError(f"{num_bytes} bytes of memory: {error}") from error
        self._memory.append(memory)
        return memoryview(memory)

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Describe ``regions``. Raises ``ConfigError``."""
        if self.geometry:
            raise LocalProtocolError("register may be called once")
        self.geometry = describe(regions)

    def open_link(self, peer_name: str, *, peer_writes: bool = True) -> MemoryLink:
        """Return a link to another instance of the same hub."""
        if not self.geometry:
            raise LocalProtocolError("open_link before register")
        link = MemoryLink(peer_name, self, peer_writes=peer_writes)
        self.links.append(link)
        return link

    def close(self) -> None:
        """Disconnect every link."""
        for link in self.links:
            link.disconnect()
        self._memory.clear()

    # -- faults --------------------------------------------------------------------------------
    def hold(self) -> None:
        """Let transfers stay in progress, as those of a stopped process."""
        self.is_held = True

    def go_on(self) -> None:
        """Continue: WRITEs that were posted land now, wherever they were bound for."""
        self.is_held = False
        for link in self.links:
            link.land_writes()

    def kill(self) -> None:
        """Die: nothing of this instance happens any more, and no peer reaches it."""
        self.is_killed = True
