"""``Cover``: how many times a table has taken each block."""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.errors import LocalProtocolError
from kvferry.protocol.ids import BlockNumber


class Cover:
    """Counts per block; ``len`` is the number of distinct blocks."""

    def __init__(self) -> None:
        self._counts: dict[BlockNumber, int] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, block: BlockNumber) -> bool:
        return block in self._counts

    def add(self, blocks: Iterable[BlockNumber]) -> None:
        """Count each of ``blocks`` once more."""
        for block in blocks:
            self._counts[block] = self._counts.get(block, 0) + 1

    def remove(self, blocks: Iterable[BlockNumber]) -> None:
        """Count each of ``blocks`` once less. Raises ``LocalProtocolError`` below zero."""
        for block in blocks:
            count = self._counts.get(block, 0)
            if count == 0:
                raise LocalProtocolError(f"block {block} is not covered")
            if count == 1:
                del self._counts[block]
            else:
                self._counts[block] = count - 1

    def counts(self) -> dict[BlockNumber, int]:
        """Return a copy of the counts; none is zero."""
        return dict(self._counts)
