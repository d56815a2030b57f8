"""What is retained, and what goes first."""

from __future__ import annotations

from kvferry.protocol.ids import BlockHash
from kvferry.vllm_plugin.conversations import RetainedConversations
from tests.support.fake_clock import FakeClock


def _chain(names: str) -> list[BlockHash]:
    return [BlockHash(names[: n + 1].encode().ljust(32)) for n in range(len(names))]


def _table(max_blocks: int = 10, duration_s: float = 100.0) -> RetainedConversations:
    return RetainedConversations(max_blocks, duration_s, FakeClock())


def test_a_later_turn_takes_the_place_of_the_earlier() -> None:
    table = _table()
    assert table.add(_chain("ab"), None) == (2, ())
    kept, leaving = table.add(_chain("abcd"), None)
    assert (kept, sorted(leaving)) == (4, sorted(_chain("ab")))
    assert (table.num_conversations, table.num_blocks) == (1, 4)


def test_a_fork_does_not() -> None:
    table = _table()
    table.add(_chain("abc"), None)
    assert table.add(_chain("abd"), None) == (3, ())
    assert (table.num_conversations, table.num_blocks) == (2, 4)


def test_the_tail_of_the_oldest_goes_for_the_cap() -> None:
    table = _table(max_blocks=4)
    table.add(_chain("abc"), None)
    kept, leaving = table.add(_chain("xyz"), None)
    assert (kept, leaving) == (3, (_chain("abc")[2], _chain("abc")[1]))
    assert table.num_blocks == 4


def test_of_a_conversation_beyond_the_cap_the_head_stays() -> None:
    table = _table(max_blocks=2)
    assert table.add(_chain("abc"), None) == (2, ())


def test_a_shared_head_stays_until_the_last_conversation_goes() -> None:
    table = _table()
    table.add(_chain("abc"), None)
    table.add(_chain("abd"), None)
    leaving = table.give_way(1)
    assert leaving == (_chain("abc")[2],)
    assert len(table.give_way(3)) == 5
    assert table.num_blocks == 0


def test_time_ends_a_conversation_and_a_client_may_shorten_it() -> None:
    clock = FakeClock()
    table = RetainedConversations(10, 100.0, clock)
    table.add(_chain("ab"), None)
    table.add(_chain("x"), 5.0)
    clock.advance(5.0)
    assert table.expire() == (_chain("x")[0],)
    clock.advance(95.0)
    assert len(table.expire()) == 2
    assert table.expire() == ()


def test_a_duration_of_nothing_ends_the_conversation() -> None:
    table = _table()
    table.add(_chain("ab"), None)
    kept, leaving = table.add(_chain("abc"), 0)
    assert (kept, sorted(leaving)) == (0, sorted(_chain("ab")))
    assert table.num_conversations == 0


def test_clearing_leaves_nothing() -> None:
    table = _table()
    table.add(_chain("abc"), None)
    table.add(_chain("abd"), None)
    assert len(table.clear()) == 6
    assert (table.num_conversations, table.num_blocks) == (0, 0)


def test_a_partial_block_is_retained_after_the_full_ones_and_goes_first() -> None:
    table = _table(max_blocks=5)
    (partial,) = _chain("?")
    assert table.add(_chain("abc"), None, partial) == (4, ())
    assert table.give_way(1) == (partial,)
    assert table.give_way(1) == (_chain("abc")[2],)


def test_the_next_turn_lets_go_of_the_partial_block() -> None:
    table = _table()
    first, second = BlockHash(b"1" * 32), BlockHash(b"2" * 32)
    table.add(_chain("ab"), None, first)
    kept, leaving = table.add(_chain("abc"), None, second)
    assert (kept, set(leaving)) == (4, {*_chain("ab"), first})
    assert (table.num_conversations, table.num_blocks) == (1, 4)


def test_beyond_the_cap_the_partial_block_is_left_out() -> None:
    table = _table(max_blocks=2)
    assert table.add(_chain("ab"), None, BlockHash(b"1" * 32)) == (2, ())
