"""Filters, scorers, picker and decider: pure functions over a snapshot."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvferry.errors import RequestError
from kvferry.protocol.params import Mode, Role
from kvferry.router.config import RouteMode
from kvferry.router.fleet.registry import Fleet, FleetSnapshot, Health, InstanceView
from kvferry.router.request.decider import PlainReason, decide, wanted_mode
from kvferry.router.request.filters import apply_filters, excluding, usable
from kvferry.router.request.parsing import RequestTraits
from kvferry.router.request.plan import ChoicePolicy, choose, pick_in_turn
from kvferry.router.request.scorers import best_scored, fewest_inflight, no_preference


def _view(
    url: str, health: Health = Health.HEALTHY, *, is_draining: bool = False, num_inflight: int = 0
) -> InstanceView:
    return InstanceView(url, Role.DECODE, health, is_draining, num_inflight)


def _urls(views: object) -> list[str]:
    assert isinstance(views, list | tuple)
    return [view.url for view in views]


def test_usable_keeps_the_healthy() -> None:
    views = [_view("a"), _view("b", Health.SUSPECT), _view("c", Health.DOWN)]
    assert _urls(usable(views)) == ["a"]


def test_usable_falls_back_to_suspects_but_never_to_the_rest() -> None:
    views = [_view("b", Health.SUSPECT), _view("c", Health.DOWN), _view("d", Health.UNKNOWN)]
    assert _urls(usable(views)) == ["b"]
    assert usable(views[1:]) == []


def test_usable_leaves_out_the_draining() -> None:
    assert _urls(usable([_view("a", is_draining=True), _view("b", Health.SUSPECT)])) == ["b"]


def test_filters_apply_in_order() -> None:
    views = [_view("a"), _view("b", Health.SUSPECT)]
    assert _urls(apply_filters(views, [excluding({"a"}), usable])) == ["b"]
    assert _urls(apply_filters(views, [usable, excluding({"a"})])) == []


def test_scores_add_up() -> None:
    views = [_view("a", num_inflight=2), _view("b", num_inflight=1), _view("c", num_inflight=1)]
    assert _urls(best_scored(views, [fewest_inflight])) == ["b", "c"]
    assert _urls(best_scored(views, [no_preference])) == ["a", "b", "c"]
    prefer_a = [fewest_inflight, lambda view: 5.0 if view.url == "a" else 0.0]
    assert _urls(best_scored(views, prefer_a)) == ["a"]


def _turns(fleet: Fleet, *choices: Sequence[str]) -> list[str]:
    """Return who is picked for legs that only some may take, one after the other."""
    picked = []
    for urls in choices:
        view = pick_in_turn([view for view in fleet.snapshot().decode if view.url in urls])
        assert view is not None
        fleet.open_ticket(view.url, Role.DECODE)
        picked.append(view.url)
    return picked


def test_turns_are_taken() -> None:
    assert _turns(Fleet([], "ab"), "ab", "ab", "ab") == ["a", "b", "a"]
    # Also among those that are candidates for every second leg only.
    assert _turns(Fleet([], "abc"), "ab", "c", "ab", "c", "ab", "c") == list("acbcac")
    assert pick_in_turn([]) is None


def test_choice_may_use_a_suspect_when_the_healthy_one_has_failed() -> None:
    snapshot = FleetSnapshot((), (_view("a"), _view("b", Health.SUSPECT)))
    first = choose(snapshot, Role.DECODE, ChoicePolicy())
    second = choose(snapshot, Role.DECODE, ChoicePolicy(), excluded_urls=["a"])
    assert first is not None
    assert second is not None
    assert (first.url, second.url) == ("a", "b")
    assert choose(snapshot, Role.PREFILL, ChoicePolicy()) is None


@pytest.mark.parametrize(
    ("traits", "mode", "reason"),
    [
        (RequestTraits(), Mode.PULL, None),
        (RequestTraits(is_stream=True), Mode.PULL, None),
        (RequestTraits(num_choices=2), None, PlainReason.SEVERAL_CHOICES),
        (RequestTraits(num_prompts=2), None, PlainReason.SEVERAL_PROMPTS),
    ],
)
def test_one_sequence_is_split(
    traits: RequestTraits, mode: Mode | None, reason: PlainReason | None
) -> None:
    decision = decide(traits, may_push=False)
    assert (decision.mode, decision.plain_reason) == (mode, reason)


def test_one_sequence_is_pushed_where_it_may() -> None:
    assert decide(RequestTraits(), may_push=True).mode is Mode.PUSH
    assert decide(RequestTraits(num_choices=2), may_push=True).mode is None


def test_a_request_may_ask_for_a_mode() -> None:
    assert wanted_mode(None, RouteMode.PULL) is RouteMode.PULL
    assert wanted_mode(" Push ", RouteMode.PULL) is RouteMode.PUSH
    for wrong in ("", "p", "push,pull"):
        with pytest.raises(RequestError, match="auto, pull, push"):
            wanted_mode(wrong, RouteMode.AUTO)


def test_only_what_went_wrong_is_a_fallback() -> None:
    assert {reason for reason in PlainReason if not reason.is_fallback} == {
        PlainReason.SEVERAL_CHOICES,
        PlainReason.SEVERAL_PROMPTS,
    }
