"""Peers that ask this instance: their links, and the answers to their messages.

Runs on the mover's thread only. Bounded in number: the link that was idle longest gives way.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvferry.connector.peers.parts import MoverParts
from kvferry.connector.peers.sessions import require_same_memory
from kvferry.errors import FerryError, IncompatiblePeerError
from kvferry.protocol.ids import TransferId
from kvferry.protocol.messages import (
    Acquire,
    AcquireHistory,
    DeclineReason,
    Hello,
    HelloReply,
    Message,
    Register,
    Release,
    Renew,
    Reply,
    decline,
)
from kvferry.transport.base import Link

MAX_ROUTES = 16_384


@dataclass(frozen=True, slots=True)
class _Route:
    """Where a transfer's receiver was last heard of, and which reader it is; empty: not known."""

    identity: bytes
    reader: str


class InboundPeers:
    """Peers that have shaken hands to read here, by name."""

    def __init__(self, parts: MoverParts) -> None:
        self._parts = parts
        self._links: OrderedDict[str, Link] = OrderedDict()
        self._connections: dict[str, bytes] = {}
        """By reader: on which connection its link's handshake came."""
        self._serving: set[str] = set()
        self._routes: OrderedDict[TransferId, _Route] = OrderedDict()

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

    def greet(self, identity: bytes, hello: Hello) -> Reply:
        """Answer a handshake. The planner has given up by now what the reader had registered."""
        own = self._parts.hello
        try:
            # Named from the reader's side, since the refusal is for its eyes.
            require_same_memory(hello, own)
        except IncompatiblePeerError as error:
            return decline(DeclineReason.INCOMPATIBLE, str(error), error.field)
        for other in [r for r in self._links if r.rsplit("/", 1)[0] == hello.instance_id]:
            self.drop(other)  # an earlier epoch, or an earlier link of this one
        max_peers = self._parts.config.max_peers
        if len(self._links) >= max_peers and not self._evict_one():
            return decline(DeclineReason.PRESSURE, f"{max_peers} peers are connected")
        return self._connect(identity, reader_name(hello), hello)

    def answer(self, identity: bytes, message: Message) -> Reply:
        """Return the reply to a message from a peer that has shaken hands."""
        if isinstance(message, Register | Renew | Release):
            self._note_route(identity, message)
        match message:
            case Acquire() | AcquireHistory() | Register():
                reader = reader_name(message)
                # What comes late on an earlier connection is of blocks that it has given up.
                if self._connections.get(reader) != identity:
                    detail = f"{reader} has not said hello on this connection"
                    return decline(DeclineReason.UNKNOWN_PEER, detail)
                self._links.move_to_end(reader)
                return self._parts.planner.answer(reader, message)
            case Renew():
                return self._parts.planner.answer("", message)
            case Release():
                return self._parts.planner.answer(reader_name(message), message)
            case _:
                name = type(message).__name__
                return decline(DeclineReason.MALFORMED, f"{name} is not a request")

    def close(self) -> None:
        """Disconnect every reader."""
        for reader in list(self._links):
            self.drop(reader)

    def drop(self, reader: str) -> None:
        """Disconnect ``reader``; it may shake hands again."""
        link = self._links.pop(reader)
        self._connections.pop(reader, None)
        link.disconnect()

    def _connect(self, identity: bytes, reader: str, hello: Hello) -> Reply:
        link = self._parts.transport.open_link(reader, peer_writes=False)
        try:
            link.connect(hello.transport_metadata)
        except FerryError as error:
            link.disconnect()
            return decline(DeclineReason.MALFORMED, str(error))
        self._links[reader], self._connections[reader] = link, identity
        own = self._parts.hello
        return HelloReply(
            own.instance_id,
            own.epoch,
            own.layout,
            own.transport,
            link.local_metadata,
            own.compatibility,
        )

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


def reader_name(message: Hello | Acquire | AcquireHistory | Register | Release) -> str:
    """Return the name under which a reader's link and leases are kept."""
    return f"{message.instance_id}/{message.epoch}"
