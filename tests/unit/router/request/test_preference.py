"""When a decode leg goes to the holder of its conversation."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.params import Role
from kvferry.router.fleet.registry import FleetSnapshot, Health, InstanceView
from kvferry.router.request.filters import able_to_push, usable
from kvferry.router.request.plan import ChoicePolicy, choose_near
from kvferry.router.request.preference import HolderChoice, Preference
from kvferry.router.request.scorers import fewest_inflight


def _view(
    url: str, num_inflight: int = 0, health: Health = Health.HEALTHY, *, is_draining: bool = False
) -> InstanceView:
    return InstanceView(url, Role.DECODE, health, is_draining, num_inflight)


def _choice(
    *views: InstanceView,
    slack: int = 4,
    excluded: tuple[str, ...] = (),
    policy: ChoicePolicy | None = None,
    had_turns: str = "",
) -> tuple[str | None, HolderChoice]:
    """``had_turns``: who got the last legs, in their order."""
    views = tuple(replace(view, last_turn=had_turns.find(view.url) + 1) for view in views)
    snapshot = FleetSnapshot((), views)
    chosen, choice = choose_near(
        snapshot, policy or ChoicePolicy(), Preference("h", slack), excluded_urls=excluded
    )
    return chosen.url if chosen else None, choice


@pytest.mark.parametrize("had_turns", ["", "abh", "hba"])
def test_holder_is_chosen_whoever_turn_it_is(had_turns: str) -> None:
    views = (_view("a"), _view("h", 4), _view("b", 9))
    assert _choice(*views, had_turns=had_turns) == ("h", HolderChoice.HOLDER)


@pytest.mark.parametrize(("had_turns", "expected"), [("", "a"), ("a", "b"), ("ba", "b")])
def test_overloaded_holder_is_left_out(had_turns: str, expected: str) -> None:
    views = (_view("a"), _view("h", 5), _view("b", 9))
    assert _choice(*views, had_turns=had_turns) == (expected, HolderChoice.OVERLOADED)


def test_no_slack_means_the_least_busy() -> None:
    assert _choice(_view("a", 1), _view("h", 1), slack=0)[1] is HolderChoice.HOLDER
    assert _choice(_view("a", 0), _view("h", 1), slack=0) == ("a", HolderChoice.OVERLOADED)


def test_only_instances_that_may_be_chosen_count_for_its_load() -> None:
    down = _view("a", 0, Health.DOWN)
    assert _choice(down, _view("h", 9), _view("b", 6)) == ("h", HolderChoice.HOLDER)
    assert _choice(_view("h", 99)) == ("h", HolderChoice.HOLDER)


@pytest.mark.parametrize(
    "holder",
    [
        _view("h", health=Health.DOWN),
        _view("h", health=Health.SUSPECT),
        _view("h", health=Health.UNKNOWN),
        _view("h", is_draining=True),
        _view("other"),
    ],
)
def test_holder_that_may_not_be_chosen_is_not(holder: InstanceView) -> None:
    chosen, choice = _choice(_view("a"), holder)
    assert chosen != "h"
    assert choice is HolderChoice.ELSEWHERE


def test_excluded_holder_is_not_chosen_again() -> None:
    assert _choice(_view("a"), _view("h"), excluded=("h",)) == ("a", HolderChoice.ELSEWHERE)
    assert _choice(_view("h"), excluded=("h",)) == (None, HolderChoice.ELSEWHERE)


def test_holder_that_cannot_push_is_not_pushed_to() -> None:
    policy = ChoicePolicy(filters=(able_to_push, usable))
    assert _choice(_view("h"), policy=policy) == (None, HolderChoice.ELSEWHERE)


def test_holder_goes_before_load_within_the_slack() -> None:
    policy = ChoicePolicy(scorers=(fewest_inflight,))
    assert _choice(_view("a", 0), _view("h", 3), policy=policy)[0] == "h"
    assert _choice(_view("a", 7), _view("h", 9), _view("b", 1), policy=policy)[0] == "b"


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(0, 20), st.integers(0, 9))
def test_holder_is_never_busier_than_the_slack_allows(
    loads: list[int], load: int, slack: int
) -> None:
    others = [_view(f"a{number}", each) for number, each in enumerate(loads)]
    chosen, choice = _choice(_view("h", load), *others, slack=slack)
    is_within = load <= min([load, *loads]) + slack
    assert (chosen == "h") is is_within
    assert choice is (HolderChoice.HOLDER if is_within else HolderChoice.OVERLOADED)
