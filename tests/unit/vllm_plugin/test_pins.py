"""Counting on blocks that the scheduler half has pinned."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import LocalProtocolError
from kvferry.protocol.hashing import PartialContent
from kvferry.protocol.ids import BlockHash
from kvferry.vllm_plugin.orders import PoolFigures
from kvferry.vllm_plugin.pins import PinnedBlocks
from tests.unit.vllm_plugin.fake_engine import blocks


def _hashes(*names: str) -> list[BlockHash]:
    return [BlockHash(name.encode() * 32) for name in names]


def test_a_pin_goes_back_with_the_last_reference() -> None:
    pins = PinnedBlocks(8)
    pins.pin(blocks(1, 2))
    pins.hold(blocks(1))
    pins.drop(blocks(1, 2))
    assert pins.take_returned() == [2]
    pins.drop(blocks(1))
    assert pins.take_returned() == [1]
    assert pins._pins.total() == 0


def test_every_pin_of_a_block_goes_back() -> None:
    pins = PinnedBlocks(8)
    pins.pin(blocks(1))
    pins.pin(blocks(1))
    pins.drop(blocks(1))
    assert pins.take_returned() == []
    pins.drop(blocks(1))
    assert pins.take_returned() == [1, 1]


def test_a_block_without_a_pin_is_not_held() -> None:
    pins = PinnedBlocks(8)
    with pytest.raises(LocalProtocolError, match="not pinned"):
        pins.hold(blocks(1))
    with pytest.raises(LocalProtocolError, match="no reference"):
        pins.drop(blocks(1))


def test_a_hold_that_is_refused_holds_nothing() -> None:
    pins = PinnedBlocks(8)
    pins.pin(blocks(1))
    with pytest.raises(LocalProtocolError):
        pins.hold(blocks(1, 2))
    pins.drop(blocks(1))
    assert pins.take_returned() == [1]


def test_only_the_leading_run_of_what_is_retained_is_found() -> None:
    pins = PinnedBlocks(8)
    a, b, c = _hashes("a", "b", "c")
    pins.retain([a, b], blocks(4, 5))
    assert pins.acquire_cached([a, b, c]) == list(blocks(4, 5))
    assert pins.acquire_cached([c, a]) == []


def test_a_reader_keeps_blocks_that_are_let_go_of() -> None:
    pins = PinnedBlocks(8)
    (a,) = _hashes("a")
    pins.retain([a], blocks(4))
    found = pins.acquire_cached([a])
    pins.let_go([a])
    assert pins.acquire_cached([a]) == []
    assert pins.take_returned() == []
    pins.drop(found)
    assert pins.take_returned() == [4]


def test_what_is_not_retained_is_let_go_of_without_harm() -> None:
    pins = PinnedBlocks(8)
    pins.let_go(_hashes("a"))
    assert pins.take_returned() == []


@given(st.lists(st.tuples(st.sampled_from(["pin", "hold", "drop"]), st.integers(0, 3))))
def test_as_many_pins_go_back_as_were_taken(moves: list[tuple[str, int]]) -> None:
    pins = PinnedBlocks(4)
    taken, returned, references = [0] * 4, [0] * 4, [0] * 4
    for move, number in moves:
        if move == "pin":
            pins.pin(blocks(number))
            taken[number] += 1
            references[number] += 1
        elif references[number] and move == "hold":
            pins.hold(blocks(number))
            references[number] += 1
        elif references[number] and move == "drop":
            pins.drop(blocks(number))
            references[number] -= 1
        for block in pins.take_returned():
            returned[block] += 1
        for index in range(4):
            assert returned[index] <= taken[index]
            assert (returned[index] == taken[index]) == (references[index] == 0)


def test_what_is_forgotten_stays_pinned_while_a_peer_reads_it() -> None:
    pins = PinnedBlocks(8)
    first, second = _hashes("a", "b")
    pins.retain([first, second], blocks(1, 2))
    pins.acquire_cached([first])
    pins.forget()
    assert pins.num_retained == 0
    assert pins.take_returned() == list(blocks(2))
    pins.drop(blocks(1))
    assert pins.take_returned() == list(blocks(1))


def test_a_partial_block_is_found_by_the_block_before_it_until_it_is_let_go() -> None:
    pins = PinnedBlocks(8)
    a, rest = _hashes("a", "rest")
    content = PartialContent(a, 3, rest)
    pins.retain([a, rest], blocks(4, 5), content)
    assert pins.acquire_partials(a, 8) == [(content, 5)]
    pins.let_go([rest])
    assert pins.acquire_partials(a, 8) == []
    assert pins.take_returned() == []
    pins.drop(blocks(5))
    assert pins.take_returned() == [5]


def test_a_partial_block_may_be_retained_after_a_block_that_is_already() -> None:
    pins = PinnedBlocks(8)
    a, rest = _hashes("a", "rest")
    content = PartialContent(a, 3, rest)
    pins.retain([a], blocks(4))
    pins.retain([rest], blocks(5), content)
    assert pins.acquire_partials(a, 8) == [(content, 5)]
    pins.drop(blocks(5))
    pins.let_go([rest])
    assert pins.take_returned() == [5]
    assert pins.acquire_cached([a, rest]) == list(blocks(4))


def test_partial_blocks_are_forgotten_with_all_others() -> None:
    pins = PinnedBlocks(8)
    a, rest = _hashes("a", "rest")
    pins.retain([a, rest], blocks(4, 5), PartialContent(a, 3, rest))
    pins.forget()
    assert pins.acquire_partials(a, 8) == []
    assert sorted(pins.take_returned()) == [4, 5]
    assert pins._pins.total() == 0


def test_free_blocks_are_those_told_and_those_let_go_since() -> None:
    """An idle engine makes no step in which its pool could take them back, and tell."""
    pins = PinnedBlocks(8)
    assert pins.num_free == 8
    pins.pin(blocks(1, 2, 3))
    pins.pin(blocks(3))
    pins.note_pool(PoolFigures(1, num_free_blocks=5))
    pins.drop(blocks(1, 3))
    assert pins.num_free == 6
    pins.drop(blocks(3))
    assert pins.num_free == 7, "two pins, one block"
    pins.take_returned()
    assert pins.num_free == 7, "they are on their way"
    pins.note_pool(PoolFigures(3, num_free_blocks=6, num_given_back=1))
    assert pins.num_free == 7
    pins.note_pool(PoolFigures(2, num_free_blocks=0, num_given_back=0))
    assert pins.num_free == 7, "told earlier, and late"
    pins.note_pool(PoolFigures(4, num_free_blocks=7, num_given_back=3))
    assert pins.num_free == 7
    pins.drop(blocks(2))
    assert pins.num_free == 8
