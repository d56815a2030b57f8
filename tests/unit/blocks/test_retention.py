"""Which conversations are retained, and for how long."""

from __future__ import annotations

import math
import threading

import pytest

from kvferry.blocks.retention import RetentionLimits
from kvferry.errors import ConfigError, LocalProtocolError
from tests.support.block_integrity import assert_whole
from tests.unit.blocks.retaining_instance import DURATION_S, Instance, chain


@pytest.fixture
def instance() -> Instance:
    return Instance()


@pytest.fixture
def renewing() -> Instance:
    return Instance(RetentionLimits(renews_on_use=True))


# -- limits -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"duration_s": -1}, "--retention-s"),
        ({"duration_s": math.nan}, "--retention-s"),
        ({"duration_s": math.inf}, "--retention-s"),
        ({"max_share": 0}, "--max-retained-share"),
        ({"max_share": 1.01}, "--max-retained-share"),
        ({"max_share": math.nan}, "--max-retained-share"),
    ],
)
def test_limits_that_make_no_sense_are_refused(options: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"{named}\) must be"):
        RetentionLimits(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("duration_s", [-0.1, math.nan])
def test_a_duration_that_makes_no_sense_is_refused(instance: Instance, duration_s: float) -> None:
    instance.turn("abc")
    with pytest.raises(LocalProtocolError):
        instance.table.retain(chain("abc"), duration_s)
    assert instance.retained("abc") == ["abc"]


def test_hashes_that_are_not_chained_are_refused_and_change_nothing(instance: Instance) -> None:
    instance.turn("ab")
    blocks = instance.compute("x")
    with pytest.raises(LocalProtocolError, match="another parent"):
        instance.table.retain([*chain("x"), chain("ab")[1]])
    assert instance.retained("ab", "x") == ["ab", ""]
    assert instance.table.num_conversations == 1
    instance.pool.drop(blocks)


# -- time -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked_s", "lasts_s"), [(None, 480.0), (10.0, 10.0), (480.0, 480.0), (3600.0, 480.0)]
)
def test_a_client_may_shorten_the_time_and_not_lengthen_it(
    instance: Instance, asked_s: float | None, lasts_s: float
) -> None:
    assert instance.turn("abc", asked_s) == 3
    assert instance.table.next_expiry_s() == 100.0 + lasts_s
    instance.clock.advance(lasts_s - 1)
    assert instance.table.expire() == 0
    assert instance.retained("abc") == ["abc"]
    instance.clock.advance(1)
    assert instance.table.expire() == 1
    assert instance.retained("abc") == [""]
    assert instance.pool.match(chain("abc")) == 3, "an ordinary cached sequence now"
    assert instance.table.next_expiry_s() is None
    assert instance.ends() == {"expired": 1}


def test_conversations_expire_each_at_its_time(instance: Instance) -> None:
    instance.turn("abc", 30)
    instance.turn("xyz", 10)
    instance.turn("pq", 20)
    seen = []
    for _ in range(3):
        instance.clock.advance(10)
        assert instance.table.expire() == 1
        seen.append(instance.retained("abc", "xyz", "pq"))
    assert seen == [["abc", "", "pq"], ["abc", "", ""], ["", "", ""]]


def test_what_is_due_at_once_ends_in_one_call(instance: Instance) -> None:
    for text in ("ab", "xy", "pq"):
        instance.turn(text, 10)
    instance.clock.advance(10)
    assert instance.table.expire() == 3
    assert instance.table.num_blocks == 0


def test_a_shared_head_stays_as_long_as_one_conversation_covers_it(instance: Instance) -> None:
    instance.turn("abcd", 10)
    instance.turn("abxy", 20)
    instance.clock.advance(10)
    instance.table.expire()
    assert instance.retained("abcd", "abxy") == ["ab", "abxy"]
    instance.clock.advance(10)
    instance.table.expire()
    assert instance.table.num_blocks == 0


def test_use_renews_nothing_by_default(instance: Instance) -> None:
    instance.turn("abc")
    instance.clock.advance(100)
    instance.table.renew(chain("abc"))
    assert instance.table.next_expiry_s() == 100.0 + DURATION_S


def test_by_option_use_starts_the_time_again(renewing: Instance) -> None:
    renewing.turn("abc", 50)
    renewing.clock.advance(40)
    renewing.table.renew(chain("ab"))
    assert renewing.table.next_expiry_s() == 190.0, "as long as it was granted for"
    renewing.clock.advance(49)
    assert renewing.table.expire() == 0
    renewing.clock.advance(1)
    assert renewing.table.expire() == 1


def test_a_head_that_several_share_renews_none_of_them(renewing: Instance) -> None:
    renewing.turn("abcd", 50)
    renewing.turn("abxy", 50)
    renewing.clock.advance(40)
    renewing.table.renew(chain("ab"))
    renewing.table.renew(chain("abxy"))
    renewing.clock.advance(10)
    assert renewing.table.expire() == 1
    assert renewing.retained("abcd", "abxy") == ["ab", "abxy"]


def test_a_renewed_conversation_is_the_last_to_give_way_to_the_cap(renewing: Instance) -> None:
    renewing.turn("abc")
    renewing.turn("xyz")
    renewing.table.renew(chain("abc"))
    renewing.turn("pqrs")
    assert renewing.retained("abc", "xyz", "pqrs") == ["abc", "x", "pqrs"]


def test_many_renewals_leave_nothing_behind(renewing: Instance) -> None:
    renewing.turn("abc", 50)
    renewing.turn("xyz")
    for _ in range(1000):
        renewing.clock.advance(1)
        renewing.table.renew(chain("abc"))
        assert renewing.table.expire() == (0 if renewing.clock.monotonic_s() != 580.0 else 1)
    assert renewing.table.num_conversations == 1
    renewing.clock.advance(50)
    assert renewing.table.expire() == 1
    assert renewing.table.next_expiry_s() is None


def test_retention_may_be_off() -> None:
    off = Instance(RetentionLimits(duration_s=0, renews_on_use=True))
    assert off.turn("abc") == 0
    assert off.turn("abcd", 100) == 0
    off.table.renew(chain("abc"))
    assert off.table.next_expiry_s() is None
    assert (off.table.num_conversations, off.table.num_blocks, off.ends()) == (0, 0, {})


# -- one conversation and others --------------------------------------------------------------


def test_a_later_turn_supersedes_the_earlier(instance: Instance) -> None:
    for end, text in enumerate(("abc", "abcd", "abcdefg"), start=1):
        instance.turn(text, 10 * end)
        assert instance.table.num_conversations == 1
    assert instance.ends() == {"superseded": 2}
    instance.clock.advance(29)
    assert instance.table.expire() == 0, "earlier turns no longer have a time of their own"
    assert instance.retained("abcdefg") == ["abcdefg"]


def test_the_same_turn_twice_is_one_conversation(instance: Instance) -> None:
    instance.turn("abc")
    assert instance.turn("abc", 5) == 3
    assert instance.table.num_conversations == 1
    assert instance.table.next_expiry_s() == 105.0


def test_forks_are_conversations_of_their_own(instance: Instance) -> None:
    instance.turn("ab")
    for text in ("abc", "abx", "abp"):
        instance.turn(text)
    assert instance.table.num_conversations == 3
    assert instance.table.num_blocks == 5
    assert instance.ends() == {"superseded": 1}


def test_a_shortened_history_does_not_end_the_longer_one(instance: Instance) -> None:
    instance.turn("abcd")
    instance.turn("ab")
    assert instance.table.num_conversations == 2
    instance.turn("abxy")
    assert instance.retained("abcd", "abxy") == ["abcd", "abxy"]
    assert instance.ends() == {"superseded": 1}


def test_the_end_of_a_conversation_lets_go_of_its_turns_and_of_no_fork(instance: Instance) -> None:
    instance.turn("abc")
    instance.turn("abxy")
    assert instance.turn("abcd", 0) == 0
    assert instance.retained("abcd", "abxy") == ["ab", "abxy"]
    assert instance.pool.match(chain("abcd")) == 4
    assert instance.ends() == {"ended": 1}


def test_the_end_of_an_unknown_conversation_ends_nothing(instance: Instance) -> None:
    instance.turn("abc")
    instance.table.retain(chain("xyz"), 0)
    instance.table.retain([], 0)
    instance.table.retain(chain("ab"), 0)
    assert instance.retained("abc") == ["abc"]


def test_a_conversation_cut_down_to_a_head_that_others_share_is_not_theirs(
    instance: Instance,
) -> None:
    """A fork is told by the last hash of the turn, not by the last one still retained."""
    instance.turn("ab" + "cdefgh" + "i")
    assert instance.retained("abcdefghi") == ["abcdefgh"]
    instance.table.retain(chain("abcdefgh"), 0)
    assert instance.table.num_conversations == 1


def test_only_what_is_found_is_retained(instance: Instance) -> None:
    blocks = instance.compute("ab")
    assert instance.table.retain(chain("abcd")) == 2
    assert instance.table.retain(chain("xy")) == 0
    assert instance.table.num_conversations == 1
    instance.pool.drop(blocks)
    assert instance.turn("abcd") == 4, "and what is computed later is"
    assert instance.table.num_conversations == 1


def test_nothing_is_retained_of_nothing(instance: Instance) -> None:
    assert instance.table.retain([]) == 0
    assert instance.table.num_conversations == 0


# -- everything -------------------------------------------------------------------------------


@pytest.mark.parametrize("cache_is_cleared", ["before", "after"])
def test_a_reset_retains_nothing(instance: Instance, cache_is_cleared: str) -> None:
    instance.turn("abcd")
    instance.turn("abxy")
    if cache_is_cleared == "before":
        instance.pool.clear_cache()
    instance.table.release_all()
    if cache_is_cleared == "after":
        instance.pool.clear_cache()
    assert (instance.table.num_conversations, instance.table.num_blocks) == (0, 0)
    assert instance.table.next_expiry_s() is None
    assert sum(instance.ends().values()) == 2
    assert_whole(instance.pool)
    assert instance.turn("abcd") == 4


def test_a_released_conversation_is_still_found(instance: Instance) -> None:
    instance.turn("abcd")
    instance.table.release_all()
    assert instance.pool.match(chain("abcd")) == 4
    assert instance.ends() == {"reset": 1}


def test_threads_share_a_table(renewing: Instance) -> None:
    failures: list[BaseException] = []
    start = threading.Barrier(3)

    def work(name: str) -> None:
        try:
            start.wait(timeout=30)
            for turn in range(200):
                text = ("s" + name * 5)[: 2 + turn % 4]
                renewing.pool.drop(renewing.compute(text))
                renewing.table.retain(chain(text), float(turn % 7))
                renewing.table.renew(chain(text))
                renewing.clock.advance(0.5)
                renewing.table.expire()
        except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert failures == []
    renewing.check()
    renewing.clock.advance(DURATION_S)
    renewing.table.expire()
    assert (renewing.table.num_conversations, renewing.table.num_blocks) == (0, 0)
    assert_whole(renewing.pool)
