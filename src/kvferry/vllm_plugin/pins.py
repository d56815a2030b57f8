"""``PinnedBlocks``: the exchange's reference counts on blocks of vLLM's pool.

vLLM's pool may be touched on its scheduler's thread only, and an idle engine runs none. So the
scheduler half takes references in the pool ("pins") before it names blocks to the exchange; from
then on they are counted here, on any thread. What nobody here counts any more is put aside, and the
scheduler half gives its pins back in its next step.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence

from kvferry.blocks.pool import PartialBlocks
from kvferry.errors import LocalProtocolError
from kvferry.protocol.hashing import PartialContent
from kvferry.protocol.ids import BlockHash, BlockNumber
from kvferry.vllm_plugin.orders import PoolFigures


class PinnedBlocks:
    """A ``BlockPort`` over pins, and the blocks that are found by content. Thread-safe."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._pool = PoolFigures(num_free_blocks=num_blocks)
        self._num_returned = 0
        """Pins that went back, since the start."""
        self._on_their_way: deque[int] = deque()
        """One entry for each block that was let go and that vLLM's pool did not have back when it
        last told: how many pins had gone back by then, since the start."""
        self._lock = threading.Lock()
        self._references: Counter[BlockNumber] = Counter()
        self._pins: Counter[BlockNumber] = Counter()
        self._returned: list[BlockNumber] = []
        self._found: dict[BlockHash, BlockNumber] = {}
        self._partials = PartialBlocks()

    @property
    def num_free(self) -> int:
        """Blocks of vLLM's pool that nobody has: as it last told, and those let go since, which an
        idle engine has not taken back yet. An instance says it of itself."""
        with self._lock:
            return min(self.num_blocks, self._pool.num_free_blocks + len(self._on_their_way))

    def note_pool(self, pool: PoolFigures) -> None:
        """vLLM's pool tells of itself; by two ways, so earlier figures may come later."""
        with self._lock:
            if pool.number < self._pool.number:
                return
            self._pool = pool
            while self._on_their_way and self._on_their_way[0] <= pool.num_given_back:
                self._on_their_way.popleft()

    @property
    def num_retained(self) -> int:
        """Distinct blocks that are found by content."""
        with self._lock:
            return len(self._found)

    def pin(self, blocks: Sequence[BlockNumber]) -> None:
        """The scheduler half has taken one reference on each block; count one here for each."""
        with self._lock:
            self._pins.update(blocks)
            self._references.update(blocks)

    def hold(self, blocks: Sequence[BlockNumber]) -> None:
        """See ``BlockPort.hold``. Raises ``LocalProtocolError`` for a block without a pin."""
        with self._lock:
            self._hold(blocks)

    def drop(self, blocks: Sequence[BlockNumber]) -> None:
        """See ``BlockPort.drop``. Raises ``LocalProtocolError`` for a block without a reference."""
        with self._lock:
            self._drop(blocks)

    def acquire_cached(self, hashes: Sequence[BlockHash]) -> list[BlockNumber]:
        """See ``BlockPort.acquire_cached``: only retained blocks are found."""
        with self._lock:
            blocks = []
            for block_hash in hashes:
                block = self._found.get(block_hash)
                if block is None:
                    break
                blocks.append(block)
            self._hold(blocks)
            return blocks

    def acquire_partials(
        self, parent: BlockHash, max_count: int
    ) -> list[tuple[PartialContent, BlockNumber]]:
        """See ``BlockPort.acquire_partials``."""
        with self._lock:
            contents = self._partials.after(parent, max_count)
            blocks = [self._found[content.block_hash] for content in contents]
            self._hold(blocks)
            return list(zip(contents, blocks, strict=True))

    def retain(
        self,
        hashes: Sequence[BlockHash],
        blocks: Sequence[BlockNumber],
        partial: PartialContent | None = None,
    ) -> None:
        """Let ``blocks``, each pinned once for this, be found by ``hashes``, none of which is yet;
        the last one is the block of ``partial``, if there is one."""
        with self._lock:
            self._pins.update(blocks)
            self._references.update(blocks)
            self._found.update(zip(hashes, blocks, strict=True))
            if partial is not None:
                self._partials.add(partial)

    def let_go(self, hashes: Sequence[BlockHash]) -> None:
        """Undo ``retain`` of ``hashes``; unknown ones are ignored."""
        with self._lock:
            found = [h for h in hashes if h in self._found]
            for block_hash in found:
                self._partials.discard(block_hash)
            self._drop([self._found.pop(block_hash) for block_hash in found])

    def forget(self) -> None:
        """Undo every ``retain``: nothing is found any more."""
        with self._lock:
            self._partials.clear()
            found, self._found = self._found, {}
            self._drop(list(found.values()))

    def take_returned(self) -> list[BlockNumber]:
        """Return the blocks whose pins go back, one entry a pin, in the order they were let go."""
        with self._lock:
            returned, self._returned = self._returned, []
            return returned

    def _hold(self, blocks: Sequence[BlockNumber]) -> None:
        unknown = [block for block in blocks if not self._references[block]]
        if unknown:
            raise LocalProtocolError(f"blocks {unknown[:4]} are not pinned")
        self._references.update(blocks)

    def _drop(self, blocks: Sequence[BlockNumber]) -> None:
        for block in blocks:
            if not self._references[block]:
                raise LocalProtocolError(f"block {block} has no reference to drop")
            self._references[block] -= 1
            if self._references[block] == 0:
                del self._references[block]
                num_pins = self._pins.pop(block)
                self._returned += [block] * num_pins
                self._num_returned += num_pins
                self._on_their_way.append(self._num_returned)
