"""The store of turns: least recently used go, and each has its time."""

from __future__ import annotations

from kvferry.protocol.ids import Epoch, InstanceId
from kvferry.protocol.params import PeerAddress
from kvferry.router.history.recall import Holder, Turn, TurnStore
from tests.support.fake_clock import FakeClock

_PEER = PeerAddress(InstanceId("d"), Epoch(1), "tcp://h:1")


def _turn(name: str) -> Turn:
    return Turn(Holder(name, _PEER), 1, b"digest")


def _any(turn: Turn) -> bool:
    del turn
    return True


def _names(store: TurnStore, *keys: bytes) -> list[str | None]:
    found = [store.find_first([key], _any) for key in keys]
    return [each[1].holder.url if each else None for each in found]


def test_first_key_that_is_accepted_is_found() -> None:
    store = TurnStore(FakeClock(), max_entries=9)
    store.remember([b"a"], _turn("a"), 1)
    store.remember([b"b", b"c"], _turn("b"), 1)
    assert store.find_first([b"x", b"b", b"a"], _any) == (1, _turn("b"))
    assert store.find_first([b"b", b"a"], lambda turn: turn.holder.url == "a") == (
        1,
        _turn("a"),
    )
    assert store.find_first([b"x"], _any) is None
    assert store.find_first([], _any) is None


def test_a_turn_has_its_own_time() -> None:
    clock = FakeClock()
    store = TurnStore(clock, max_entries=9)
    store.remember([b"long"], _turn("long"), 480)
    store.remember([b"short"], _turn("short"), 10)
    clock.advance(9.99)
    assert _names(store, b"long", b"short") == ["long", "short"]
    clock.advance(0.01)
    assert _names(store, b"long", b"short") == ["long", None]
    assert store.num_remembered() == 1
    clock.advance(480)
    assert store.num_remembered() == 0
    assert _names(store, b"long") == [None]


def test_remembering_again_begins_its_time_anew() -> None:
    clock = FakeClock()
    store = TurnStore(clock, max_entries=9)
    store.remember([b"a"], _turn("old"), 10)
    clock.advance(8)
    store.remember([b"a"], _turn("new"), 10)
    clock.advance(8)
    assert _names(store, b"a") == ["new"]
    clock.advance(2)
    assert _names(store, b"a") == [None]


def test_looking_does_not_lengthen_its_time() -> None:
    clock = FakeClock()
    store = TurnStore(clock, max_entries=9)
    store.remember([b"a"], _turn("a"), 10)
    clock.advance(9)
    assert _names(store, b"a") == ["a"]
    clock.advance(1)
    assert _names(store, b"a") == [None]


def test_least_recently_used_go_first() -> None:
    store = TurnStore(FakeClock(), max_entries=3)
    for name in "abc":
        store.remember([name.encode()], _turn(name), 1)
    assert _names(store, b"a") == ["a"]
    store.remember([b"d"], _turn("d"), 1)
    assert _names(store, b"a", b"b", b"c", b"d") == ["a", None, "c", "d"]
    store.remember([b"e", b"f", b"g", b"h"], _turn("many"), 1)
    assert store.num_remembered() == 3


def test_what_is_forgotten_is_gone() -> None:
    store = TurnStore(FakeClock(), max_entries=9)
    store.remember([b"a", b"b"], _turn("a"), 1)
    store.forget([b"a", b"unknown"])
    assert _names(store, b"a", b"b") == [None, "a"]
