"""``check_integrity``: every block is free or accounted for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Protocol

from kvferry.blocks.pool import PoolState
from kvferry.errors import LocalProtocolError
from kvferry.protocol.ids import BlockNumber

_NUM_SHOWN = 8


class BlockOwner(Protocol):
    """A table that has taken references of its own."""

    def references_taken(self) -> Mapping[BlockNumber, int]:
        """How many references the table has on each block."""
        ...


class DumpablePool(Protocol):
    """A pool that can show all it knows."""

    def dump(self) -> PoolState:
        """Return a copy of everything."""
        ...


def check_integrity(pool: DumpablePool, *owners: BlockOwner) -> None:
    """Raise ``LocalProtocolError`` naming everything in ``pool`` that contradicts itself.

    ``owners`` are the tables (leases, quarantine) that took references of their own: each block
    must have at least as many as all of them together say.
    """
    state = pool.dump()
    problems = [
        *_free_problems(state),
        *_hash_problems(state),
        *_retained_problems(state),
        *_owner_problems(state, owners),
    ]
    _raise_if_any("the block pool contradicts itself", problems)


def assert_whole(pool: DumpablePool, *owners: BlockOwner) -> None:
    """Raise ``LocalProtocolError`` unless ``pool`` is sound and all its blocks are free."""
    check_integrity(pool, *owners)
    references = pool.dump().references
    _raise_if_any(
        "blocks are still referenced",
        [f"block {block}: {count}" for block, count in enumerate(references) if count],
    )


def _raise_if_any(what: str, problems: list[str]) -> None:
    if problems:
        more = f" (and {len(problems) - _NUM_SHOWN} more)" if len(problems) > _NUM_SHOWN else ""
        raise LocalProtocolError(f"{what}: {'; '.join(islice(problems, _NUM_SHOWN))}{more}")


def _free_problems(state: PoolState) -> Iterator[str]:
    times_free: Counter[BlockNumber] = Counter(state.free_plain)
    times_free.update(state.free_cached)
    times_free.update(state.free_retained)
    for number, count in enumerate(state.references):
        block = BlockNumber(number)
        if count < 0:
            yield f"block {block} has {count} references"
        if times_free[block] > 1:
            yield f"block {block} is free {times_free[block]} times"
        if count == 0 and not times_free[block]:
            yield f"block {block} is lost: neither free nor referenced"
        if count > 0 and times_free[block]:
            yield f"block {block} is free and has {count} references"
    for block in times_free:
        if not 0 <= block < len(state.references):
            yield f"block {block} is free but not in the pool"


def _hash_problems(state: PoolState) -> Iterator[str]:
    for block_hash, block in state.block_by_hash.items():
        if state.hash_by_block.get(block) != block_hash:
            yield f"hash {block_hash.hex()} finds block {block}, which does not carry it"
    for block, block_hash in state.hash_by_block.items():
        if state.block_by_hash.get(block_hash) != block:
            yield f"block {block} carries {block_hash.hex()}, which does not find it"
    for block in state.free_plain:
        if block in state.hash_by_block:
            yield f"block {block} has a hash but is free as if it had none"
    for block in state.free_cached:
        if block not in state.hash_by_block:
            yield f"block {block} has no hash but is free as if it had one"


def _retained_problems(state: PoolState) -> Iterator[str]:
    for block in state.retained:
        if block not in state.hash_by_block:
            yield f"block {block} is retained but has no hash"
    for block in state.free_retained:
        if block not in state.retained:
            yield f"block {block} is free as if it were retained"
    for block in (*state.free_plain, *state.free_cached):
        if block in state.retained:
            yield f"block {block} is retained but is free as if it were not"


def _owner_problems(state: PoolState, owners: tuple[BlockOwner, ...]) -> Iterator[str]:
    taken: Counter[BlockNumber] = Counter()
    for owner in owners:
        taken.update(owner.references_taken())
    for block, count in taken.items():
        present = state.references[block] if 0 <= block < len(state.references) else 0
        if present < count:
            yield f"block {block} has {present} references, leases and quarantine took {count}"
