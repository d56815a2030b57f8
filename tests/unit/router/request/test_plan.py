"""Which instances a request gets and by which mode: pure functions over a snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvferry.protocol.ids import Epoch, InstanceId
from kvferry.protocol.params import Mode, Role
from kvferry.router.config import RouteMode
from kvferry.router.fleet.identity import InstanceIdentity
from kvferry.router.fleet.registry import Fleet, FleetSnapshot, Health, InstanceView
from kvferry.router.request.parsing import ONE_SEQUENCE, RequestTraits
from kvferry.router.request.plan import (
    PlainReason,
    RouteRequest,
    choose_decode,
    choose_prefill,
    plan,
)

_ANY = RouteRequest()


def _identity(*capabilities: str, num_free_blocks: int = 0) -> InstanceIdentity:
    return InstanceIdentity(
        instance_id=InstanceId("p"),
        epoch=Epoch(5),
        control_address="tcp://h:1",
        capabilities=capabilities,
        num_blocks=8,
        num_free_blocks=num_free_blocks,
    )


_CAN_PUSH = _identity("pull", "push")


def _view(
    url: str,
    health: Health = Health.HEALTHY,
    *,
    is_draining: bool = False,
    num_inflight: int = 0,
    identity: InstanceIdentity | None = None,
    apart_from: str = "",
) -> InstanceView:
    """``apart_from``: one letter for each instance with which nothing is exchanged."""
    return InstanceView(
        url, Role.DECODE, health, is_draining, num_inflight, identity, frozenset(apart_from)
    )


def _chosen(
    *views: InstanceView, excluded: Sequence[str] = (), must_push: bool = False
) -> str | None:
    """Who gets a decode leg; prefill legs are chosen the same way."""
    chosen = [
        choose_decode(
            _ANY, FleetSnapshot((), views), excluded_urls=excluded, must_push=must_push
        ).view,
        choose_prefill(_ANY, FleetSnapshot(views, ()), excluded_urls=excluded, must_push=must_push),
    ]
    assert chosen[0] == chosen[1]
    return chosen[0].url if chosen[0] else None


# -- who may take a leg -----------------------------------------------------------------------
def test_the_healthy_go_first_then_suspects_and_never_the_rest() -> None:
    suspect, down = _view("b", Health.SUSPECT), _view("c", Health.DOWN)
    assert _chosen(suspect, _view("a"), down) == "a"
    assert _chosen(down, suspect, _view("d", Health.UNKNOWN)) == "b"
    assert _chosen(down, _view("d", Health.UNKNOWN)) is None


def test_the_draining_are_left_out() -> None:
    assert _chosen(_view("a", is_draining=True), _view("b", Health.SUSPECT)) == "b"


def test_choice_may_use_a_suspect_when_the_healthy_one_has_failed() -> None:
    views = (_view("a"), _view("b", Health.SUSPECT))
    assert (_chosen(*views), _chosen(*views, excluded=["a"])) == ("a", "b")
    assert _chosen(*views, excluded=["a", "b"]) is None


def test_only_the_known_can_push() -> None:
    views = (_view("a"), _view("b", identity=_identity("pull")), _view("c", identity=_CAN_PUSH))
    assert [view.can_push for view in views] == [False, False, True]
    assert _chosen(*views, must_push=True) == "c"
    assert _chosen(*views, must_push=True, excluded=["c"]) is None


def _turns(fleet: Fleet, *excluded: Sequence[str]) -> list[str]:
    """Return who gets legs from which some are excluded, one after the other."""
    for url in fleet.urls:
        fleet.set_health(url, Health.HEALTHY)
    chosen = []
    for urls in excluded:
        view = choose_decode(_ANY, fleet.snapshot(), excluded_urls=urls).view
        assert view is not None
        fleet.open_ticket(view.url, Role.DECODE)
        chosen.append(view.url)
    return chosen


def test_turns_are_taken() -> None:
    assert _turns(Fleet([], "ab"), "", "", "") == ["a", "b", "a"]
    # Also among those that are candidates for every second leg only.
    assert _turns(Fleet([], "abc"), "c", "ab", "c", "ab", "c", "ab") == list("acbcac")


def test_load_is_legs_first_and_free_blocks_then() -> None:
    fleet = Fleet(["p"], ["a", "b"])
    for url, num_free in (("a", 1), ("b", 7)):
        fleet.set_health(url, Health.HEALTHY)
        fleet.set_identity(url, _identity("push", num_free_blocks=num_free))
    by_load = RouteRequest(is_pushed_by_load=True)

    def chosen(request: RouteRequest) -> str | None:
        view = choose_decode(request, fleet.snapshot(), must_push=True).view
        return view.url if view else None

    assert (chosen(by_load), chosen(_ANY)) == ("b", "a")
    with fleet.open_ticket("b", Role.DECODE):
        assert chosen(by_load) == "a"


@pytest.mark.parametrize("num_legs", [0, 1, 30, 900])
def test_one_leg_more_outweighs_all_free_blocks(num_legs: int) -> None:
    views = (
        _view("a", num_inflight=num_legs + 1, identity=_identity("push", num_free_blocks=8)),
        _view("b", num_inflight=num_legs, identity=_identity("push")),
        _view("c", num_inflight=0, identity=_identity("pull")),
    )
    request = RouteRequest(is_pushed_by_load=True)
    chosen = choose_decode(request, FleetSnapshot((), views), must_push=True).view
    assert chosen is views[1]


# -- who exchanges with whom ------------------------------------------------------------------
_DIVIDED = FleetSnapshot(
    (_view("p", apart_from="e"), _view("q", apart_from="d")),
    (_view("d", apart_from="q"), _view("e", apart_from="p")),
)


def test_decode_exchanges_with_who_has_computed_the_prompt() -> None:
    for sender, url, other in (("p", "d", "e"), ("q", "e", "d")):
        chosen = choose_decode(_ANY, _DIVIDED, sender_url=sender)
        assert chosen.view is not None
        assert (chosen.view.url, chosen.has_only_others) == (url, False)
        left = choose_decode(_ANY, _DIVIDED, sender_url=sender, excluded_urls=[url])
        assert (left.view, left.has_only_others) == (None, True)
        nobody = choose_decode(_ANY, _DIVIDED, sender_url=sender, excluded_urls=[url, other])
        assert (nobody.view, nobody.has_only_others) == (None, False)


def test_prefill_exchanges_with_its_receiver() -> None:
    for receiver, url in zip(_DIVIDED.decode, "pq", strict=True):
        chosen = choose_prefill(_ANY, _DIVIDED, receiver=receiver)
        assert chosen is not None
        assert chosen.url == url


@pytest.mark.parametrize(("holder", "url"), [("d", "p"), ("e", "q"), ("x", "p"), ("", "p")])
def test_prefill_is_near_the_holder_where_it_may(holder: str, url: str) -> None:
    chosen = choose_prefill(RouteRequest(holder_url=holder), _DIVIDED)
    assert chosen is not None
    assert chosen.url == url


def test_prefill_without_any_partner_is_none() -> None:
    one = FleetSnapshot((_view("p", apart_from="d"),), (_view("d", apart_from="p"),))
    assert choose_prefill(_ANY, one) is None
    assert choose_prefill(_ANY, replace(one, decode=())) is None


# -- the whole plan ---------------------------------------------------------------------------
def _planned(
    mode: RouteMode,
    prefill: Sequence[InstanceView],
    decode: Sequence[InstanceView],
    traits: RequestTraits = ONE_SEQUENCE,
) -> tuple[Mode | None, str | None, str | None, PlainReason | None]:
    found = plan(
        RouteRequest(mode=mode, traits=traits), FleetSnapshot(tuple(prefill), tuple(decode))
    )
    urls = [view.url if view else None for view in (found.prefill, found.decode)]
    return found.mode, urls[0], urls[1], found.plain_reason


_PUSHER = _view("p", identity=_CAN_PUSH)
_RECEIVER = _view("d", identity=_CAN_PUSH)


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
    prefill = None if mode is None else "p"
    assert _planned(RouteMode.PULL, [_PUSHER], [_RECEIVER], traits) == (mode, prefill, "d", reason)


@pytest.mark.parametrize("mode", [RouteMode.AUTO, RouteMode.PUSH])
def test_one_sequence_is_pushed_where_it_may(mode: RouteMode) -> None:
    assert _planned(mode, [_PUSHER], [_RECEIVER]) == (Mode.PUSH, "p", "d", None)
    several = RequestTraits(num_choices=2)
    assert _planned(mode, [_PUSHER], [_RECEIVER], several)[0] is None
    assert _planned(mode, [_PUSHER], [_view("d")]) == (Mode.PULL, "p", "d", None)
    assert _planned(mode, [_view("p")], [_RECEIVER]) == (Mode.PULL, "p", "d", None)


def test_push_is_looked_for_where_it_is_wanted() -> None:
    prefill, decode = [_view("q"), _PUSHER], [_view("e"), _RECEIVER]
    assert _planned(RouteMode.PUSH, prefill, decode) == (Mode.PUSH, "p", "d", None)
    assert _planned(RouteMode.AUTO, prefill, decode) == (Mode.PULL, "q", "e", None)


def test_without_anybody_for_prefill_the_plan_says_why() -> None:
    decode = [_view("d", apart_from="p")]
    down, apart = _view("p", Health.DOWN), _view("p", apart_from="d")
    for view, reason in (
        (down, PlainReason.NO_PREFILL_INSTANCE),
        (apart, PlainReason.INCOMPATIBLE),
    ):
        assert _planned(RouteMode.AUTO, [view], decode) == (Mode.PULL, None, "d", reason)


def test_without_anybody_for_decode_nothing_runs() -> None:
    found = _planned(RouteMode.AUTO, [_PUSHER], [_view("d", Health.DOWN)])
    assert found == (None, None, None, None)


def test_only_what_went_wrong_is_a_fallback() -> None:
    assert {reason for reason in PlainReason if not reason.is_fallback} == {
        PlainReason.SEVERAL_CHOICES,
        PlainReason.SEVERAL_PROMPTS,
    }
