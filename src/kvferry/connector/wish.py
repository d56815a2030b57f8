"""``HistoryWish``: what a reader lacks of its prompt, and what of an answer is its own. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.errors import LocalProtocolError
from kvferry.protocol.hashing import next_block_hash
from kvferry.protocol.ids import BlockHash, BlockNumber
from kvferry.protocol.messages import PartialBlock


@dataclass(frozen=True, slots=True)
class HistoryWish:
    """The part of a prompt that is asked for, from the start of a block on."""

    hashes: tuple[BlockHash, ...]
    """Of its full blocks; at least one."""
    blocks: tuple[BlockNumber, ...]
    """One to fill for each hash, and one more if tokens go on after the last full block."""
    tokens: Sequence[int]
    """What the blocks may hold: from the first block's start to the last token of use."""
    block_size_tokens: int
    min_blocks: int
    """Fewer full ones found are not worth a move."""

    def __post_init__(self) -> None:
        num_hashes, num_blocks = len(self.hashes), len(self.blocks)
        if num_hashes < 1 or num_blocks - num_hashes not in (0, 1):
            raise LocalProtocolError(f"{num_hashes} hashes for {num_blocks} blocks")

    def fitting(self, num_found: int, partials: Sequence[PartialBlock]) -> PartialBlock | None:
        """Return the longest of ``partials`` that holds this prompt's own tokens, if any does.

        They are said to follow the first ``num_found`` blocks, at least one. Nothing is believed:
        the hash is compared with one over the tokens here.
        """
        start = num_found * self.block_size_tokens
        # One of a whole block's length would be a full block, which has been asked for by its hash.
        max_tokens = min(len(self.tokens) - start, self.block_size_tokens - 1)
        if not 1 <= num_found < len(self.blocks):
            return None
        parent = self.hashes[num_found - 1]
        for partial in sorted(partials, key=lambda p: p.num_tokens, reverse=True):
            if partial.num_tokens > max_tokens:
                continue
            own = next_block_hash(parent, self.tokens[start : start + partial.num_tokens])
            if own == partial.block_hash:
                return partial
        return None
