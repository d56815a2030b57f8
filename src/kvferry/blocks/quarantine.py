"""``Quarantine``: blocks that a posted transfer may still touch, kept out of use.

A transfer that was posted cannot be cancelled, and time does not end it: a peer that was stopped
may continue at any moment. Entries leave only when the caller has proof, a terminal status or a
connection that was torn down. No threads: the caller serialises calls under its own lock.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from kvferry.blocks.lease import Cover, ReferencePool
from kvferry.errors import LocalProtocolError
from kvferry.protocol.ids import BlockNumber


@dataclass(frozen=True, slots=True)
class _Entry:
    peer: str
    blocks: tuple[BlockNumber, ...]


class Quarantine:
    """References of its own on the blocks of transfers that have not been proven quiet.

    ``max_share`` is the share of the pool, 0 to 1, beyond which callers start nothing new.
    Entering is never refused: a refused entry would be a block reused under a running transfer.
    """

    def __init__(self, pool: ReferencePool, max_share: float) -> None:
        self._pool = pool
        self._max_blocks = int(max_share * pool.num_blocks)
        self._entries: dict[Hashable, _Entry] = {}
        self._cover = Cover()

    @property
    def num_blocks(self) -> int:
        """Distinct blocks in quarantine."""
        return len(self._cover)

    def is_closed_to(self, peer: str) -> bool:
        """Whether to start nothing with ``peer``: the share is used up, and some of it is its.

        Others go on: what is in quarantine is no sign that they would add to it.
        """
        is_full = len(self._cover) >= self._max_blocks
        return is_full and any(entry.peer == peer for entry in self._entries.values())

    def enter(self, key: Hashable, peer: str, blocks: Sequence[BlockNumber]) -> None:
        """Keep ``blocks`` of the transfer ``key`` with ``peer``; they must have a reference now.

        Raises ``LocalProtocolError`` if ``key`` is in quarantine already.
        """
        if key in self._entries:
            raise LocalProtocolError(f"transfer {key!r} is in quarantine already")
        self._pool.hold(blocks)
        self._entries[key] = _Entry(peer, tuple(blocks))
        self._cover.add(blocks)

    def leave(self, key: Hashable) -> None:
        """The transfer is terminal: drop its references. Safe to repeat and for unknown keys."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._pool.drop(entry.blocks)
            self._cover.remove(entry.blocks)

    def references_taken(self) -> Mapping[BlockNumber, int]:
        """How many transfers in quarantine keep each block."""
        return self._cover.counts()
