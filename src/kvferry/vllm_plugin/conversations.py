"""Which conversations' blocks the scheduler half keeps referenced, until when. Pure.

vLLM's pool has no eviction class of its own, so retention here is a reference. It has to give way
by itself: whoever needs room asks for it, and tails of the oldest conversations go first.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.clock import Clock
from kvferry.protocol.ids import BlockHash

Hashes = tuple[BlockHash, ...]


@dataclass(slots=True)
class _Conversation:
    hashes: list[BlockHash]
    """Of its retained leading blocks, never none."""
    last_hash: BlockHash
    """Of its last full block."""
    ends_at_s: float


class RetainedConversations:
    """Conversations by the hashes of their blocks, least recently retained first."""

    def __init__(self, max_blocks: int, duration_s: float, clock: Clock) -> None:
        self._max_blocks = max_blocks
        self._duration_s = duration_s
        self._clock = clock
        self._by_last: OrderedDict[BlockHash, _Conversation] = OrderedDict()
        self._cover: Counter[BlockHash] = Counter()
        self._next_end_s = math.inf
        """No conversation ends before: most steps need not look at any."""

    @property
    def num_conversations(self) -> int:
        """Conversations with at least one retained block."""
        return len(self._by_last)

    @property
    def num_blocks(self) -> int:
        """Distinct retained blocks."""
        return len(self._cover)

    def add(
        self,
        hashes: Sequence[BlockHash],
        duration_s: float | None,
        partial: BlockHash | None = None,
    ) -> tuple[int, Hashes]:
        """Retain a conversation so far: full blocks of ``hashes``, then the ``partial`` one.

        Returns how many of its leading blocks are retained now, and the hashes to let go of: those
        of its earlier turns, and what is beyond the cap. The new ones are to be retained first.
        ``duration_s`` may shorten the time; 0 ends the conversation.
        """
        lasts_s = self._duration_s if duration_s is None else min(duration_s, self._duration_s)
        leaving: list[BlockHash] = []
        earlier = [block_hash for block_hash in hashes if block_hash in self._by_last]
        whole = [*hashes, partial] if partial is not None else list(hashes)
        kept = whole[: self._max_blocks] if lasts_s > 0 else []
        self._cover.update(kept)
        for last_hash in earlier:
            leaving += self._end(last_hash)
        if kept:
            ends_at_s = self._clock.monotonic_s() + lasts_s
            self._next_end_s = min(self._next_end_s, ends_at_s)
            self._by_last[hashes[-1]] = _Conversation(kept, hashes[-1], ends_at_s)
        leaving += self.give_way(len(self._cover) - self._max_blocks)
        return len(kept), tuple(leaving)

    def expire(self) -> Hashes:
        """End what is past its time; return the hashes to let go of."""
        now_s = self._clock.monotonic_s()
        if now_s < self._next_end_s:
            return ()
        over = [last for last, c in self._by_last.items() if c.ends_at_s <= now_s]
        leaving = tuple(block_hash for last in over for block_hash in self._end(last))
        self._next_end_s = min((c.ends_at_s for c in self._by_last.values()), default=math.inf)
        return leaving

    def give_way(self, num_blocks: int) -> Hashes:
        """Return hashes to let go of, so that ``num_blocks`` fewer blocks are retained."""
        leaving: list[BlockHash] = []
        wanted = len(self._cover) - num_blocks
        while self._by_last and len(self._cover) > wanted:
            last_hash, oldest = next(iter(self._by_last.items()))
            leaving.append(self._uncover(oldest.hashes.pop()))
            if not oldest.hashes:
                del self._by_last[last_hash]
        return tuple(leaving)

    def clear(self) -> Hashes:
        """Retain nothing any more; return the hashes to let go of."""
        return self.give_way(len(self._cover))

    def _end(self, last_hash: BlockHash) -> list[BlockHash]:
        return [self._uncover(h) for h in reversed(self._by_last.pop(last_hash).hashes)]

    def _uncover(self, block_hash: BlockHash) -> BlockHash:
        self._cover[block_hash] -= 1
        if self._cover[block_hash] <= 0:
            del self._cover[block_hash]
        return block_hash
