"""``PartialBlocks``: which blocks that are filled in part follow which full block.

A conversation ends where it ends, mostly within a block. What that block has is found by the hash
of the full block before it: how many tokens, and a hash by which whoever asks sees whether they are
its own. Owns no block and counts no reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from kvferry.errors import LocalProtocolError
from kvferry.protocol.hashing import next_block_hash
from kvferry.protocol.ids import BlockHash


@dataclass(frozen=True, slots=True)
class PartialContent:
    """What the last block of a sequence holds: its first tokens, and nothing that is of use after.

    ``block_hash`` is ``next_block_hash(parent, tokens)``, which differs from any full block's.
    """

    parent: BlockHash
    """Of the full block before it."""
    num_tokens: int
    block_hash: BlockHash


def partial_content(parent: BlockHash, tokens: Sequence[int]) -> PartialContent:
    """Return the name of ``tokens``, fewer than a block holds, after the block ``parent``."""
    return PartialContent(parent, len(tokens), next_block_hash(parent, tokens))


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
