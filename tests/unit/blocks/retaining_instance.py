"""An instance of a pool and what it retains, without an engine."""

from __future__ import annotations

from kvferry.blocks.pool import BlockPool
from kvferry.blocks.retention import RetentionLimits, RetentionTable
from kvferry.protocol.ids import BlockHash, BlockNumber
from tests.support.block_integrity import check_integrity
from tests.support.fake_clock import FakeClock

NUM_BLOCKS = 16
MAX_BLOCKS = 8
DURATION_S = 480.0


def chain(text: str) -> list[BlockHash]:
    """A chain of one hash per letter: each is the text up to there, so heads are shared."""
    return [BlockHash(text[: end + 1].encode().ljust(32, b".")) for end in range(len(text))]


class Instance:
    """A pool and what it retains; a conversation is a text of one letter per block."""

    def __init__(self, limits: RetentionLimits | None = None, num_blocks: int = NUM_BLOCKS) -> None:
        self.clock = FakeClock(100.0)
        self.pool = BlockPool(num_blocks)
        self.table = RetentionTable(self.pool, self.clock, limits or RetentionLimits())

    def compute(self, text: str) -> list[BlockNumber]:
        """What a request does: take the blocks that are found, compute and publish the others."""
        hashes = chain(text)
        blocks = self.pool.acquire_cached(hashes)
        new = self.pool.allocate(len(hashes) - len(blocks))
        for block, block_hash in zip(new, hashes[len(blocks) :], strict=True):
            self.pool.publish(block, block_hash)
        return blocks + new

    def turn(self, text: str, duration_s: float | None = None) -> int:
        """A whole request, retained at its end."""
        self.pool.drop(self.compute(text))
        num_retained = self.table.retain(chain(text), duration_s)
        self.check()
        return num_retained

    def check(self) -> None:
        check_integrity(self.pool)
        assert self.table.num_blocks <= self.table.max_blocks

    def retained(self, *texts: str) -> list[str]:
        """The leading part of each text that is retained."""
        state = self.pool.dump()
        parts = []
        for text in texts:
            marks = [
                state.block_by_hash.get(block_hash) in state.retained for block_hash in chain(text)
            ]
            assert marks == sorted(marks, reverse=True), "a tail without its head"
            parts.append(text[: sum(marks)])
        return parts

    def ends(self) -> dict[str, int]:
        """The reasons that have occurred."""
        return {reason: count for reason, count in self.table.ends.items() if count}
