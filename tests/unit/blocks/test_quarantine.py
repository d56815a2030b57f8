from __future__ import annotations

import pytest

from kvferry.blocks.pool import BlockPool
from kvferry.blocks.quarantine import Quarantine
from kvferry.errors import CapacityError, LocalProtocolError
from kvferry.protocol.ids import BlockNumber
from tests.support.block_integrity import assert_whole, check_integrity


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(8)


@pytest.fixture
def quarantine(pool: BlockPool) -> Quarantine:
    return Quarantine(pool, max_share=0.5)


def test_a_block_in_quarantine_is_not_reused(pool: BlockPool, quarantine: Quarantine) -> None:
    blocks = pool.allocate(3)
    quarantine.enter("xfer-1", "prefill-0", blocks)
    pool.drop(blocks)
    assert pool.num_free == 5
    with pytest.raises(CapacityError):
        pool.allocate(6)
    check_integrity(pool, quarantine)
    quarantine.leave("xfer-1")
    assert_whole(pool, quarantine)


def test_leaving_is_safe_to_repeat(pool: BlockPool, quarantine: Quarantine) -> None:
    blocks = pool.allocate(1)
    quarantine.enter("xfer-1", "prefill-0", blocks)
    quarantine.leave("xfer-1")
    quarantine.leave("xfer-1")
    quarantine.leave("xfer-never")
    assert pool.num_references(blocks[0]) == 1


def test_entering_is_never_refused_but_fullness_shows(
    pool: BlockPool, quarantine: Quarantine
) -> None:
    blocks = pool.allocate(6)
    quarantine.enter("xfer-1", "peer", blocks[:3])
    assert not quarantine.is_closed_to("peer")
    quarantine.enter("xfer-2", "peer", blocks[3:])
    assert quarantine.num_blocks == 6
    assert quarantine.is_closed_to("peer")
    assert not quarantine.is_closed_to("another")
    quarantine.leave("xfer-1")
    assert not quarantine.is_closed_to("peer")


def test_a_block_of_two_transfers_counts_once(pool: BlockPool, quarantine: Quarantine) -> None:
    blocks = pool.allocate(2)
    quarantine.enter("xfer-1", "peer", blocks)
    quarantine.enter("xfer-2", "peer", blocks)
    assert quarantine.num_blocks == 2
    quarantine.leave("xfer-1")
    pool.drop(blocks)
    assert quarantine.num_blocks == 2
    assert pool.num_free == 6


def test_a_key_enters_once(pool: BlockPool, quarantine: Quarantine) -> None:
    blocks = pool.allocate(2)
    quarantine.enter("xfer-1", "peer", blocks[:1])
    with pytest.raises(LocalProtocolError, match="already"):
        quarantine.enter("xfer-1", "peer", blocks[1:])
    assert pool.num_references(blocks[1]) == 1


def test_free_blocks_cannot_enter(pool: BlockPool, quarantine: Quarantine) -> None:
    with pytest.raises(LocalProtocolError):
        quarantine.enter("xfer-1", "peer", [BlockNumber(0)])
    assert quarantine.num_blocks == 0
    quarantine.leave("xfer-1")
    assert_whole(pool)


def test_each_transfer_has_references_of_its_own(pool: BlockPool, quarantine: Quarantine) -> None:
    blocks = pool.allocate(4)
    quarantine.enter("xfer-1", "quiet", blocks[:2])
    quarantine.enter("xfer-2", "quiet", blocks[1:3])
    quarantine.enter("xfer-3", "stopped", blocks[2:])
    pool.drop(blocks)
    for key in ("xfer-1", "xfer-2"):
        quarantine.leave(key)
    assert quarantine.num_blocks == 2
    assert pool.num_free == 6
    assert quarantine.references_taken() == {2: 1, 3: 1}
