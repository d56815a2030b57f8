"""The links of peers that read from this instance, and the answers to their messages.

Runs on the mover's thread only. Bounded in number: the link that was idle longest gives way.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from kvferry.connector.decisions import Decisions
from kvferry.connector.peers.sessions import require_same_memory
from kvferry.connector.planner import Planner
from kvferry.errors import FerryError, IncompatiblePeerError
from kvferry.protocol.ids import BlockNumber, TransferId
from kvferry.protocol.messages import (
    Acquire,
    AcquireHistory,
    DeclineReason,
    Granted,
    Hello,
    HelloReply,
    Message,
    Register,
    Release,
    Renew,
    Reply,
    decline,
)
from kvferry.transport.base import Link, Transport

MAX_ROUTES = 16_384


@dataclass(frozen=True, slots=True)
class BlockDigester:
    """Digests of blocks in a block-first pool, for transfers that are verified."""

    memory: memoryview
    block_bytes: int

    def digests(self, blocks: Sequence[BlockNumber]) -> tuple[bytes, ...]:
        """Return 32 bytes per block: BLAKE2b-256 of its memory as it is now."""
        size = self.block_bytes
        return tuple(
            hashlib.blake2b(self.memory[b * size : (b + 1) * size], digest_size=32).digest()
            for b in blocks
        )


@dataclass(frozen=True, slots=True)
class _Route:
    """Where a transfer's receiver was last heard of, and which reader it is; empty: not known."""

    identity: bytes
    reader: str


class InboundPeers:
    """Peers that have shaken hands to read here."""

    def __init__(  # noqa: PLR0913 - what the mover shares with it
        self,
        own_hello: Hello,
        transport: Transport,
        planner: Planner,
        decisions: Decisions,
        execute: Callable[[], None],
        digester: BlockDigester | None,
        *,
        max_peers: int,
    ) -> None:
        self._own_hello = own_hello
        self._transport = transport
        self._planner = planner
        self._decisions = decisions
        self._execute = execute
        self._digester = digester
        self._max_peers = max_peers
        self._links: OrderedDict[str, Link] = OrderedDict()
        self._serving: set[str] = set()
        self._routes: OrderedDict[TransferId, _Route] = OrderedDict()

    @property
    def is_serving(self) -> bool:
        """Whether some reader may transfer right now."""
        return bool(self._serving)

    @property
    def num_served(self) -> int:
        """Readers that may transfer right now. Callable from any thread."""
        return len(self._serving)

    def start_serving(self, reader: str) -> None:
        """Progress ``reader``'s link from now on."""
        self._serving.add(reader)

    def stop_serving(self, reader: str) -> None:
        """The reader transfers no more."""
        self._serving.discard(reader)

    def progress(self) -> None:
        """Serve what readers have posted."""
        for reader in self._serving:
            link = self._links.get(reader)
            if link is not None:
                link.progress()

    def link(self, reader: str) -> Link | None:
        """Return the link to ``reader``, if it has shaken hands and is connected."""
        return self._links.get(reader)

    def route(self, transfer_id: TransferId) -> bytes | None:
        """Return where the receiver of a transfer was last heard of, if it was."""
        route = self._routes.get(transfer_id)
        return route.identity if route is not None else None

    def answer(self, identity: bytes, message: Message) -> Reply:
        """Return the reply to one message; what is to be done before is in the decisions."""
        if isinstance(message, Register | Renew | Release):
            self._note_route(identity, message)
        match message:
            case Hello():
                return self._on_hello(message)
            case Acquire() | AcquireHistory():
                return self._on_acquire(message)
            case Register():
                return self._on_register(message)
            case Renew():
                return self._decisions.answer(self._planner.answer_renew, message)
            case Release():
                reader = reader_name(message)
                return self._decisions.answer(self._planner.answer_release, reader, message)
            case _:
                name = type(message).__name__
                return decline(DeclineReason.MALFORMED, f"{name} is not a request")

    def close(self) -> None:
        """Disconnect every reader."""
        for reader in list(self._links):
            self.drop(reader)

    def _on_hello(self, hello: Hello) -> Reply:
        try:
            # Named from the reader's side, since the refusal is for its eyes.
            require_same_memory(hello, self._own_hello)
        except IncompatiblePeerError as error:
            return decline(DeclineReason.INCOMPATIBLE, str(error), error.field)
        reader = reader_name(hello)
        # What the reader registered on an earlier link, it has given up with that link.
        self._decisions.make(self._planner.lose_reader, reader)
        # What was decided for the old link must not be executed on the new one.
        self._execute()
        for other in [r for r in self._links if r.rsplit("/", 1)[0] == hello.instance_id]:
            self.drop(other)  # an earlier epoch, or an earlier link of this one
        if len(self._links) >= self._max_peers and not self._evict_one():
            detail = f"{self._max_peers} peers are connected"
            return decline(DeclineReason.PRESSURE, detail)
        return self._connect(reader, hello)

    def _connect(self, reader: str, hello: Hello) -> Reply:
        link = self._transport.open_link(reader, peer_writes=False)
        try:
            link.connect(hello.transport_metadata)
        except FerryError as error:
            link.disconnect()
            return decline(DeclineReason.MALFORMED, str(error))
        self._links[reader] = link
        own = self._own_hello
        return HelloReply(
            own.instance_id, own.epoch, own.layout, own.transport, link.local_metadata
        )

    def _on_acquire(self, message: Acquire | AcquireHistory) -> Reply:
        reader = reader_name(message)
        if reader not in self._links:
            return decline(DeclineReason.UNKNOWN_PEER, f"{reader} has not said hello")
        self._links.move_to_end(reader)
        reply = self._decisions.answer(self._planner.answer_acquire, reader, message)
        if isinstance(reply, Granted) and message.want_block_digests and self._digester:
            blocks = (*reply.blocks, *(partial.block for partial in reply.partials))
            digests = self._digester.digests(blocks)
            reply = msgspec.structs.replace(reply, block_digests=digests)
        return reply

    def _on_register(self, message: Register) -> Reply:
        reader = reader_name(message)
        if reader not in self._links:
            return decline(DeclineReason.UNKNOWN_PEER, f"{reader} has not said hello")
        self._links.move_to_end(reader)
        return self._decisions.answer(self._planner.answer_register, reader, message)

    def _note_route(self, identity: bytes, message: Register | Renew | Release) -> None:
        transfer_id = message.transfer_id
        known = self._routes.get(transfer_id)
        registered = known.reader if known is not None else ""
        if isinstance(message, Register):
            registered = reader_name(message)
        elif isinstance(message, Release) and registered not in ("", reader_name(message)):
            # One that comes late must not take the notices from who has registered since.
            return
        self._routes[transfer_id] = _Route(identity, registered)
        self._routes.move_to_end(transfer_id)
        while len(self._routes) > MAX_ROUTES:
            self._routes.popitem(last=False)

    def _evict_one(self) -> bool:
        idle = next((r for r in self._links if r not in self._serving), None)
        if idle is None:
            return False
        self.drop(idle)
        return True

    def drop(self, reader: str) -> None:
        """Disconnect ``reader``; it may shake hands again."""
        link = self._links.pop(reader)
        link.disconnect()


def reader_name(message: Hello | Acquire | AcquireHistory | Register | Release) -> str:
    """Return the name under which a reader's link and leases are kept."""
    return f"{message.instance_id}/{message.epoch}"
