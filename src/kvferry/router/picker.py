"""One instance out of the fleet: filter, score, then round robin over what is left. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvferry.protocol.params import Role
from kvferry.router.filters import Filter, apply_filters, excluding, usable
from kvferry.router.fleet import FleetSnapshot, InstanceView
from kvferry.router.preference import HolderChoice, Preference, prefer
from kvferry.router.scorers import Scorer, best_scored, no_preference


@dataclass(frozen=True, slots=True)
class ChoicePolicy:
    """What decides among the instances of one role."""

    filters: tuple[Filter, ...] = (usable,)
    scorers: tuple[Scorer, ...] = (no_preference,)


def pick_round_robin(candidates: Sequence[InstanceView], turn: int) -> InstanceView | None:
    """Return the candidate whose turn it is, None when there is none."""
    return candidates[turn % len(candidates)] if candidates else None


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
    return pick_round_robin(best_scored(candidates, policy.scorers), snapshot.turn(role))


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
    turn = snapshot.turn(Role.DECODE)
    return pick_round_robin(best_scored(near, policy.scorers), turn), choice


def _candidates(
    snapshot: FleetSnapshot, role: Role, policy: ChoicePolicy, excluded_urls: Collection[str]
) -> Sequence[InstanceView]:
    filters = (excluding(excluded_urls), *policy.filters) if excluded_urls else policy.filters
    return apply_filters(snapshot.of(role), filters)
