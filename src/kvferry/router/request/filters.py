"""Which instances may take a leg at all: pure functions from candidates to candidates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from kvferry.router.fleet.registry import Health, InstanceView

Filter = Callable[[Sequence[InstanceView]], Sequence[InstanceView]]


def usable(candidates: Sequence[InstanceView]) -> list[InstanceView]:
    """Keep those that answer and are not draining.

    Suspect instances count only where there is no healthy one: a single reset connection must not
    empty a fleet.
    """
    serving = [view for view in candidates if not view.is_draining]
    healthy = [view for view in serving if view.health is Health.HEALTHY]
    return healthy or [view for view in serving if view.health is Health.SUSPECT]


def able_to_push(candidates: Sequence[InstanceView]) -> list[InstanceView]:
    """Keep those that are known to take part in pushes."""
    return [view for view in candidates if can_push(view)]


def can_push(view: InstanceView) -> bool:
    """Whether this instance is known to take part in pushes."""
    return view.identity is not None and view.identity.can_push


def fitting(partners: Sequence[InstanceView]) -> Filter:
    """Return a filter that keeps those which exchange with one of ``partners``, as far as is
    known; all, where there are none."""

    def keep(candidates: Sequence[InstanceView]) -> Sequence[InstanceView]:
        if not partners or not any(view.apart_from for view in candidates):
            return candidates
        urls = [partner.url for partner in partners]
        return [view for view in candidates if any(url not in view.apart_from for url in urls)]

    return keep


def excluding(urls: Collection[str]) -> Filter:
    """Return a filter that drops the instances in ``urls``: those that failed this request."""
    return lambda candidates: [view for view in candidates if view.url not in urls]


def apply_filters(
    candidates: Sequence[InstanceView], filters: Sequence[Filter]
) -> Sequence[InstanceView]:
    """Return what passes all ``filters``, in order."""
    for each in filters:
        candidates = each(candidates)
    return candidates
