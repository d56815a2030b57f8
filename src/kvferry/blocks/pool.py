"""``BlockPool``: who refers to which block, which block is reused next, which hash finds which.

Owns numbers only. Knows nothing of the memory behind a block, of requests, peers or time.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvferry.errors import CapacityError, LocalProtocolError
from kvferry.protocol.ids import BlockHash, BlockNumber


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """Counts of one moment."""

    num_blocks: int
    num_free: int
    """Blocks without a reference, cached ones included."""
    num_cached: int
    """Blocks that a hash finds, with or without a reference."""


@dataclass(frozen=True, slots=True)
class PoolState:
    """Everything a pool knows, copied for ``check_integrity``."""

    references: tuple[int, ...]
    free_plain: tuple[BlockNumber, ...]
    free_cached: tuple[BlockNumber, ...]
    """In the order of eviction."""
    hash_by_block: Mapping[BlockNumber, BlockHash]
    block_by_hash: Mapping[BlockHash, BlockNumber]


class BlockPool:
    """Reference counts, free order and prefix cache of ``num_blocks`` blocks. Thread-safe.

    Every method either does all it was asked or raises and changes nothing. ``lock`` may be held
    by a caller that needs several calls to be one step.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise LocalProtocolError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self.lock = threading.RLock()
        self._references = [0] * num_blocks
        # Free blocks without a hash are taken from the end: the last freed is the warmest.
        # Filled backwards, so that a fresh pool is handed out from block 0.
        self._free_plain: OrderedDict[BlockNumber, None] = OrderedDict.fromkeys(
            BlockNumber(number) for number in reversed(range(num_blocks))
        )
        # Free blocks with a hash are evicted from the front: the first freed.
        self._free_cached: OrderedDict[BlockNumber, None] = OrderedDict()
        self._hash_by_block: dict[BlockNumber, BlockHash] = {}
        self._block_by_hash: dict[BlockHash, BlockNumber] = {}

    @property
    def num_free(self) -> int:
        """Blocks without a reference, cached ones included."""
        with self.lock:
            return len(self._free_plain) + len(self._free_cached)

    def allocate(self, count: int) -> list[BlockNumber]:
        """Take ``count`` free blocks, one reference each; they are no longer found by hash.

        Blocks without a hash go first, then cached ones, least recently freed first. The result is
        in ascending order, so that neighbours can be moved in one run. Raises ``CapacityError``
        if fewer are free; then none is taken.
        """
        if count < 0:
            raise LocalProtocolError(f"cannot allocate {count} blocks")
        with self.lock:
            num_free = self.num_free
            if count > num_free:
                raise CapacityError(
                    f"{count} blocks wanted, {num_free} of {self.num_blocks} are free"
                )
            num_plain = min(count, len(self._free_plain))
            taken = [self._free_plain.popitem()[0] for _ in range(num_plain)]
            taken += [self._evict() for _ in range(count - num_plain)]
            for block in taken:
                self._references[block] = 1
        taken.sort()
        return taken

    def match(self, hashes: Sequence[BlockHash]) -> int:
        """Return how many leading ``hashes`` are found. Grants nothing."""
        with self.lock:
            return len(self._find_leading(hashes))

    def acquire_cached(self, hashes: Sequence[BlockHash]) -> list[BlockNumber]:
        """Return the blocks of the leading ``hashes`` that are found, one more reference each."""
        with self.lock:
            found = self._find_leading(hashes)
            for block in found:
                if self._references[block] == 0:
                    del self._free_cached[block]
                self._references[block] += 1
            return found

    def hold(self, blocks: Sequence[BlockNumber]) -> None:
        """Add one reference to each of ``blocks``; a block named twice gets two.

        Raises ``LocalProtocolError`` for a block without a reference or out of range.
        """
        with self.lock:
            for block in blocks:
                if self.num_references(block) == 0:
                    raise LocalProtocolError(f"block {block} is held but has no reference")
            for block in blocks:
                self._references[block] += 1

    def drop(self, blocks: Sequence[BlockNumber]) -> None:
        """Take one reference from each of ``blocks``; pass them in sequence order.

        A block at zero becomes free, and of those the last in ``blocks`` is evicted first: a tail
        is worth less than the head that it needs. Raises ``LocalProtocolError`` for a block that
        has too few references or is out of range.
        """
        with self.lock:
            for block, times in Counter(blocks).items():
                if self.num_references(block) < times:
                    raise LocalProtocolError(
                        f"block {block} is dropped {times} times but has "
                        f"{self._references[block]} references"
                    )
            for block in reversed(blocks):
                self._references[block] -= 1
                if self._references[block] == 0:
                    self._set_free(block)

    def publish(self, block: BlockNumber, block_hash: BlockHash) -> None:
        """Let ``block`` be found by ``block_hash``, because what fills it has completed.

        If another block already carries the hash, that one stays and ``block`` remains without.
        Raises ``LocalProtocolError`` if ``block`` has no reference or carries another hash.
        """
        with self.lock:
            if self.num_references(block) == 0:
                raise LocalProtocolError(f"block {block} is published but has no reference")
            present = self._hash_by_block.get(block)
            if present is not None and present != block_hash:
                raise LocalProtocolError(
                    f"block {block} is published as {block_hash.hex()} but is {present.hex()}"
                )
            if block_hash not in self._block_by_hash:
                self._block_by_hash[block_hash] = block
                self._hash_by_block[block] = block_hash

    def clear_cache(self) -> None:
        """Forget every hash. References stay as they are."""
        with self.lock:
            self._block_by_hash.clear()
            self._hash_by_block.clear()
            while self._free_cached:
                self._free_plain[self._free_cached.popitem()[0]] = None

    def hash_of(self, block: BlockNumber) -> BlockHash | None:
        """Return the hash by which ``block`` is found, if there is one."""
        with self.lock:
            self.num_references(block)
            return self._hash_by_block.get(block)

    def num_references(self, block: BlockNumber) -> int:
        """Return how many references ``block`` has. Raises ``LocalProtocolError`` out of range."""
        if not 0 <= block < self.num_blocks:
            raise LocalProtocolError(f"block {block} is not in a pool of {self.num_blocks}")
        with self.lock:
            return self._references[block]

    def snapshot(self) -> PoolSnapshot:
        """Return counts for metrics and tests."""
        with self.lock:
            return PoolSnapshot(self.num_blocks, self.num_free, len(self._block_by_hash))

    def dump(self) -> PoolState:
        """Return a copy of everything; O(``num_blocks``), for ``check_integrity``."""
        with self.lock:
            return PoolState(
                references=tuple(self._references),
                free_plain=tuple(self._free_plain),
                free_cached=tuple(self._free_cached),
                hash_by_block=dict(self._hash_by_block),
                block_by_hash=dict(self._block_by_hash),
            )

    def _find_leading(self, hashes: Sequence[BlockHash]) -> list[BlockNumber]:
        found: list[BlockNumber] = []
        for block_hash in hashes:
            block = self._block_by_hash.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def _evict(self) -> BlockNumber:
        block, _ = self._free_cached.popitem(last=False)
        del self._block_by_hash[self._hash_by_block.pop(block)]
        return block

    def _set_free(self, block: BlockNumber) -> None:
        if block in self._hash_by_block:
            self._free_cached[block] = None
        else:
            self._free_plain[block] = None
