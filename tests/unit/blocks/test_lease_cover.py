from __future__ import annotations

import pytest

from kvferry.blocks.lease import Cover
from kvferry.errors import LocalProtocolError
from kvferry.protocol.ids import BlockNumber

ONE, TWO = BlockNumber(1), BlockNumber(2)


def test_distinct_blocks_are_counted_once() -> None:
    cover = Cover()
    cover.add([ONE, TWO])
    cover.add([TWO])
    assert len(cover) == 2
    assert cover.counts() == {ONE: 1, TWO: 2}


def test_a_block_is_covered_until_its_last_removal() -> None:
    cover = Cover()
    cover.add([ONE, ONE])
    cover.remove([ONE])
    assert ONE in cover
    cover.remove([ONE])
    assert ONE not in cover
    assert cover.counts() == {}


def test_removing_what_is_not_there_is_a_bug() -> None:
    with pytest.raises(LocalProtocolError):
        Cover().remove([ONE])
