"""The fleet: health, tickets, and snapshots that do not change."""

from __future__ import annotations

import pytest

from kvferry.errors import LocalProtocolError
from kvferry.protocol.compatibility import Compatibility
from kvferry.protocol.ids import Epoch, InstanceId
from kvferry.protocol.params import Role
from kvferry.router.fleet.identity import InstanceIdentity
from kvferry.router.fleet.registry import Fleet, FleetEvent, Health


def test_snapshot_stays_as_it_was() -> None:
    fleet = Fleet(["http://p"], ["http://d"])
    before = fleet.snapshot()
    fleet.set_health("http://p", Health.HEALTHY)
    with fleet.open_ticket("http://p", Role.PREFILL):
        during = fleet.snapshot()
    assert before.prefill[0].health is Health.UNKNOWN
    assert (during.prefill[0].health, during.prefill[0].num_inflight) == (Health.HEALTHY, 1)
    assert (before.prefill[0].last_turn, during.prefill[0].last_turn) == (0, 1)
    assert fleet.snapshot().prefill[0].num_inflight == 0


def test_ticket_closed_twice_counts_once_also_over_a_flap() -> None:
    fleet = Fleet(["http://p"], ["http://d"])
    ticket = fleet.open_ticket("http://p", Role.PREFILL)
    for health in (Health.DOWN, Health.HEALTHY):
        fleet.set_health("http://p", health)
        ticket.close()
    assert fleet.snapshot().prefill[0].num_inflight == 0


def test_one_url_in_both_roles_has_one_health_and_two_counts() -> None:
    fleet = Fleet(["http://a", "http://a"], ["http://a"])
    assert fleet.urls == ("http://a",)
    fleet.set_health("http://a", Health.HEALTHY)
    with fleet.open_ticket("http://a", Role.DECODE):
        snapshot = fleet.snapshot()
    assert [view.health for view in (*snapshot.prefill, *snapshot.decode)] == [Health.HEALTHY] * 2
    assert (snapshot.prefill[0].num_inflight, snapshot.decode[0].num_inflight) == (0, 1)


def test_connection_failure_makes_a_healthy_instance_suspect_and_asks_for_a_probe() -> None:
    fleet = Fleet(["http://p"], ["http://d"])
    told = _events(fleet)
    fleet.report_connection_failure("http://p", "reset")
    assert (fleet.health("http://p"), told) == (Health.UNKNOWN, [])
    fleet.set_health("http://p", Health.HEALTHY)
    fleet.report_connection_failure("http://p", "reset")
    fleet.report_connection_failure("http://p", "reset")
    assert fleet.health("http://p") is Health.SUSPECT
    assert told == [(FleetEvent.SUSPECT, "http://p")]
    assert fleet.detail("http://p") == "reset"


def test_one_that_is_ending_stays_suspect_for_some_probes() -> None:
    fleet = Fleet(["http://p"], ["http://d"])
    fleet.set_health("http://p", Health.HEALTHY)
    fleet.report_connection_failure("http://p", "aborted", num_doubts=2)
    for health in (Health.SUSPECT, Health.SUSPECT, Health.HEALTHY):
        fleet.set_health("http://p", Health.HEALTHY)
        assert fleet.health("http://p") is health


def test_one_that_has_ended_begins_without_doubts() -> None:
    fleet = Fleet(["http://p"], ["http://d"])
    fleet.set_health("http://p", Health.HEALTHY)
    fleet.report_connection_failure("http://p", "aborted", num_doubts=2)
    for health in (Health.DOWN, Health.HEALTHY):
        fleet.set_health("http://p", health)
        assert fleet.health("http://p") is health


def test_an_old_leg_that_ends_late_raises_no_doubts_about_the_next_start() -> None:
    fleet = Fleet(["http://p"], ["http://d"])
    fleet.set_health("http://p", Health.DOWN)
    fleet.report_connection_failure("http://p", "aborted", num_doubts=2)
    fleet.set_health("http://p", Health.HEALTHY)
    assert fleet.health("http://p") is Health.HEALTHY


def _events(fleet: Fleet) -> list[tuple[FleetEvent, str]]:
    told: list[tuple[FleetEvent, str]] = []
    fleet.subscribe(lambda event, url: told.append((event, url)))
    return told


def test_one_that_drains_is_told_of_when_its_last_leg_has_ended() -> None:
    fleet = Fleet(["http://p"], ["http://d"])
    told = _events(fleet)
    tickets = [fleet.open_ticket("http://d", Role.DECODE) for _ in range(2)]
    fleet.set_draining("http://d", True)
    tickets[0].close()
    assert told == []
    tickets[1].close()
    assert told == [(FleetEvent.DRAINED, "http://d")]
    fleet.set_draining("http://p", True)  # which has none
    fleet.set_draining("http://p", True)
    assert told[1:] == [(FleetEvent.DRAINED, "http://p")]


def test_a_new_epoch_is_told_of_also_after_a_time_in_which_nobody_knew_it() -> None:
    fleet = Fleet(["http://p"], ["http://d"])
    told = _events(fleet)
    for epoch in (1, 1, None, 1, 2, None, 3):
        identity = None if epoch is None else _telling("p", "1", epoch)
        fleet.set_identity("http://p", identity)
    assert told == [(FleetEvent.NEW_EPOCH, "http://p")] * 2


def test_draining_shows_in_the_snapshot() -> None:
    fleet = Fleet(["http://p"], ["http://d"])
    fleet.set_draining("http://d", True)
    assert fleet.snapshot().of(Role.DECODE)[0].is_draining
    fleet.set_draining("http://d", False)
    assert not fleet.snapshot().of(Role.DECODE)[0].is_draining


def test_an_instance_is_viewed_in_its_roles_only() -> None:
    fleet = Fleet(["http://p"], ["http://d"])
    view = fleet.view("http://d", Role.DECODE)
    assert view == fleet.snapshot().decode[0]
    assert view is not None
    assert (view.peer, view.can_read_back) == (None, False)
    assert fleet.view("http://d", Role.PREFILL) is None
    assert fleet.view("http://x", Role.DECODE) is None


def test_other_urls_are_refused() -> None:
    with pytest.raises(LocalProtocolError, match="http://x"):
        Fleet(["http://p"], ["http://d"]).set_health("http://x", Health.DOWN)


def _telling(name: str, template: str, epoch: int = 1) -> InstanceIdentity:
    return InstanceIdentity(
        instance_id=InstanceId(name),
        epoch=Epoch(epoch),
        control_address="tcp://a:1",
        compatibility=Compatibility(chat_template_digest=template),
    )


def test_who_exchanges_nothing_with_whom_is_compared_when_it_is_told() -> None:
    fleet = Fleet(["http://p"], ["http://d", "http://e"])
    for url in fleet.urls:
        fleet.set_health(url, Health.HEALTHY)
    before = fleet.snapshot()
    fleet.set_identity("http://p", _telling("p", "1"))
    fleet.set_identity("http://d", _telling("d", "2"))
    assert fleet.snapshot().is_divided
    snapshot = fleet.snapshot()
    apart = {view.url: view.apart_from for view in (*snapshot.prefill, *snapshot.decode)}
    assert apart == {
        "http://p": {"http://d"}, "http://d": {"http://p"}, "http://e": frozenset(),
    }  # fmt: skip
    assert not before.decode[0].apart_from, "a snapshot stays as it was"
    fleet.set_identity("http://d", _telling("d", "1"))
    assert not fleet.snapshot().is_divided


@pytest.mark.parametrize("health", [Health.SUSPECT, Health.DOWN])
def test_one_that_may_start_anew_is_apart_from_nobody(health: Health) -> None:
    fleet = Fleet(["http://p"], ["http://d"])
    for url, template in (("http://p", "1"), ("http://d", "2")):
        fleet.set_health(url, Health.HEALTHY)
        fleet.set_identity(url, _telling(url, template))
    fleet.set_health("http://d", health)
    assert not fleet.snapshot().is_divided
    assert not fleet.snapshot().prefill[0].apart_from


def test_differences_are_not_looked_for_again_while_nobody_says_anything_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Fleet(["http://p"], ["http://d"])
    for url, template in (("http://p", "1"), ("http://d", "2")):
        fleet.set_identity(url, _telling(url, template))
    monkeypatch.setattr(InstanceIdentity, "difference_from", None)
    fleet.set_identity("http://d", _telling("d", "2"))
    assert fleet.snapshot().is_divided
