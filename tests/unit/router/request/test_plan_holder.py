"""When a decode leg goes to the holder of its conversation."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.ids import Epoch, InstanceId
from kvferry.protocol.params import Role
from kvferry.router.fleet.identity import InstanceIdentity
from kvferry.router.fleet.registry import FleetSnapshot, Health, InstanceView
from kvferry.router.request.plan import HolderChoice, RouteRequest, choose_decode

_CAN_PUSH = InstanceIdentity(
    instance_id=InstanceId("i"), epoch=Epoch(1), control_address="tcp://h:1", capabilities=("push",)
)


def _view(
    url: str, num_inflight: int = 0, health: Health = Health.HEALTHY, *, is_draining: bool = False
) -> InstanceView:
    return InstanceView(url, Role.DECODE, health, is_draining, num_inflight)


def _choice(
    *views: InstanceView,
    slack: int = 4,
    excluded: tuple[str, ...] = (),
    must_push: bool = False,
    had_turns: str = "",
) -> tuple[str | None, HolderChoice | None]:
    """``had_turns``: who got the last legs, in their order."""
    views = tuple(replace(view, last_turn=had_turns.find(view.url) + 1) for view in views)
    snapshot = FleetSnapshot((), views)
    request = RouteRequest(
        holder_url="h",
        prefers_holder=True,
        holder_slack_requests=slack,
        is_pushed_by_load=must_push,
    )
    chosen = choose_decode(request, snapshot, excluded_urls=excluded, must_push=must_push)
    return chosen.view.url if chosen.view else None, chosen.holder


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
    assert _choice(_view("h"), must_push=True) == (None, HolderChoice.ELSEWHERE)


def test_holder_goes_before_load_within_the_slack() -> None:
    a, h, b = (replace(_view(url), identity=_CAN_PUSH) for url in "ahb")
    assert _choice(a, replace(h, num_inflight=3), must_push=True)[0] == "h"
    busy = (replace(a, num_inflight=7), replace(h, num_inflight=9), replace(b, num_inflight=1))
    assert _choice(*busy, must_push=True)[0] == "b"


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(0, 20), st.integers(0, 9))
def test_holder_is_never_busier_than_the_slack_allows(
    loads: list[int], load: int, slack: int
) -> None:
    others = [_view(f"a{number}", each) for number, each in enumerate(loads)]
    chosen, choice = _choice(_view("h", load), *others, slack=slack)
    is_within = load <= min([load, *loads]) + slack
    assert (chosen == "h") is is_within
    assert choice is (HolderChoice.HOLDER if is_within else HolderChoice.OVERLOADED)


def test_a_holder_that_only_began_alike_is_not_preferred() -> None:
    views = (replace(_view("h"), last_turn=1), _view("a"))
    chosen = choose_decode(RouteRequest(holder_url="h"), FleetSnapshot((), views))
    assert (chosen.view, chosen.holder) == (views[1], None)
