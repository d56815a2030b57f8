"""What the block layer needs of a pool, so that an engine with a pool of its own can be used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvferry.protocol.ids import BlockNumber


class ReferencePool(Protocol):
    """The reference-counting part of a block pool."""

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        ...

    def hold(self, blocks: Sequence[BlockNumber]) -> None:
        """Add one reference to each block, which must have at least one already."""
        ...

    def drop(self, blocks: Sequence[BlockNumber]) -> None:
        """Take one reference from each block."""
        ...


class BlockOwner(Protocol):
    """A table that has taken references of its own."""

    def references_taken(self) -> Mapping[BlockNumber, int]:
        """How many references the table has on each block."""
        ...
