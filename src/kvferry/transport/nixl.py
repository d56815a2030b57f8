"""Moves bytes by NIXL, on one host or between hosts.

Where the network has no READ of its own, UCX imitates it in the holder's process, which aborts if
the reader goes away meanwhile. There a READ is carried out as a WRITE by the holder, which the
reader asks for by message and the holder posts from ``progress``.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar

import msgspec
import numpy as np
from msgspec import Meta

from kvferry.clock import Clock, SystemClock
from kvferry.errors import (
    CapacityError,
    ConfigError,
    FerryError,
    LocalProtocolError,
    PeerUnreachableError,
    RemoteProtocolError,
    TransferFailedError,
)
from kvferry.transport.base import MemoryRegion, TransferStatus, Transport
from kvferry.transport.geometry import Geometry, Indices, describe, require_matching
from kvferry.transport.host import ProcessIdentity, this_process
from kvferry.transport.link import (
    LinkState,
    Operation,
    TrackedLink,
    Work,
    decode_metadata,
    encode_metadata,
)
from kvferry.transport.nixl_agent import (
    MAX_DESCRIPTORS,
    NixlAgent,
    NixlMetadata,
    TransferHandle,
    load_nixl,
    num_descriptors,
)
from kvferry.transport.nixl_options import NixlOptions, may_write_directly, reads_natively
from kvferry.transport.peer_watch import FarewellPage, PeerWatch
from kvferry.transport.shared_memory import prefault

MAX_ASKED = 1024
"""READs that a peer may have asked for at once."""
PING_INTERVAL_S = 0.25
_MAX_MESSAGE_BYTES = 16 * 1024 * 1024
_BLOCK_TYPE = np.dtype("<u4")

_Number = Annotated[int, Meta(ge=1, le=2**62)]
_Blocks = Annotated[bytes, Meta(min_length=4, max_length=_MAX_MESSAGE_BYTES)]


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """Write your blocks ``sources`` into our blocks ``targets``, pair by pair."""

    number: _Number
    sources: _Blocks
    targets: _Blocks


class Filled(msgspec.Struct, frozen=True, array_like=True, tag="filled"):
    """All bytes of that ask have arrived."""

    number: _Number


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Says nothing; that it cannot be sent says that the connection broke."""


Message = Ask | Filled | Ping
_decoder = msgspec.msgpack.Decoder(Message)


class _OwnWork(Work):
    """A transfer that we posted."""

    def __init__(self, agent: NixlAgent, handle: TransferHandle, state: str) -> None:
        self._agent = agent
        self._handle = handle
        self._state = state

    def advance(self) -> TransferStatus:
        if self._state == "PROC":
            self._state = self._agent.state(self._handle)
        match self._state:
            case "DONE":
                return TransferStatus.DONE
            case "PROC":
                return TransferStatus.IN_PROGRESS
            case _:
                return TransferStatus.ERROR

    def free(self) -> None:
        self._agent.release(self._handle)


class AskedRead(Work):
    """A READ of ours that the holder carries out. ``look_after`` hears from it."""

    def __init__(self, number: int, look_after: Callable[[], None]) -> None:
        self.number = number
        self.is_filled = False
        self._look_after = look_after

    def advance(self) -> TransferStatus:
        """Hear from the holder."""
        if not self.is_filled:
            self._look_after()
        return TransferStatus.DONE if self.is_filled else TransferStatus.IN_PROGRESS

    def free(self) -> None:
        """Nothing is held."""


class NixlLink(TrackedLink):
    """The local end of one connection, with an agent of its own."""

    def __init__(
        self, peer_name: str, transport: NixlTransport, agent: NixlAgent, *, peer_writes: bool
    ) -> None:
        super().__init__(peer_name, transport.geometry, peer_writes=peer_writes)
        self._options = transport.options
        self._process = transport.process
        self._agent = agent
        self._clock = transport.clock
        self._farewell = FarewellPage()
        self._asks_for_reads = False
        self._num_asked = 0
        self._next_ping_s = 0.0
        self._asked: dict[int, AskedRead] = {}
        self._carried_out: dict[int, _OwnWork] = {}
        self._metadata = encode_metadata(
            NixlMetadata(
                transport.options.backend,
                agent.name,
                agent.metadata,
                transport.geometry,
                self._process,
                self._farewell.reference,
            )
        )

    @property
    def local_metadata(self) -> bytes:
        """What the peer needs to connect to this end."""
        return self._metadata

    def progress(self) -> None:
        """Serve what the peer has posted; an error ends the link, which its next use tells."""
        if self.state is not LinkState.CONNECTED:
            return
        try:
            self._serve()
        except FerryError:
            self._break()

    def _attach(self, peer_metadata: bytes) -> None:
        theirs = decode_metadata(peer_metadata, NixlMetadata)
        if theirs.backend != self._options.backend:
            raise RemoteProtocolError(
                f"the peer uses {theirs.backend}, we use {self._options.backend}"
            )
        if theirs.agent_name == self._agent.name:
            raise RemoteProtocolError("the peer sent our own metadata")
        require_matching(self._geometry, theirs.regions)
        if num_descriptors(theirs.regions) > MAX_DESCRIPTORS:
            raise RemoteProtocolError("the peer has too many blocks")
        watch = PeerWatch(self._process, theirs.process)
        if watch.is_dead():
            raise PeerUnreachableError(f"{self.peer_name}: process {theirs.process.pid} is dead")
        watch.follow(theirs.farewell)
        self._watch = watch
        self._peer_geometry = theirs.regions
        self._asks_for_reads = not reads_natively(
            self._options, theirs.process if watch.is_beside else None, theirs.regions[0]
        )
        self._agent.attach(theirs)

    def _post(self, operation: Operation, local: Indices, remote: Indices) -> Work:
        if operation is Operation.READ and self._asks_for_reads:
            return self._ask(local, remote)
        return self._post_own(operation, local, remote)

    def _post_own(
        self, operation: Operation, local: Indices, remote: Indices, message: bytes = b""
    ) -> _OwnWork:
        handle, state = self._agent.post(operation, local, remote, message)
        if state not in ("DONE", "PROC"):
            raise TransferFailedError(f"NIXL refused a {operation} to {self.peer_name}")
        return _OwnWork(self._agent, handle, state)

    def note_peer_writes(self) -> None:
        """Note that the peer is told of local blocks from now on."""
        self._peer_writes = self._peer_writes or may_write_directly(self._options)

    def _ask(self, local: Indices, remote: Indices) -> Work:
        self.note_peer_writes()
        self._num_asked += 1
        asked = AskedRead(self._num_asked, self._look_after_asked)
        self._asked[asked.number] = asked
        self._agent.send_message(
            encode_message(Ask(asked.number, pack_blocks(remote), pack_blocks(local)))
        )
        return asked

    def _look_after_asked(self) -> None:
        """Hear from the peer, and find out whether it is still there.

        With nothing of our own posted, only a message that cannot be sent tells of a broken
        connection.
        """
        self._serve()
        now_s = self._clock.monotonic_s()
        if now_s >= self._next_ping_s:
            self._next_ping_s = now_s + PING_INTERVAL_S
            if self._watch is not None and self._watch.is_dead():
                raise PeerUnreachableError(f"{self.peer_name} is dead")
            self._agent.send_message(encode_message(Ping()))

    def _serve(self) -> None:
        for raw in self._agent.take_messages():
            message = decode_message(raw)
            match message:
                case Ask():
                    self._carry_out(message)
                case Filled():
                    asked = self._asked.pop(message.number, None)
                    if asked is not None:
                        asked.is_filled = True
                case Ping():
                    pass
        for number, work in list(self._carried_out.items()):
            status = work.advance()
            if status is TransferStatus.ERROR:
                raise TransferFailedError(f"a READ by {self.peer_name} failed")
            if status is TransferStatus.DONE:
                work.free()
                del self._carried_out[number]

    def _carry_out(self, ask: Ask) -> None:
        if ask.number in self._carried_out or len(self._carried_out) >= MAX_ASKED:
            raise RemoteProtocolError("the peer asks for too much")
        ours = unpack_blocks(ask.sources, self._geometry[0].num_blocks)
        theirs = unpack_blocks(ask.targets, self._peer_geometry[0].num_blocks)
        if len(ours) != len(theirs):
            raise RemoteProtocolError("the peer asks for unequal lists of blocks")
        filled = encode_message(Filled(ask.number))
        self._carried_out[ask.number] = self._post_own(Operation.WRITE, ours, theirs, filled)

    def _end(self) -> bool:
        self._asked.clear()
        self._carried_out.clear()
        return self._agent.destroy()

    def _say_done(self) -> None:
        self._farewell.say_done()


class NixlTransport(Transport):
    """Moves bytes between any memory that NIXL's backend can register."""

    name: ClassVar[str] = "nixl"

    def __init__(
        self,
        options: NixlOptions | None = None,
        process: ProcessIdentity | None = None,
        clock: Clock | None = None,
    ) -> None:
        """``process`` is who we say we are; tests pass another host's."""
        self.options = options or NixlOptions()
        self.process = process or this_process()
        self.clock = clock or SystemClock()
        self.geometry: Geometry = ()
        self._module = load_nixl()
        self._spare: NixlAgent | None = None
        self._links: list[NixlLink] = []
        self._memory: list[mmap.mmap] = []

    def allocate(self, num_bytes: int) -> memoryview:
        """Return anonymous memory, in huge pages where the kernel gives them."""
        try:
            memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise CapacityError(f"{num_bytes} bytes of memory: {error}") from error
        _advise_huge_pages(memory)
        prefault(memory)
        self._memory.append(memory)
        return memoryview(memory)

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Describe ``regions`` and make a first agent, so that a wrong option fails here.

        Raises ``ConfigError``.
        """
        if self.geometry:
            raise LocalProtocolError("register may be called once")
        geometry = describe(regions)
        if num_descriptors(geometry) > MAX_DESCRIPTORS:
            raise ConfigError(f"more than {MAX_DESCRIPTORS} runs of memory")
        self._spare = NixlAgent(self._module, self.options, geometry)
        self.geometry = geometry

    def open_link(self, peer_name: str, *, peer_writes: bool = True) -> NixlLink:
        """Return a link with an agent of its own."""
        if not self.geometry:
            raise LocalProtocolError("open_link before register")
        agent, self._spare = self._spare, None
        if agent is None:
            agent = NixlAgent(self._module, self.options, self.geometry)
        link = NixlLink(peer_name, self, agent, peer_writes=peer_writes)
        self._links = [known for known in self._links if not known.is_quiet()] + [link]
        return link

    def num_blind_links(self) -> int:
        """See ``Transport``."""
        return sum(link.is_blind() for link in self._links)

    def close(self) -> None:
        """Disconnect every link and drop our hold on the memory."""
        for link in self._links:
            link.disconnect()
        if self._spare is not None:
            self._spare.destroy()
            self._spare = None
        self._memory.clear()


def _advise_huge_pages(memory: mmap.mmap) -> None:
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return  # A kernel without them; ordinary pages do.


def encode_message(message: Message) -> bytes:
    """Return the bytes of ``message``."""
    return msgspec.msgpack.encode(message)


def decode_message(data: bytes | str) -> Message:
    """Return the message in ``data``. Raises ``RemoteProtocolError`` for anything else."""
    raw = data.encode(errors="surrogateescape") if isinstance(data, str) else data
    if len(raw) > 2 * _MAX_MESSAGE_BYTES + 64:
        raise RemoteProtocolError(f"a message of {len(raw)} bytes")
    try:
        return _decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"malformed message: {error}") from error


def pack_blocks(blocks: Indices) -> bytes:
    """Return block numbers as they travel."""
    return blocks.astype(_BLOCK_TYPE).tobytes()


def unpack_blocks(data: bytes, num_blocks: int) -> Indices:
    """Return block numbers of a pool of ``num_blocks``. Raises ``RemoteProtocolError``."""
    if len(data) % _BLOCK_TYPE.itemsize:
        raise RemoteProtocolError("half a block number")
    blocks = np.frombuffer(data, dtype=_BLOCK_TYPE).astype(np.int64)
    if len(blocks) and blocks.max() >= num_blocks:
        raise RemoteProtocolError(f"block number {blocks.max()} of a pool of {num_blocks}")
    return blocks
