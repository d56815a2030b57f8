"""What a block holds, whatever finds it: the truth that the walk compares with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.blocks.pool import BlockPool
from kvferry.protocol import hashing
from kvferry.protocol.ids import BlockHash, BlockNumber
from tests.model.ownership.driven import BLOCK_TOKENS, LAYOUT

_FINGERPRINT = LAYOUT.fingerprint()


class OwnershipError(AssertionError):
    """Somebody reads or writes what is not theirs, or takes for theirs what is not."""


@dataclass(frozen=True, slots=True)
class Kv:
    """KV of a sequence's block, up to the last of ``tokens``, which are all from its beginning."""

    salt: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Garbage:
    """Nothing of use: the block was given to ``maker``, who has not filled it yet."""

    maker: str


Content = Kv | Garbage


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens of one tenant."""

    salt: str
    tokens: tuple[int, ...]

    @property
    def num_blocks(self) -> int:
        """Blocks of all tokens, the last one filled in part or not."""
        return -(-len(self.tokens) // BLOCK_TOKENS)

    @property
    def root(self) -> BlockHash:
        """What its chain of hashes begins with."""
        return hashing.chain_root(_FINGERPRINT, salt=self.salt)

    @property
    def hashes(self) -> list[BlockHash]:
        """Of its full blocks."""
        return hashing.block_hashes(self.root, self.tokens, BLOCK_TOKENS)

    @property
    def digest(self) -> bytes:
        """Of all of it."""
        return hashing.prompt_digest(self.root, self.tokens)

    def cut(self, num_tokens: int) -> Text:
        """Return its first tokens."""
        return Text(self.salt, self.tokens[:num_tokens])

    def at(self, position: int) -> Kv:
        """Return what the block at ``position`` holds once all of its tokens are computed."""
        return Kv(self.salt, self.tokens[: (position + 1) * BLOCK_TOKENS])


def is_of_use(content: Content, wanted: Kv) -> bool:
    """Whether a block with ``content`` serves who wants ``wanted``: it may hold more after it."""
    if not isinstance(content, Kv) or content.salt != wanted.salt:
        return False
    count = len(wanted.tokens)
    same_block = (len(content.tokens) - 1) // BLOCK_TOKENS == (count - 1) // BLOCK_TOKENS
    return same_block and content.tokens[:count] == wanted.tokens


@dataclass
class Memory:
    """What each block of one instance holds, and how often it was given away."""

    name: str
    pool: BlockPool
    contents: list[Content] = field(init=False)
    times_given: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.contents = [Garbage("nobody")] * self.pool.num_blocks
        self.times_given = [0] * self.pool.num_blocks

    def is_held(self, block: BlockNumber) -> bool:
        """Whether anybody has a reference on ``block``."""
        return self.pool.num_references(block) > 0

    def give(self, blocks: Sequence[BlockNumber], maker: str) -> None:
        """``blocks`` were allocated: their new owner overwrites them from now on."""
        for block in blocks:
            self.times_given[block] += 1
            self.contents[block] = Garbage(maker)

    def require(self, block: BlockNumber, wanted: Kv, why: str) -> None:
        """Raise ``OwnershipError`` unless ``block`` holds ``wanted``."""
        content = self.contents[block]
        if not is_of_use(content, wanted):
            raise OwnershipError(
                f"{why}: block {block} of {self.name} holds {content} instead of {wanted}"
            )
