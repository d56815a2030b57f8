"""Effects in the order in which they were decided, whoever decides."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from kvferry.connector.decisions import Decisions
from kvferry.connector.machine.effects import Effect, StartServing, StopServing

WAIT_S = 10.0


def take_all(decisions: Decisions) -> list[Effect]:
    taken = []
    while (effect := decisions.take()) is not None:
        taken.append(effect)
    return taken


def test_effects_come_out_as_they_went_in() -> None:
    decisions = Decisions()
    assert not decisions
    decisions.make(lambda reader: [StartServing(reader)], "a")
    answer = decisions.answer(lambda reader: (7, [StopServing(reader)]), "a")
    decisions.add([StartServing("b")])
    assert (answer, len(decisions)) == (7, 3)
    assert take_all(decisions) == [StartServing("a"), StopServing("a"), StartServing("b")]


def test_nobody_decides_before_the_effects_of_an_earlier_decision_are_in() -> None:
    decisions = Decisions()
    is_deciding, may_end, order = threading.Event(), threading.Event(), list[str]()

    def decide_slowly() -> Sequence[Effect]:
        order.append("first")
        is_deciding.set()
        assert may_end.wait(WAIT_S)
        return [StartServing("a")]

    def decide() -> Sequence[Effect]:
        order.append("second")
        return [StopServing("a")]

    first = threading.Thread(target=decisions.make, args=(decide_slowly,))
    second = threading.Thread(target=decisions.make, args=(decide,))
    first.start()
    assert is_deciding.wait(WAIT_S)
    second.start()
    may_end.set()
    first.join(WAIT_S)
    second.join(WAIT_S)
    assert order == ["first", "second"]
    assert take_all(decisions) == [StartServing("a"), StopServing("a")]


def test_a_decision_that_fails_leaves_the_queue_usable() -> None:
    decisions = Decisions()

    def fail() -> Sequence[Effect]:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        decisions.make(fail)
    decisions.make(lambda: [StartServing("a")])
    assert take_all(decisions) == [StartServing("a")]
