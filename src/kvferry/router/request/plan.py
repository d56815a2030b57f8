"""One instance out of the fleet: filter, score, then in turn among what is left. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from kvferry.protocol.params import Role
from kvferry.router.fleet.registry import FleetSnapshot, InstanceView
from kvferry.router.request.filters import Filter, apply_filters, excluding, usable
from kvferry.router.request.preference import HolderChoice, Preference, prefer
from kvferry.router.request.scorers import Scorer, best_scored, no_preference


@dataclass(frozen=True, slots=True)
class ChoicePolicy:
    """What decides among the instances of one role."""

    filters: tuple[Filter, ...] = (usable,)
    scorers: tuple[Scorer, ...] = (no_preference,)

    def candidates(self, views: Sequence[InstanceView]) -> Sequence[InstanceView]:
        """Return those of ``views`` that may be chosen at all."""
        return apply_filters(views, self.filters)

    def among(self, more: Filter) -> ChoicePolicy:
        """Return the same policy with one more filter."""
        return replace(self, filters=(*self.filters, more))


def pick_in_turn(candidates: Sequence[InstanceView]) -> InstanceView | None:
    """Return the candidate whose last turn is longest ago, None when there is none.

    So all get their share, also where some are candidates for every second request only.
    """
    return min(candidates, key=lambda view: view.last_turn, default=None)


def choose(
    snapshot: FleetSnapshot,
    role: Role,
    policy: ChoicePolicy,
    *,
    excluded_urls: Collection[str] = (),
) -> InstanceView | None:
    """Return the instance for a leg of ``role``, None when none may take it.

    ``excluded_urls`` leave before health is looked at, so that a retry may use a suspect instance
    when the only healthy one has just failed.
    """
    candidates = _candidates(snapshot, role, policy, excluded_urls)
    return pick_in_turn(best_scored(candidates, policy.scorers))


def choose_near(
    snapshot: FleetSnapshot,
    policy: ChoicePolicy,
    preference: Preference,
    *,
    excluded_urls: Collection[str] = (),
) -> tuple[InstanceView | None, HolderChoice]:
    """Return the instance for a decode leg, the holder of its conversation where that may be."""
    candidates = _candidates(snapshot, Role.DECODE, policy, excluded_urls)
    near, choice = prefer(candidates, preference)
    return pick_in_turn(best_scored(near, policy.scorers)), choice


def _candidates(
    snapshot: FleetSnapshot, role: Role, policy: ChoicePolicy, excluded_urls: Collection[str]
) -> Sequence[InstanceView]:
    filters = (excluding(excluded_urls), *policy.filters) if excluded_urls else policy.filters
    return apply_filters(snapshot.of(role), filters)
