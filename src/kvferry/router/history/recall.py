"""Recalls who holds a request's conversation, and remembers who answered it.

What is remembered is a hint about where to ask: instances check it by content, so a wrong or stale
one costs a round trip.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.client.nixl_history import LIFETIME_S, NixlHistory, ReadOnce
from kvferry.clock import Clock
from kvferry.protocol.params import PeerAddress, Role
from kvferry.router.config import ConversationConfig, ReadBack
from kvferry.router.fleet.registry import Fleet, Health, InstanceView
from kvferry.router.history.keys import ConversationKeys
from kvferry.router.history.prefix import Digest, PromptPrefix


class LookupResult(enum.StrEnum):
    """How a request's conversation was looked up; the values are metric labels."""

    ID = "id"
    PREFIX = "prefix"
    MISS = "miss"
    STALE = "stale"
    """It is remembered, but who held it is down or was started anew."""


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


@dataclass(frozen=True, slots=True)
class Recollection:
    """What is remembered of a request's conversation."""

    holder: Holder
    is_same: bool
    """Whether it is known by its id or by a prompt that this one continues, rather than by a
    beginning that other conversations share. Only then is the holder preferred."""
    kept: ReadOnce | None = None
    """Blocks of an earlier prompt that this one continues, for one read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A request's conversation, and what the request asks for it."""

    keys: ConversationKeys
    read_back: ReadBack
    retention_s: float | None
    """None: the instance's own default. 0: it ends with this request."""
    recollection: Recollection | None


class TurnStore:
    """The turns that are remembered: at most ``max_entries`` keys, least recently used go."""

    def __init__(self, clock: Clock, *, max_entries: int) -> None:
        self._clock = clock
        self._max_entries = max_entries
        self._entries: OrderedDict[Digest, tuple[Turn, float]] = OrderedDict()
        """With the time at which each expires; the least recently used first."""

    def find_first(
        self, keys: Sequence[Digest], accept: Callable[[Turn], bool]
    ) -> tuple[int, Turn] | None:
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


class Recall:
    """The conversations of one router."""

    def __init__(self, clock: Clock, fleet: Fleet, config: ConversationConfig) -> None:
        self._store = TurnStore(clock, max_entries=config.max_conversations)
        self._fleet = fleet
        self._config = config

    def num_remembered(self) -> int:
        """Return how many ids and turns are remembered."""
        return self._store.num_remembered()

    def look_up(self, keys: ConversationKeys) -> tuple[Recollection | None, LookupResult]:
        """Return who holds the conversation, None where that is not known or not any more.

        The id goes first, unless an earlier prompt that this one continues went further than the
        id's last: the branches of one conversation may share its id.
        """
        search = _Search(self._store, self._fleet, keys.prefix)
        named = None if keys.by_id is None else search.first((keys.by_id,))
        floor = named.length if named is not None and search.continues(named) else 0
        found = search.longest_beyond(floor)
        if found is not None and (named is None or search.continues(found)):
            is_same = search.continues(found)
            kept = found.kept if is_same else None
            return Recollection(found.holder, is_same, kept), LookupResult.PREFIX
        if named is not None:
            kept = named.kept if floor else None
            return Recollection(named.holder, True, kept), LookupResult.ID
        return None, LookupResult.STALE if search.has_met_stale else LookupResult.MISS

    def note_answer(
        self, conversation: Conversation, view: InstanceView, kept: NixlHistory | None = None
    ) -> None:
        """Remember that ``view`` answers; or forget the conversation where that ends it.

        To be called before the client has got the last byte, so that its next turn finds it, and
        again at the end, from where its time counts. ``kept``: the blocks that it has named.
        """
        keys, retention_s = conversation.keys, conversation.retention_s
        if retention_s == 0:
            self._store.forget(keys.to_forget())
            return
        tip = keys.prefix.tip
        once = ReadOnce(kept) if kept is not None and tip.is_whole else None
        turn = Turn(Holder(view.url, view.peer), tip.length, tip.digest, once)
        lifetime_s = self._config.conversation_ttl_s if retention_s is None else retention_s
        if once is not None:
            lifetime_s = min(lifetime_s, LIFETIME_S)
        self._store.remember(keys.to_remember(), turn, lifetime_s)

    def history_for(
        self, conversation: Conversation, prefill: InstanceView
    ) -> PeerAddress | NixlHistory | None:
        """Return who probably holds blocks of the prompt that ``prefill`` is to compute.

        Where the holder has named the blocks, they are returned instead, once. None where nobody
        has any, where one of the two cannot read back, or where they are one.
        """
        recollection = conversation.recollection
        if conversation.read_back is ReadBack.OFF or recollection is None:
            return None
        # Looked at once more: the request may have waited since.
        holder = self._fleet.view(recollection.holder.url, Role.DECODE)
        peer = recollection.holder.peer
        if holder is None or peer is None or peer != holder.peer or peer == prefill.peer:
            return None
        if prefill.url in holder.apart_from:
            return None
        if recollection.kept is not None:
            return recollection.kept.take()
        return peer if holder.can_read_back and prefill.can_read_back else None


class _Search:
    """One search of the store, for turns that one prompt may continue."""

    def __init__(self, store: TurnStore, fleet: Fleet, prefix: PromptPrefix) -> None:
        self._store = store
        self._fleet = fleet
        self._prefix = prefix
        self.has_met_stale = False

    def first(self, keys: Sequence[Digest]) -> Turn | None:
        """Return the first turn whose holder is there still."""
        found = self._store.find_first(keys, self._accept)
        return None if found is None else found[1]

    def longest_beyond(self, length: int) -> Turn | None:
        """Return the turn with which the prompt has the most in common, if more than ``length``."""
        prefix = self._prefix
        keys = prefix.keys_beyond(length)
        found = self._store.find_first(keys, self._accept)
        if found is not None:
            return self.first(prefix.finer_keys(keys[found[0]])) or found[1]
        return None if length else self.first(prefix.finer_keys(None))

    def continues(self, turn: Turn) -> bool:
        """Whether the prompt begins with all of the turn's."""
        return turn.length > 0 and self._prefix.digest_at(turn.length) == turn.digest

    def _accept(self, turn: Turn) -> bool:
        view = self._fleet.view(turn.holder.url, Role.DECODE)
        is_there = (
            view is not None and view.health is not Health.DOWN and view.peer == turn.holder.peer
        )
        self.has_met_stale = self.has_met_stale or not is_there
        return is_there
