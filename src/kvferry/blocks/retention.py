"""``RetentionTable``: which conversations' blocks the pool keeps longest, and until when.

Retention takes no reference: it only says which free blocks go last. So an ``allocate`` never fails
for it, and a retained block may be gone at any moment. Conversations are known by block hashes.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from kvferry.blocks.chain_tree import ChainTree
from kvferry.blocks.pool import BlockPool
from kvferry.clock import Clock
from kvferry.errors import LocalProtocolError
from kvferry.options import check_options, option
from kvferry.protocol.hashing import PartialContent
from kvferry.protocol.headers import DEFAULT_RETENTION_S
from kvferry.protocol.ids import BlockHash, BlockNumber

RetentionEnd = Literal["expired", "superseded", "ended", "cap", "evicted", "reset"]
"""Why a conversation is retained no longer.

Its time was over; a later turn is retained in its place; the client ended it; its last own block
went for the cap, or for an allocation; everything was released.
"""

_MAX_STALE_EXPIRIES = 64


@dataclass(frozen=True, slots=True)
class RetentionLimits:
    """Options of retention. Raises ``ConfigError`` for a value that cannot work."""

    duration_s: float = option(
        DEFAULT_RETENTION_S,
        "How long prompt and answer are retained for a later turn, as the last to be reused; a "
        "request may shorten it; 0 is off.",
        flag="--retention-s",
        minimum=0,
    )
    max_share: float = option(
        0.5,
        "Share of the pool that may be retained.",
        flag="--max-retained-share",
        above=0,
        maximum=1,
    )
    renews_on_use: bool = option(
        False,
        "Whether the time starts again when a peer reads what is retained.",
        flag="--retention-renew/--no-retention-renew",
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(eq=False, slots=True)
class _Conversation:
    number: int
    last_hash: BlockHash
    """Of the last full block of its last turn, whether or not so much of it is retained."""
    duration_s: float
    ends_at_s: float


class RetentionTable:
    """The conversations that one instance retains. Thread-safe: guarded by the pool's lock."""

    def __init__(self, pool: BlockPool, clock: Clock, limits: RetentionLimits) -> None:
        self._pool = pool
        self._clock = clock
        self._limits = limits
        self._max_blocks = int(limits.max_share * pool.num_blocks)
        self._chains = ChainTree()
        # Least recently retained or renewed first.
        self._conversations: OrderedDict[int, _Conversation] = OrderedDict()
        self._by_last_hash: dict[BlockHash, _Conversation] = {}
        # (end on the clock, number); one that the conversation no longer has is stale.
        self._expiries: list[tuple[float, int]] = []
        self._next_number = 1
        self._ends: dict[RetentionEnd, int] = dict.fromkeys(get_args(RetentionEnd), 0)
        # Filled by the pool in the middle of an allocation, emptied by the next call here.
        self._lost: deque[BlockHash] = deque()
        pool.tell_retained_lost(self._lost.append)

    @property
    def num_conversations(self) -> int:
        """Conversations with at least one retained block of their own."""
        with self._pool.lock:
            self._note_lost()
            return len(self._conversations)

    @property
    def num_blocks(self) -> int:
        """Distinct blocks that are retained."""
        return self._pool.num_retained

    @property
    def max_blocks(self) -> int:
        """Distinct blocks that may be retained."""
        return self._max_blocks

    @property
    def ends(self) -> Mapping[RetentionEnd, int]:
        """How many conversations are retained no longer, by reason, since the start."""
        with self._pool.lock:
            self._note_lost()
            return dict(self._ends)

    def retain(
        self,
        hashes: Sequence[BlockHash],
        duration_s: float | None = None,
        partial: BlockHash | None = None,
    ) -> int:
        """Retain a conversation so far; return how many of its blocks now are.

        ``hashes`` are of its full blocks, prompt and answer, from the first on; ``partial`` is of
        the block that it ends in. Earlier turns of it, whose last full block is among them, are
        superseded. ``duration_s`` may shorten the time, not lengthen it; 0 ends the conversation.
        Best called once the request's blocks were dropped: then they are evicted in the order of
        this sequence. Raises ``LocalProtocolError`` for a duration below 0 or hashes that are not
        chained.
        """
        duration_s = self._capped(duration_s)
        if self._limits.duration_s == 0:
            return 0
        with self._pool.lock:
            self._note_lost()
            earlier = self._that_end_among(hashes)
            num_retained = 0
            if duration_s > 0:
                num_retained = self._begin(hashes, duration_s, partial)
            for conversation in earlier:
                self._end(conversation, "superseded" if duration_s > 0 else "ended")
            self._keep_to_cap()
            return num_retained

    def renew(self, hashes: Sequence[BlockHash]) -> None:
        """Start the time again for the conversations of which ``hashes``, in use now, tell.

        ``hashes`` are those found, from the first block on. A head that several conversations share
        renews none of them. Does nothing unless the limits say so.
        """
        if not self._limits.renews_on_use:
            return
        with self._pool.lock:
            self._note_lost()
            for number in sorted(self._chains.used_by(hashes)):
                conversation = self._conversations[number]
                self._conversations.move_to_end(number)
                self._lasts_until(conversation, self._clock.monotonic_s() + conversation.duration_s)

    def expire(self) -> int:
        """End what is past its time; return how many conversations that was.

        The lock is given back after each, so that nobody waits for many.
        """
        num_expired = 0
        while True:
            with self._pool.lock:
                self._note_lost()
                first = self._first_to_expire()
                if first is None or first.ends_at_s > self._clock.monotonic_s():
                    return num_expired
                self._end(first, "expired")
                num_expired += 1

    def next_expiry_s(self) -> float | None:
        """Return when the next conversation's time is over, on the clock; None without any."""
        with self._pool.lock:
            self._note_lost()
            first = self._first_to_expire()
            return None if first is None else first.ends_at_s

    def release_all(self) -> None:
        """Retain nothing any more."""
        with self._pool.lock:
            self._note_lost()
            self._end_all(list(self._conversations), "reset")

    # -- beginnings and ends ------------------------------------------------------------------

    def _begin(
        self, hashes: Sequence[BlockHash], duration_s: float, partial: BlockHash | None
    ) -> int:
        whole = [*hashes, partial] if hashes and partial is not None else hashes
        # The head alone where the whole is more than may be retained.
        kept = whole[: min(self._pool.match(whole), self._max_blocks)]
        if not kept:
            return 0
        conversation = _Conversation(self._next_number, hashes[-1], duration_s, 0.0)
        self._chains.add(conversation.number, kept)
        self._next_number += 1
        self._conversations[conversation.number] = conversation
        self._by_last_hash[conversation.last_hash] = conversation
        self._lasts_until(conversation, self._clock.monotonic_s() + duration_s)
        return self._pool.retain(kept)

    def _end(self, conversation: _Conversation, reason: RetentionEnd) -> None:
        self._pool.stop_retaining(self._chains.remove(conversation.number))
        self._forget(conversation.number, reason)

    def _end_all(self, numbers: Iterable[int], reason: RetentionEnd) -> None:
        for number in numbers:
            self._end(self._conversations[number], reason)

    def _forget(self, number: int, reason: RetentionEnd) -> None:
        conversation = self._conversations.pop(number)
        if self._by_last_hash.get(conversation.last_hash) is conversation:
            del self._by_last_hash[conversation.last_hash]
        self._ends[reason] += 1

    def _keep_to_cap(self) -> None:
        while (excess := self._pool.num_retained - self._max_blocks) > 0 and self._conversations:
            oldest = next(iter(self._conversations))
            self._pool.stop_retaining(self._chains.shorten(oldest, excess))
            if oldest not in self._chains:
                self._forget(oldest, "cap")

    def _note_lost(self) -> None:
        while self._lost:
            for number in self._chains.lose(self._lost.popleft()):
                self._forget(number, "evicted")

    def _that_end_among(self, hashes: Sequence[BlockHash]) -> list[_Conversation]:
        return [
            self._by_last_hash[block_hash]
            for block_hash in hashes
            if block_hash in self._by_last_hash
        ]

    # -- time ---------------------------------------------------------------------------------

    def _capped(self, duration_s: float | None) -> float:
        if duration_s is None:
            return self._limits.duration_s
        if not duration_s >= 0:  # NaN compares false with everything
            raise LocalProtocolError(f"a conversation cannot be retained for {duration_s} s")
        return min(duration_s, self._limits.duration_s)

    def _lasts_until(self, conversation: _Conversation, ends_at_s: float) -> None:
        conversation.ends_at_s = ends_at_s
        heapq.heappush(self._expiries, (ends_at_s, conversation.number))
        if len(self._expiries) > 2 * len(self._conversations) + _MAX_STALE_EXPIRIES:
            self._expiries = [(c.ends_at_s, c.number) for c in self._conversations.values()]
            heapq.heapify(self._expiries)

    def _first_to_expire(self) -> _Conversation | None:
        while self._expiries:
            ends_at_s, number = self._expiries[0]
            conversation = self._conversations.get(number)
            if conversation is not None and conversation.ends_at_s == ends_at_s:
                return conversation
            heapq.heappop(self._expiries)
        return None


class RenewingBlocks:
    """The pool as an exchange sees it: what a peer reads of a conversation renews it. Thread-safe,
    as both are."""

    def __init__(self, pool: BlockPool, retention: RetentionTable) -> None:
        self._pool = pool
        self._retention = retention
        self.num_blocks = pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks without a reference, cached ones included."""
        return self._pool.num_free

    def hold(self, blocks: Sequence[BlockNumber]) -> None:
        """See ``BlockPool.hold``."""
        self._pool.hold(blocks)

    def drop(self, blocks: Sequence[BlockNumber]) -> None:
        """See ``BlockPool.drop``."""
        self._pool.drop(blocks)

    def acquire_cached(self, hashes: Sequence[BlockHash]) -> list[BlockNumber]:
        """See ``BlockPool.acquire_cached``; what is found is in use."""
        found = self._pool.acquire_cached(hashes)
        self._retention.renew(hashes[: len(found)])
        return found

    def acquire_partials(
        self, parent: BlockHash, max_count: int
    ) -> list[tuple[PartialContent, BlockNumber]]:
        """See ``BlockPool.acquire_partials``."""
        return self._pool.acquire_partials(parent, max_count)
