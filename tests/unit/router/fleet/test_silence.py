"""When an instance has fallen silent, and when it is merely busy."""

from __future__ import annotations

from kvferry.router.fleet.silence import Silence

_MIN_S = 3.0


def _unanswered(silence: Silence, began_s: float, lasted_s: float = 2.0) -> float | None:
    silence.begin_probe(began_s)
    return silence.take_unanswered(began_s + lasted_s, _MIN_S)


def test_two_unanswered_probes_in_a_row_are_silence_and_so_is_each_further_one() -> None:
    silence = Silence()
    assert _unanswered(silence, 10.0) is None
    assert _unanswered(silence, 13.0) == 5.0
    assert _unanswered(silence, 17.0) == 9.0


def test_a_sign_of_life_between_two_probes_begins_it_anew() -> None:
    silence = Silence()
    assert _unanswered(silence, 10.0) is None
    silence.hear()
    assert _unanswered(silence, 13.0) is None
    assert _unanswered(silence, 16.0) == 5.0


def test_a_probe_does_not_count_while_something_else_comes() -> None:
    silence = Silence()
    for began_s in range(10, 40, 3):
        silence.begin_probe(began_s)
        silence.hear()
        assert silence.take_unanswered(began_s + 2.0, _MIN_S) is None
    assert _unanswered(silence, 40.0) is None
    assert _unanswered(silence, 43.0) == 5.0


def test_probes_that_fail_at_once_take_their_time_to_be_silence() -> None:
    silence = Silence()
    assert [_unanswered(silence, began_s, 0.0) for began_s in (10.0, 11.0, 12.9)] == [None] * 3
    assert _unanswered(silence, 13.0, 0.0) == 3.0


def test_silence_ends_with_a_sign_of_life() -> None:
    silence = Silence()
    _unanswered(silence, 10.0)
    assert _unanswered(silence, 13.0) is not None
    silence.hear()
    assert _unanswered(silence, 17.0) is None


def test_it_is_doubted_from_the_first_unanswered_probe_until_the_second() -> None:
    silence = Silence()
    assert not silence.is_doubted
    _unanswered(silence, 10.0)
    assert silence.is_doubted
    _unanswered(silence, 13.0)
    assert not silence.is_doubted
    silence.hear()
    silence.begin_probe(17.0)
    assert not silence.is_doubted
    silence.hear()
    silence.take_unanswered(19.0, _MIN_S)
    assert silence.is_doubted  # Something came, and the probe was not answered all the same.
