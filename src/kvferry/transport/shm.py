"""Moves bytes between processes of one host through shared memory; needs no NIXL.

The pool is shared memory that a peer maps; whoever posts a transfer copies. Large copies are done
in pieces, one per ``poll``, so that the mover's thread is never held for long.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from kvferry.errors import (
    ConfigError,
    LocalProtocolError,
    PeerUnreachableError,
    RemoteProtocolError,
)
from kvferry.transport.base import (
    MemoryKind,
    MemoryRegion,
    TransferStatus,
    Transport,
    address_of,
)
from kvferry.transport.geometry import (
    MAX_REGIONS,
    Geometry,
    Indices,
    RegionGeometry,
    describe,
    require_matching,
    runs,
)
from kvferry.transport.host import ProcessIdentity, this_process
from kvferry.transport.link import (
    Operation,
    TrackedLink,
    Work,
    decode_metadata,
    encode_metadata,
)
from kvferry.transport.peer_watch import FarewellPage, FarewellReference, PeerWatch
from kvferry.transport.shared_memory import (
    Memfd,
    MemfdReference,
    map_peer_memory,
    prefault_for_reading,
)

PIECE_BYTES = 32 * 1024 * 1024
_MAX_SEGMENTS = 64


class _PlacedRegion(msgspec.Struct, frozen=True, array_like=True):
    """A region whose start is an offset into one of the peer's segments."""

    segment: Annotated[int, Meta(ge=0, lt=_MAX_SEGMENTS)]
    geometry: RegionGeometry


class ShmMetadata(msgspec.Struct, frozen=True):
    """One link's end, as the peer sees it."""

    process: ProcessIdentity
    farewell: FarewellReference
    segments: Annotated[tuple[MemfdReference, ...], Meta(min_length=1, max_length=_MAX_SEGMENTS)]
    regions: Annotated[tuple[_PlacedRegion, ...], Meta(min_length=1, max_length=MAX_REGIONS)]


class _CopyWork(Work):
    """Runs of (from, to, bytes) that are still to be copied."""

    def __init__(self, copies: Iterable[tuple[int, int, int]], watch: PeerWatch) -> None:
        self._copies = deque(copies)
        self._watch = watch

    def advance(self) -> TransferStatus:
        """Copy at most one piece."""
        if self._watch.has_said_done() or self._watch.is_dead():
            raise PeerUnreachableError("the peer has gone")
        room = PIECE_BYTES
        while self._copies and room > 0:
            source, target, num_bytes = self._copies.popleft()
            count = min(num_bytes, room)
            ctypes.memmove(target, source, count)  # Releases the interpreter's lock.
            room -= count
            if count < num_bytes:
                self._copies.appendleft((source + count, target + count, num_bytes - count))
        return TransferStatus.IN_PROGRESS if self._copies else TransferStatus.DONE

    def free(self) -> None:
        self._copies.clear()


class ShmLink(TrackedLink):
    """The local end of one connection: the peer's memory, mapped."""

    def __init__(self, peer_name: str, transport: ShmTransport, *, peer_writes: bool) -> None:
        super().__init__(peer_name, transport.geometry, peer_writes=peer_writes)
        self._process = transport.process
        self._farewell = FarewellPage()
        self._maps: list[mmap.mmap] = []
        self._metadata = encode_metadata(
            ShmMetadata(
                self._process,
                self._farewell.reference,
                tuple(segment.reference for segment in transport.segments),
                transport.placed,
            )
        )

    @property
    def local_metadata(self) -> bytes:
        """What the peer needs to connect to this end."""
        return self._metadata

    def progress(self) -> None:
        """Nothing to do: the peer copies by itself."""

    def _attach(self, peer_metadata: bytes) -> None:
        theirs = decode_metadata(peer_metadata, ShmMetadata)
        if theirs.farewell == self._farewell.reference:
            raise RemoteProtocolError("the peer sent our own metadata")
        offsets = tuple(region.geometry for region in theirs.regions)
        require_matching(self._geometry, offsets)
        _require_inside(theirs)
        watch = PeerWatch(self._process, theirs.process)
        if watch.is_on_host and not watch.is_beside:
            raise PeerUnreachableError(
                f"{self.peer_name} is in another pid namespace of this host, where shm maps "
                "nothing: share the namespace, or use another transport"
            )
        if not watch.is_beside or watch.is_dead():
            raise PeerUnreachableError(f"{self.peer_name} is not a live process of this host")
        watch.map_farewell(theirs.farewell)
        self._watch = watch
        starts = []
        for reference in theirs.segments:
            memory = map_peer_memory(theirs.process, reference)
            prefault_for_reading(memory)
            self._maps.append(memory)
            starts.append(address_of(memoryview(memory)))
        self._peer_geometry = tuple(
            msgspec.structs.replace(
                region.geometry, start=starts[region.segment] + region.geometry.start
            )
            for region in theirs.regions
        )

    def _post(self, operation: Operation, local: Indices, remote: Indices) -> Work:
        if self._watch is None:
            raise LocalProtocolError("a transfer on a link that is not connected")
        copies = []
        for ours, theirs in zip(self._geometry, self._peer_geometry, strict=True):
            for here, there, num_bytes in runs(local, remote, ours, theirs):
                pair = (there, here) if operation is Operation.READ else (here, there)
                copies.append((*pair, num_bytes))
        return _CopyWork(copies, self._watch)

    def _end(self) -> bool:
        # Copying happens inside poll only, so without a link to poll nothing goes on.
        self._maps.clear()
        return True

    def _say_done(self) -> None:
        self._farewell.say_done()


class ShmTransport(Transport):
    """Moves bytes between memory that ``allocate`` returned."""

    name: ClassVar[str] = "shm"

    def __init__(self, process: ProcessIdentity | None = None) -> None:
        """``process`` is who we say we are; tests pass another host's."""
        self.process = process or this_process()
        self.geometry: Geometry = ()
        self.placed: tuple[_PlacedRegion, ...] = ()
        self.segments: list[Memfd] = []
        self._links: list[ShmLink] = []

    def allocate(self, num_bytes: int) -> memoryview:
        """Return shared memory without a name, which goes when its last user does."""
        if len(self.segments) == _MAX_SEGMENTS:
            raise LocalProtocolError(f"more than {_MAX_SEGMENTS} allocations")
        segment = Memfd(num_bytes)
        self.segments.append(segment)
        return segment.view

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Describe ``regions``, which must lie in memory that ``allocate`` returned.

        Raises ``ConfigError``.
        """
        if self.geometry:
            raise LocalProtocolError("register may be called once")
        geometry = describe(regions)
        self.placed = tuple(self._place(region) for region in geometry)
        self.geometry = geometry

    def open_link(self, peer_name: str, *, peer_writes: bool = True) -> ShmLink:
        """Return a link to a process of this host."""
        if not self.geometry:
            raise LocalProtocolError("open_link before register")
        link = ShmLink(peer_name, self, peer_writes=peer_writes)
        self._links = [known for known in self._links if not known.is_quiet()] + [link]
        return link

    def close(self) -> None:
        """Disconnect every link; memory goes when its last view does."""
        for link in self._links:
            link.disconnect()
        for segment in self.segments:
            segment.close()
        self.segments.clear()

    def _place(self, region: RegionGeometry) -> _PlacedRegion:
        for index, segment in enumerate(self.segments):
            offset = region.start - segment.address
            if offset >= 0 and offset + region.span_bytes <= segment.num_bytes:
                if region.kind is not MemoryKind.DRAM:
                    break
                return _PlacedRegion(index, msgspec.structs.replace(region, start=offset))
        raise ConfigError("shm moves host memory that its own allocate() returned, no other")


def _require_inside(theirs: ShmMetadata) -> None:
    for region in theirs.regions:
        if region.segment >= len(theirs.segments):
            raise RemoteProtocolError("a region of the peer lies in no segment")
        end = region.geometry.start + region.geometry.span_bytes
        if end > theirs.segments[region.segment].num_bytes:
            raise RemoteProtocolError("a region of the peer reaches beyond its segment")
