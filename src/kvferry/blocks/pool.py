"""``BlockPool``: who refers to which block, which block is reused next, which hash finds which.

Owns numbers only. Knows nothing of the memory behind a block, of requests, peers or time.

A conversation ends where it ends, mostly within a block. Such a partial block is found by the hash
of the full block before it: how many tokens it has, and a hash by which whoever asks sees whether
they are its own.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from kvferry.errors import CapacityError, LocalProtocolError
from kvferry.protocol.hashing import PartialContent
from kvferry.protocol.ids import BlockHash, BlockNumber


class PartialBlocks:
    """Contents by the block before them. Not locked: its owner is."""

    def __init__(self) -> None:
        self._by_hash: dict[BlockHash, PartialContent] = {}
        self._after: dict[BlockHash, dict[BlockHash, PartialContent]] = {}

    def __len__(self) -> int:
        return len(self._by_hash)

    def add(self, content: PartialContent) -> None:
        """Let ``content`` be found, as the newest. Raises ``LocalProtocolError`` for one without a
        token."""
        if content.num_tokens < 1:
            raise LocalProtocolError(f"a partial block cannot have {content.num_tokens} tokens")
        self.discard(content.block_hash)
        self._by_hash[content.block_hash] = content
        self._after.setdefault(content.parent, {})[content.block_hash] = content

    def discard(self, block_hash: BlockHash) -> None:
        """Forget what ``block_hash`` names; a full block's is ignored."""
        content = self._by_hash.pop(block_hash, None)
        if content is not None:
            siblings = self._after[content.parent]
            del siblings[block_hash]
            if not siblings:
                del self._after[content.parent]

    def clear(self) -> None:
        """Forget all."""
        self._by_hash.clear()
        self._after.clear()

    def after(self, parent: BlockHash, max_count: int) -> list[PartialContent]:
        """Return what follows the block ``parent``, the newest ``max_count``, newest first."""
        return list(islice(reversed(self._after.get(parent, {}).values()), max_count))


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """Counts of one moment."""

    num_blocks: int
    num_free: int
    """Blocks without a reference, cached ones included."""
    num_cached: int
    """Blocks that a hash finds, with or without a reference."""
    num_retained: int
    """Of those, the blocks that go last."""
    num_retained_evicted: int
    """Retained blocks that ``allocate`` has taken, ever."""


@dataclass(frozen=True, slots=True)
class PoolState:
    """Everything a pool knows, copied for ``check_integrity``."""

    references: tuple[int, ...]
    free_plain: tuple[BlockNumber, ...]
    free_cached: tuple[BlockNumber, ...]
    """In the order of eviction, as the next."""
    free_retained: tuple[BlockNumber, ...]
    retained: frozenset[BlockNumber]
    """With or without a reference."""
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
        # The same, and the last to go.
        self._free_retained: OrderedDict[BlockNumber, None] = OrderedDict()
        self._retained: set[BlockNumber] = set()
        self._num_retained_evicted = 0
        self._on_retained_lost: Callable[[BlockHash], None] | None = None
        self._hash_by_block: dict[BlockNumber, BlockHash] = {}
        self._block_by_hash: dict[BlockHash, BlockNumber] = {}
        self._partials = PartialBlocks()

    @property
    def num_free(self) -> int:
        """Blocks without a reference, cached and retained ones included."""
        with self.lock:
            return len(self._free_plain) + len(self._free_cached) + len(self._free_retained)

    @property
    def num_retained(self) -> int:
        """Blocks marked as retained, with or without a reference."""
        with self.lock:
            return len(self._retained)

    @property
    def num_retained_evicted(self) -> int:
        """Retained blocks that ``allocate`` has taken, ever."""
        with self.lock:
            return self._num_retained_evicted

    def allocate(self, count: int) -> list[BlockNumber]:
        """Take ``count`` free blocks, one reference each; they are no longer found by hash.

        Blocks without a hash go first, then cached ones, then retained ones, of both the least
        recently freed first. The result is in ascending order, so that neighbours can be moved in
        one run. Raises ``CapacityError`` if fewer are free; then none is taken.
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
                    del self._free_list(block)[block]
                self._references[block] += 1
            return found

    def acquire_partials(
        self, parent: BlockHash, max_count: int
    ) -> list[tuple[PartialContent, BlockNumber]]:
        """Return what was published as partial after the block ``parent``, newest first, with one
        more reference each."""
        with self.lock:
            contents = self._partials.after(parent, max_count)
            return [(c, self.acquire_cached([c.block_hash])[0]) for c in contents]

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
                    self._free_list(block)[block] = None

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

    def publish_partial(self, block: BlockNumber, content: PartialContent) -> None:
        """Let ``block``, which nobody fills any further, be found as the partial one it is.

        Raises as ``publish`` does.
        """
        with self.lock:
            self.publish(block, content.block_hash)
            self._partials.add(content)

    def retain(self, hashes: Sequence[BlockHash]) -> int:
        """Let the blocks of the leading ``hashes`` that are found go last; return how many.

        A free one counts as freed now, its tail before its head; one in use takes its place among
        the retained ones when it is freed.
        """
        with self.lock:
            found = self._find_leading(hashes)
            for block in reversed(found):
                is_free = self._references[block] == 0
                if is_free:
                    del self._free_list(block)[block]
                self._retained.add(block)
                if is_free:
                    self._free_retained[block] = None
            return len(found)

    def stop_retaining(self, hashes: Sequence[BlockHash]) -> None:
        """Make the blocks that ``hashes`` find ordinary cached ones, the free ones freed now.

        A hash that finds no retained block is ignored.
        """
        with self.lock:
            for block_hash in reversed(hashes):
                block = self._block_by_hash.get(block_hash)
                if block is None or block not in self._retained:
                    continue
                self._retained.remove(block)
                if self._references[block] == 0:
                    del self._free_retained[block]
                    self._free_cached[block] = None

    def tell_retained_lost(self, listener: Callable[[BlockHash], None]) -> None:
        """Call ``listener`` with the hash of each retained block that is evicted or forgotten.

        It is called under ``lock`` and must not raise. Raises ``LocalProtocolError`` for a second
        listener.
        """
        with self.lock:
            if self._on_retained_lost is not None:
                raise LocalProtocolError("a pool has one listener for lost retained blocks")
            self._on_retained_lost = listener

    def clear_cache(self) -> None:
        """Forget every hash, and what was retained. References stay as they are."""
        with self.lock:
            for block in list(self._retained):
                self._lose_retained(block)
            self._block_by_hash.clear()
            self._hash_by_block.clear()
            self._partials.clear()
            for free in (self._free_cached, self._free_retained):
                while free:
                    self._free_plain[free.popitem()[0]] = None

    def num_references(self, block: BlockNumber) -> int:
        """Return how many references ``block`` has. Raises ``LocalProtocolError`` out of range."""
        if not 0 <= block < self.num_blocks:
            raise LocalProtocolError(f"block {block} is not in a pool of {self.num_blocks}")
        with self.lock:
            return self._references[block]

    def snapshot(self) -> PoolSnapshot:
        """Return counts for metrics and tests."""
        with self.lock:
            return PoolSnapshot(
                num_blocks=self.num_blocks,
                num_free=self.num_free,
                num_cached=len(self._block_by_hash),
                num_retained=len(self._retained),
                num_retained_evicted=self._num_retained_evicted,
            )

    def dump(self) -> PoolState:
        """Return a copy of everything; O(``num_blocks``), for ``check_integrity``."""
        with self.lock:
            return PoolState(
                references=tuple(self._references),
                free_plain=tuple(self._free_plain),
                free_cached=tuple(self._free_cached),
                free_retained=tuple(self._free_retained),
                retained=frozenset(self._retained),
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
        if self._free_cached:
            block, _ = self._free_cached.popitem(last=False)
        else:
            block, _ = self._free_retained.popitem(last=False)
            self._lose_retained(block)
            self._num_retained_evicted += 1
        block_hash = self._hash_by_block.pop(block)
        del self._block_by_hash[block_hash]
        self._partials.discard(block_hash)
        return block

    def _lose_retained(self, block: BlockNumber) -> None:
        self._retained.remove(block)
        if self._on_retained_lost is not None:
            self._on_retained_lost(self._hash_by_block[block])

    def _free_list(self, block: BlockNumber) -> OrderedDict[BlockNumber, None]:
        """Where ``block`` is while it is free."""
        if block in self._retained:
            return self._free_retained
        return self._free_cached if block in self._hash_by_block else self._free_plain
