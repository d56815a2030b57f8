"""``ChainTree``: which of several chains of block hashes cover which hash.

A block hash determines everything before it, so chains that share a hash share their heads, and all
of them together are a tree. A chain is then its last hash alone: to add or remove one costs no more
than its blocks that no other chain covers. Knows no pool, no conversation and no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.errors import LocalProtocolError
from kvferry.protocol.ids import BlockHash


@dataclass(eq=False, slots=True)
class _Node:
    block_hash: BlockHash
    parent: _Node | None
    children: set[_Node] = field(default_factory=set)
    chains: set[int] = field(default_factory=set)
    """The chains that end here."""
    is_lost: bool = False

    @property
    def is_bare(self) -> bool:
        return not self.children and not self.chains


class ChainTree:
    """Chains by a number that the caller gives them; ``in`` asks for a number.

    A chain that no longer covers a hash alone is no chain any more: when the last hash of its own
    is given up or lost it leaves the tree, and what it shared stays with the others.
    """

    def __init__(self) -> None:
        self._nodes: dict[BlockHash, _Node] = {}
        self._tail_by_chain: dict[int, _Node] = {}

    def __contains__(self, chain: int) -> bool:
        return chain in self._tail_by_chain

    @property
    def num_hashes(self) -> int:
        """Distinct hashes that at least one chain covers."""
        return len(self._nodes)

    def add(self, chain: int, hashes: Sequence[BlockHash]) -> None:
        """Let ``chain`` cover ``hashes``, from the first block of a sequence on; at least one.

        Raises ``LocalProtocolError``, and changes nothing, if ``chain`` is there already or a hash
        has another parent here than in the tree.
        """
        if chain in self._tail_by_chain or not hashes:
            raise LocalProtocolError(f"chain {chain} is there already or covers nothing")
        self._require_same_parents(hashes)
        tail: _Node | None = None
        for block_hash in hashes:
            node = self._nodes.get(block_hash)
            if node is None:
                node = self._nodes[block_hash] = _Node(block_hash, tail)
                if tail is not None:
                    tail.children.add(node)
            node.is_lost = False
            tail = node
        if tail is not None:
            self._end_at(chain, tail)

    def remove(self, chain: int) -> list[BlockHash]:
        """Take ``chain`` out; return what no chain covers any more, in sequence order."""
        return self.shorten(chain, len(self._nodes))

    def shorten(self, chain: int, count: int) -> list[BlockHash]:
        """Cut up to ``count`` hashes that only ``chain`` covers from its tail; return them.

        They are in sequence order. Hashes that were lost go along without being counted.
        """
        node: _Node | None = self._tail_by_chain.pop(chain)
        if node is not None:
            node.chains.remove(chain)
        cut: list[BlockHash] = []
        while node is not None and node.is_bare and (node.is_lost or len(cut) < count):
            if not node.is_lost:
                cut.append(node.block_hash)
            node = self._cut_off(node)
        if node is not None and node.is_bare:
            self._end_at(chain, node)
        cut.reverse()
        return cut

    def lose(self, block_hash: BlockHash) -> list[int]:
        """The block of ``block_hash`` is gone; return the chains that left the tree thereby.

        A hash before others stays, marked, until those are gone.
        """
        node = self._nodes.get(block_hash)
        if node is None:
            return []
        node.is_lost = True
        ended = sorted(node.chains)
        # What is left is the same for all that end here: the newest keeps it, if nothing goes on.
        for chain in ended:
            self.shorten(chain, 0)
        return [chain for chain in ended if chain not in self]

    def used_by(self, hashes: Sequence[BlockHash]) -> set[int]:
        """Return the chains that a use of ``hashes``, a sequence from its first block on, is for.

        These are the chains that end within it, and the one that goes on after its last hash. If
        several go on, the sequence is a head that they share and tells nothing of any.
        """
        used: set[int] = set()
        node: _Node | None = None
        for block_hash in hashes:
            node = self._nodes.get(block_hash)
            if node is None:
                return used
            used |= node.chains
        while node is not None and len(node.children) + len(node.chains) == 1:
            used |= node.chains
            node = next(iter(node.children), None)
        return used

    def _require_same_parents(self, hashes: Sequence[BlockHash]) -> None:
        parent: BlockHash | None = None
        for block_hash in hashes:
            node = self._nodes.get(block_hash)
            if node is not None:
                known = None if node.parent is None else node.parent.block_hash
                if known != parent:
                    raise LocalProtocolError(f"hash {block_hash.hex()} has another parent here")
            parent = block_hash

    def _end_at(self, chain: int, node: _Node) -> None:
        node.chains.add(chain)
        self._tail_by_chain[chain] = node

    def _cut_off(self, node: _Node) -> _Node | None:
        """Remove ``node``, which is bare; return its parent."""
        del self._nodes[node.block_hash]
        if node.parent is not None:
            node.parent.children.remove(node)
        return node.parent
