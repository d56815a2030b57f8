from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest

from kvferry.blocks.pool import BlockPool, PoolState
from kvferry.errors import LocalProtocolError
from kvferry.protocol.ids import BlockHash, BlockNumber
from tests.support.block_integrity import assert_whole, check_integrity

HASH_A, HASH_B = BlockHash(b"a" * 32), BlockHash(b"b" * 32)
ZERO, ONE, TWO, THREE = (BlockNumber(number) for number in range(4))

SOUND = PoolState(
    references=(0, 0, 1, 2),
    free_plain=(ZERO,),
    free_cached=(ONE,),
    free_retained=(),
    retained=frozenset({TWO}),
    hash_by_block={ONE: HASH_A, TWO: HASH_B},
    block_by_hash={HASH_A: ONE, HASH_B: TWO},
)
FREE_RETAINED = replace(SOUND, free_cached=(), free_retained=(ONE,), retained=frozenset({ONE}))


@dataclass(frozen=True)
class Dump:
    state: PoolState

    def dump(self) -> PoolState:
        return self.state


@dataclass(frozen=True)
class Owner:
    taken: Mapping[BlockNumber, int]

    def references_taken(self) -> Mapping[BlockNumber, int]:
        return self.taken


def test_a_sound_state_passes() -> None:
    check_integrity(Dump(SOUND), Owner({TWO: 1}), Owner({THREE: 2}))
    check_integrity(Dump(FREE_RETAINED))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (replace(SOUND, references=(0, 0, 1, -1)), "block 3 has -1 references"),
        (replace(SOUND, references=(0, 0, 1, 0)), "block 3 is lost"),
        (replace(SOUND, references=(1, 0, 1, 2)), "block 0 is free and has 1 references"),
        (replace(SOUND, free_plain=(ZERO, ZERO)), "block 0 is free 2 times"),
        (replace(SOUND, free_plain=(ZERO, ONE)), "block 1 is free 2 times"),
        (replace(SOUND, free_plain=(ZERO, BlockNumber(9))), "block 9 is free but not in the pool"),
        (replace(SOUND, free_plain=(ZERO, ONE), free_cached=()), "block 1 has a hash but is free"),
        (replace(SOUND, free_plain=(), free_cached=(ONE, ZERO)), "block 0 has no hash but is free"),
        (replace(SOUND, block_by_hash={HASH_A: ONE}), "block 2 carries 6262"),
        (replace(SOUND, hash_by_block={ONE: HASH_A}), "finds block 2, which does not carry it"),
        (
            replace(SOUND, block_by_hash={HASH_A: TWO, HASH_B: TWO}),
            "finds block 2, which does not carry it",
        ),
        (replace(FREE_RETAINED, retained=frozenset()), "block 1 is free as if it were retained"),
        (replace(SOUND, retained=frozenset({ONE})), "block 1 is retained but is free as if it"),
        (replace(SOUND, retained=frozenset({ZERO})), "block 0 is retained but has no hash"),
        (replace(SOUND, retained=frozenset({THREE})), "block 3 is retained but has no hash"),
        (replace(FREE_RETAINED, free_cached=(ONE,)), "block 1 is free 2 times"),
        (replace(FREE_RETAINED, free_retained=()), "block 1 is lost"),
    ],
)
def test_each_contradiction_is_named(broken: PoolState, message: str) -> None:
    with pytest.raises(LocalProtocolError, match=message):
        check_integrity(Dump(broken))


def test_leases_and_quarantine_need_the_references_they_took() -> None:
    with pytest.raises(LocalProtocolError, match=r"block 3 has 2 references, .* took 3"):
        check_integrity(Dump(SOUND), Owner({THREE: 2}), Owner({THREE: 1}))
    with pytest.raises(LocalProtocolError, match="block 7 has 0 references"):
        check_integrity(Dump(SOUND), Owner({BlockNumber(7): 1}))


def test_many_contradictions_are_counted_not_listed() -> None:
    lost = PoolState((0,) * 20, (), (), (), frozenset(), {}, {})
    with pytest.raises(LocalProtocolError, match=r"\(and 12 more\)"):
        check_integrity(Dump(lost))


def test_whole_means_that_every_block_is_free() -> None:
    pool = BlockPool(3)
    assert_whole(pool)
    blocks = pool.allocate(2)
    pool.hold(blocks[:1])
    with pytest.raises(LocalProtocolError, match="still referenced: block 0: 2; block 1: 1"):
        assert_whole(pool)
