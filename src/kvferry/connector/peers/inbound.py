"""Peers that ask this instance: their links, and the answers to their messages.

Runs on the mover's thread only. Bounded in number: the link that was idle longest gives way.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvferry.connector.peers.sessions import require_same_memory
from kvferry.connector.planner import Planner
from kvferry.errors import FerryError, IncompatiblePeerError
from kvferry.protocol import messages
from kvferry.protocol.ids import TransferId
from kvferry.transport.base import Link, Transport

MAX_ROUTES = 16_384


@dataclass(frozen=True, slots=True)
class _Route:
    """Where a transfer's receiver was last heard of, and which reader it is; empty: not known."""

    identity: bytes
    reader: str


class InboundPeers:
    """Peers that have shaken hands to read here, by name."""

    def __init__(
        self, max_peers: int, hello: messages.Hello, transport: Transport, planner: Planner
    ) -> None:
        self._max_peers = max_peers
        self._hello = hello
        self._transport = transport
        self._planner = planner
        self._links: OrderedDict[str, Link] = OrderedDict()
        self._connections: dict[str, bytes] = {}
        """By reader: on which connection its link's handshake came."""
        self._active_readers: set[str] = set()
        self._routes: OrderedDict[TransferId, _Route] = OrderedDict()

    @property
    def num_active(self) -> int:
        """Readers that may transfer right now. Callable from any thread."""
        return len(self._active_readers)

    def activate(self, reader: str) -> None:
        """Progress ``reader``'s link from now on."""
        self._active_readers.add(reader)

    def deactivate(self, reader: str) -> None:
        """The reader transfers no more."""
        self._active_readers.discard(reader)

    def progress(self) -> None:
        """Serve what readers have posted."""
        for reader in self._active_readers:
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

    def greet(self, identity: bytes, hello: messages.Hello) -> messages.Reply:
        """Answer a handshake. The planner has given up by now what the reader had registered."""
        try:
            # Named from the reader's side, since the refusal is for its eyes.
            require_same_memory(hello, self._hello)
        except IncompatiblePeerError as error:
            return messages.decline(messages.DeclineReason.INCOMPATIBLE, str(error), error.field)
        for other in [r for r in self._links if r.rsplit("/", 1)[0] == hello.instance_id]:
            self.drop(other)  # an earlier epoch, or an earlier link of this one
        if len(self._links) >= self._max_peers and not self._evict_one():
            return messages.decline(
                messages.DeclineReason.PRESSURE, f"{self._max_peers} peers are connected"
            )
        return self._connect(identity, reader_name(hello), hello)

    def answer(self, identity: bytes, message: messages.Message) -> messages.Reply:
        """Return the reply to a message from a peer that has shaken hands."""
        if isinstance(message, messages.Register | messages.Renew | messages.Release):
            self._note_route(identity, message)
        match message:
            case messages.Acquire() | messages.AcquireHistory() | messages.Register():
                reader = reader_name(message)
                # What comes late on an earlier connection is of blocks that it has given up.
                if self._connections.get(reader) != identity:
                    detail = f"{reader} has not said hello on this connection"
                    return messages.decline(messages.DeclineReason.UNKNOWN_PEER, detail)
                self._links.move_to_end(reader)
                return self._planner.answer(reader, message)
            case messages.Renew():
                return self._planner.answer("", message)
            case messages.Release():
                return self._planner.answer(reader_name(message), message)
            case _:
                name = type(message).__name__
                return messages.decline(
                    messages.DeclineReason.MALFORMED, f"{name} is not a request"
                )

    def close(self) -> None:
        """Disconnect every reader."""
        for reader in list(self._links):
            self.drop(reader)

    def drop(self, reader: str) -> None:
        """Disconnect ``reader``; it may shake hands again."""
        link = self._links.pop(reader)
        self._connections.pop(reader, None)
        link.disconnect()

    def _connect(self, identity: bytes, reader: str, hello: messages.Hello) -> messages.Reply:
        link = self._transport.open_link(reader, peer_writes=False)
        try:
            link.connect(hello.transport_metadata)
        except FerryError as error:
            link.disconnect()
            return messages.decline(messages.DeclineReason.MALFORMED, str(error))
        self._links[reader], self._connections[reader] = link, identity
        own = self._hello
        return messages.HelloReply(
            own.instance_id,
            own.epoch,
            own.layout,
            own.transport,
            link.local_metadata,
            own.compatibility,
        )

    def _note_route(
        self, identity: bytes, message: messages.Register | messages.Renew | messages.Release
    ) -> None:
        transfer_id = message.transfer_id
        known = self._routes.get(transfer_id)
        registered = known.reader if known is not None else ""
        if isinstance(message, messages.Register):
            registered = reader_name(message)
        elif isinstance(message, messages.Release) and registered not in ("", reader_name(message)):
            # One that comes late must not take the notices from who has registered since.
            return
        self._routes[transfer_id] = _Route(identity, registered)
        self._routes.move_to_end(transfer_id)
        while len(self._routes) > MAX_ROUTES:
            self._routes.popitem(last=False)

    def _evict_one(self) -> bool:
        idle = next((r for r in self._links if r not in self._active_readers), None)
        if idle is None:
            return False
        self.drop(idle)
        return True


def reader_name(
    message: messages.Hello
    | messages.Acquire
    | messages.AcquireHistory
    | messages.Register
    | messages.Release,
) -> str:
    """Return the name under which a reader's link and leases are kept."""
    return f"{message.instance_id}/{message.epoch}"
