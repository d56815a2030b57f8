"""The conversations that a router remembers, and which instance holds each.

What is remembered is a hint about where to ask. A wrong or stale one costs a round trip.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry.client.nixl_history import ReadOnce
from kvferry.clock import Clock
from kvferry.protocol.params import PeerAddress
from kvferry.router.history.prefix import Digest


@dataclass(frozen=True, slots=True)
class Holder:
    """The decode instance that answered a turn."""

    url: str
    peer: PeerAddress | None
    """Which start of it, as it was known then; None for one that does not say."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One answered request: who holds it, and how far its prompt went."""

    holder: Holder
    length: int
    """Of the prompt, in the units of its prefix; 0 where it had none."""
    digest: Digest
    """Of the prompt to exactly that length."""
    kept: ReadOnce | None = None
    """Its blocks, where the holder has named them for one read."""


Accept = Callable[[Turn], bool]


class ConversationStore(Protocol):
    """Where turns are remembered. Event loop's thread only."""

    async def find_first(self, keys: Sequence[Digest], accept: Accept) -> tuple[int, Turn] | None:
        """Return the position of the first key with a turn that ``accept`` takes, and the turn."""
        ...

    def remember(self, keys: Sequence[Digest], turn: Turn, lifetime_s: float) -> None:
        """Have ``turn`` found by each of ``keys`` from now on, for ``lifetime_s``."""
        ...

    def forget(self, keys: Sequence[Digest]) -> None:
        """Have nothing found by ``keys`` any more."""
        ...

    def num_remembered(self) -> int:
        """Return how many keys have a turn."""
        ...


class MemoryStore:
    """A ``ConversationStore`` of this process: at most ``max_entries``, least recently used go."""

    def __init__(self, clock: Clock, *, max_entries: int) -> None:
        self._clock = clock
        self._max_entries = max_entries
        self._entries: OrderedDict[Digest, tuple[Turn, float]] = OrderedDict()
        """With the time at which each expires; the least recently used first."""

    async def find_first(self, keys: Sequence[Digest], accept: Accept) -> tuple[int, Turn] | None:
        """Return the position of the first key with a turn that ``accept`` takes, and the turn."""
        now_s = self._clock.monotonic_s()
        for position, key in enumerate(keys):
            entry = self._entries.get(key)
            if entry is None:
                continue
            turn, expires_s = entry
            if expires_s <= now_s:
                del self._entries[key]
            elif accept(turn):
                self._entries.move_to_end(key)
                return position, turn
        return None

    def remember(self, keys: Sequence[Digest], turn: Turn, lifetime_s: float) -> None:
        """Have ``turn`` found by each of ``keys`` from now on, for ``lifetime_s``."""
        expires_s = self._clock.monotonic_s() + lifetime_s
        for key in keys:
            self._entries[key] = turn, expires_s
            self._entries.move_to_end(key)
        while len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)

    def forget(self, keys: Sequence[Digest]) -> None:
        """Have nothing found by ``keys`` any more."""
        for key in keys:
            self._entries.pop(key, None)

    def num_remembered(self) -> int:
        """Return how many keys have a turn; drops the oldest that have expired."""
        now_s = self._clock.monotonic_s()
        while self._entries:
            oldest = next(iter(self._entries))
            if self._entries[oldest][1] > now_s:
                break
            del self._entries[oldest]
        return len(self._entries)
