"""``RenewingBlocks``: a pool whose retained conversations are renewed when a peer reads them."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.blocks.partials import PartialContent
from kvferry.blocks.pool import BlockPool
from kvferry.blocks.retention import RetentionTable
from kvferry.protocol.ids import BlockHash, BlockNumber


class RenewingBlocks:
    """What an exchange needs of a pool. Thread-safe, as both are."""

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
