"""What a pool and its retention should know, in the plainest way: lists that are searched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.protocol.ids import BlockHash, BlockNumber

NUM_BLOCKS = 12


@dataclass
class ModelPool:
    references: Counter[BlockNumber] = field(default_factory=Counter)
    cached_order: list[BlockNumber] = field(default_factory=list)
    """Free blocks with a hash, next to be evicted first."""
    retained_order: list[BlockNumber] = field(default_factory=list)
    """The same, for those that go last."""
    retained: set[BlockNumber] = field(default_factory=set)
    hashes: dict[BlockNumber, BlockHash] = field(default_factory=dict)

    def free(self) -> set[BlockNumber]:
        return {BlockNumber(n) for n in range(NUM_BLOCKS)} - set(+self.references)

    def take(self, blocks: Sequence[BlockNumber]) -> None:
        for block in blocks:
            self.references[block] += 1
            self._leave_orders(block)

    def drop(self, blocks: Sequence[BlockNumber]) -> None:
        for block in reversed(blocks):
            self.references[block] -= 1
            self._enter_order(block)

    def find(self, block_hash: BlockHash) -> BlockNumber | None:
        return next((b for b, known in self.hashes.items() if known == block_hash), None)

    def find_leading(self, hashes: Sequence[BlockHash]) -> list[BlockNumber]:
        found: list[BlockNumber] = []
        for block_hash in hashes:
            block = self.find(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def retain(self, blocks: Sequence[BlockNumber]) -> None:
        for block in reversed(blocks):
            self.retained.add(block)
            self._leave_orders(block)
            self._enter_order(block)

    def stop_retaining(self, hashes_from_tail: Sequence[BlockHash]) -> None:
        for block_hash in hashes_from_tail:
            block = self.find(block_hash)
            if block in self.retained:
                self.retained.remove(block)
                self._leave_orders(block)
                self._enter_order(block)

    def _leave_orders(self, block: BlockNumber) -> None:
        for order in (self.cached_order, self.retained_order):
            if block in order:
                order.remove(block)

    def _enter_order(self, block: BlockNumber) -> None:
        if self.references[block] == 0 and block in self.hashes:
            (self.retained_order if block in self.retained else self.cached_order).append(block)


@dataclass(eq=False)
class ModelConversation:
    number: int
    last_hash: BlockHash
    covered: list[BlockHash]
    duration_s: float
    ends_at_s: float


@dataclass
class ModelRetention:
    pool: ModelPool
    max_blocks: int
    conversations: list[ModelConversation] = field(default_factory=list)
    """Least recently retained or renewed first."""
    num_begun: int = 0
    lost: set[BlockHash] = field(default_factory=set)

    def retain(self, hashes: Sequence[BlockHash], now_s: float, duration_s: float) -> int:
        earlier = [c for h in hashes for c in self.conversations if c.last_hash == h]
        blocks = self.pool.find_leading(hashes)[: self.max_blocks] if duration_s else []
        if blocks:
            self.num_begun += 1
            covered = list(hashes[: len(blocks)])
            self.conversations.append(
                ModelConversation(
                    self.num_begun, hashes[-1], covered, duration_s, now_s + duration_s
                )
            )
            self.lost -= set(covered)
            self.pool.retain(blocks)
        for conversation in earlier:
            self._end(conversation)
        while len(self.pool.retained) > self.max_blocks:
            excess = len(self.pool.retained) - self.max_blocks
            self.pool.stop_retaining(self._cut(self.conversations[0], excess))
        return len(blocks)

    def renew(self, hashes: Sequence[BlockHash], now_s: float) -> None:
        used: set[ModelConversation] = set()
        covering: list[ModelConversation] = []
        for block_hash in hashes:
            covering = [c for c in self.conversations if block_hash in c.covered]
            if not covering:
                break
            used |= {c for c in covering if c.covered[-1] == block_hash}
        if len(covering) == 1:
            used |= set(covering)
        for conversation in sorted(used, key=lambda c: c.number):
            self.conversations.remove(conversation)
            self.conversations.append(conversation)
            conversation.ends_at_s = now_s + conversation.duration_s

    def expire(self, now_s: float) -> int:
        due = [c for c in self.conversations if c.ends_at_s <= now_s]
        for conversation in sorted(due, key=lambda c: (c.ends_at_s, c.number)):
            self._end(conversation)
        return len(due)

    def release_all(self) -> None:
        for conversation in list(self.conversations):
            self._end(conversation)

    def lose(self, block_hash: BlockHash) -> None:
        self.lost.add(block_hash)
        that_end = [c for c in self.conversations if c.covered[-1] == block_hash]
        that_go_on = [c for c in self.conversations if block_hash in c.covered[:-1]]
        that_end.sort(key=lambda c: c.number)
        leaving = that_end if that_go_on else that_end[:-1]
        for conversation in leaving:
            self.conversations.remove(conversation)
        if that_end and not that_go_on:
            self._cut(that_end[-1], 0)

    def _end(self, conversation: ModelConversation) -> None:
        if conversation in self.conversations:
            self.pool.stop_retaining(self._cut(conversation, NUM_BLOCKS))

    def _cut(self, conversation: ModelConversation, count: int) -> list[BlockHash]:
        """What only this conversation covers, from its tail on, up to ``count``."""
        others = {h for c in self.conversations if c is not conversation for h in c.covered}
        covered, cut = conversation.covered, list[BlockHash]()
        while covered and covered[-1] not in others:
            if covered[-1] not in self.lost:
                if len(cut) == count:
                    break
                cut.append(covered[-1])
            covered.pop()
        if not covered or covered[-1] in others:
            self.conversations.remove(conversation)
        return cut
