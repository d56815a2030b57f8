"""What prompts still lack, what is retained, and what goes first."""

from __future__ import annotations

from kvferry.protocol.ids import BlockHash
from kvferry.vllm_plugin.retention import BlockDemand, RetainedConversations
from tests.support.fake_clock import FakeClock
from tests.unit.vllm_plugin.fake_engine import BLOCK, FakeRequest


def _request(name: str, num_tokens: int) -> FakeRequest:
    return FakeRequest(name, list(range(num_tokens)))


def test_of_those_that_wait_the_largest_counts() -> None:
    demand = BlockDemand(BLOCK)
    demand.arrive(_request("a", 9))
    demand.arrive(_request("b", 17))
    assert (demand.num_waiting_blocks(), demand.num_running_blocks()) == (5, 0)


def test_of_those_that_run_each_counts_by_what_is_not_computed() -> None:
    demand = BlockDemand(BLOCK)
    a, b = _request("a", 9), _request("b", 17)
    for request in (a, b):
        demand.arrive(request)
        demand.admit(request)
    a.num_computed_tokens, b.num_computed_tokens = 8, 20
    assert (demand.num_waiting_blocks(), demand.num_running_blocks()) == (0, 1)


def test_who_was_preempted_waits_with_what_was_answered() -> None:
    demand = BlockDemand(BLOCK)
    request = _request("a", 9)
    demand.arrive(request)
    demand.admit(request)
    request.answer = [1] * 8
    demand.preempt("a")
    assert (demand.num_waiting_blocks(), demand.num_running_blocks()) == (5, 0)


def test_who_has_ended_needs_nothing() -> None:
    demand = BlockDemand(BLOCK)
    a, b = _request("a", 9), _request("b", 9)
    for request in (a, b):
        demand.arrive(request)
    demand.admit(a)
    demand.end("a")
    demand.end("b")
    demand.preempt("a")
    assert (demand.num_waiting_blocks(), demand.num_running_blocks()) == (0, 0)


def _chain(names: str) -> list[BlockHash]:
    return [BlockHash(names[: n + 1].encode().ljust(32)) for n in range(len(names))]


def _table(max_blocks: int = 10, duration_s: float = 100.0) -> RetainedConversations:
    return RetainedConversations(max_blocks, duration_s, FakeClock())


def test_a_later_turn_takes_the_place_of_the_earlier() -> None:
    table = _table()
    assert table.add(_chain("ab"), None) == (range(2), ())
    assert table.add(_chain("abcd"), None) == (range(2, 4), ())
    assert (len(table._conversations), table.num_blocks) == (1, 4)


def test_a_fork_does_not() -> None:
    table = _table()
    table.add(_chain("abc"), None)
    assert table.add(_chain("abd"), None) == (range(2, 3), ())
    assert (len(table._conversations), table.num_blocks) == (2, 4)


def test_the_tail_of_the_oldest_goes_for_the_cap() -> None:
    table = _table(max_blocks=4)
    table.add(_chain("abc"), None)
    new, leaving = table.add(_chain("xyz"), None)
    assert (new, leaving) == (range(3), tuple(_chain("abc")[1:]))
    assert table.num_blocks == 4


def test_of_a_conversation_beyond_the_cap_the_head_stays() -> None:
    table = _table(max_blocks=2)
    assert table.add(_chain("abc"), None) == (range(2), ())


def test_a_shared_head_stays_until_the_last_conversation_goes() -> None:
    table = _table()
    table.add(_chain("abc"), None)
    table.add(_chain("abd"), None)
    leaving = table.give_way(1)
    assert leaving == (_chain("abc")[2],)
    assert table.give_way(3) == tuple(_chain("abd"))
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
    new, leaving = table.add(_chain("abc"), 0)
    assert (len(new), sorted(leaving)) == (0, sorted(_chain("ab")))
    assert len(table._conversations) == 0


def test_giving_way_with_all_leaves_nothing() -> None:
    table = _table()
    table.add(_chain("abc"), None)
    table.add(_chain("abd"), None)
    assert len(table.give_way(table.num_blocks)) == 4
    assert (len(table._conversations), table.num_blocks) == (0, 0)


def test_a_partial_block_is_retained_after_the_full_ones_and_goes_first() -> None:
    table = _table(max_blocks=5)
    (partial,) = _chain("?")
    assert table.add([*_chain("abc"), partial], None, has_partial=True) == (range(4), ())
    assert table.give_way(1) == (partial,)
    assert table.give_way(1) == (_chain("abc")[2],)


def test_the_next_turn_lets_go_of_the_partial_block() -> None:
    table = _table()
    first, second = BlockHash(b"1" * 32), BlockHash(b"2" * 32)
    table.add([*_chain("ab"), first], None, has_partial=True)
    new, leaving = table.add([*_chain("abc"), second], None, has_partial=True)
    assert (new, leaving) == (range(2, 4), (first,))
    assert (len(table._conversations), table.num_blocks) == (1, 4)


def test_beyond_the_cap_the_partial_block_is_left_out() -> None:
    table = _table(max_blocks=2)
    hashes = [*_chain("ab"), BlockHash(b"1" * 32)]
    assert table.add(hashes, None, has_partial=True) == (range(2), ())


def test_a_turn_that_ends_where_an_earlier_one_does_takes_its_place_and_time() -> None:
    clock = FakeClock()
    table = RetainedConversations(10, 100.0, clock)
    table.add(_chain("ab"), None)
    clock.advance(60.0)
    assert table.add(_chain("ab"), None) == (range(2, 2), ())
    clock.advance(60.0)
    assert table.expire() == ()
    clock.advance(40.0)
    assert table.expire() == tuple(_chain("ab"))
