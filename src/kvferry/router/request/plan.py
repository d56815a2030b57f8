"""Which instances take a request, and by which mode: pure functions over a snapshot of the fleet.

``plan`` decides for a request that has come. ``choose_prefill`` and ``choose_decode`` choose one
leg's instance again: with a credit, late, or after a failure. Whoever may take a leg is scored, and
those with the best score take turns.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from kvferry.protocol.params import Mode
from kvferry.router.config import RouteMode
from kvferry.router.fleet.registry import FleetSnapshot, Health, InstanceView
from kvferry.router.request.parsing import ONE_SEQUENCE, RequestTraits


class PlainReason(enum.StrEnum):
    """Why a request ran on a decode instance alone."""

    SEVERAL_CHOICES = "several_choices"
    """``n`` or ``best_of`` above 1: a handoff has one receiver of one sequence."""
    SEVERAL_PROMPTS = "several_prompts"
    NO_PREFILL_INSTANCE = "no_prefill_instance"
    INCOMPATIBLE = "incompatible"
    """No prefill instance exchanges with a decode instance that could take it."""
    PREFILL_FAILED = "prefill_failed"
    NOTHING_OFFERED = "nothing_offered"
    """Prefill answered without transfer parameters."""
    NO_RECEIVER = "no_receiver"
    """Late choice: no decode instance could take a push any more."""
    OFFER_USED = "offer_used"
    """What prefill offered can be taken once, and an instance that had it has failed."""

    @property
    def is_fallback(self) -> bool:
        """Whether something went wrong, rather than the request asking for it."""
        return self not in (PlainReason.SEVERAL_CHOICES, PlainReason.SEVERAL_PROMPTS)


class HolderChoice(enum.StrEnum):
    """Where the decode leg of a known conversation went; the values are metric labels."""

    HOLDER = "holder"
    OVERLOADED = "overloaded"
    """Elsewhere: the holder had too many more legs in flight than another."""
    ELSEWHERE = "elsewhere"
    """The holder could not be chosen: not healthy, draining, without credit, tried before, or one
    that exchanges nothing with the prefill instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRequest:
    """What choices look at of a request."""

    traits: RequestTraits = ONE_SEQUENCE
    mode: RouteMode = RouteMode.PULL
    """As it is wanted."""
    holder_url: str = ""
    """Who probably holds KV of its prompt; empty: nobody is known."""
    prefers_holder: bool = False
    """Whether it continues what the holder has answered, and not only begins alike."""
    holder_slack_requests: int = 0
    """By how many legs the holder may be busier than another and still be preferred."""
    is_pushed_by_load: bool = False
    """Whether a push's decode instance is chosen by load, rather than in turn."""


ANYBODY = RouteRequest()
"""A request of which nothing is known."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a request runs: split by ``mode``; None: on ``decode`` alone, for ``plain_reason``.

    Without ``decode`` nobody can answer it. A pull's instance for decode is chosen again once
    prefill is done; where there is none for prefill, ``plain_reason`` says why.
    """

    mode: Mode | None
    prefill: InstanceView | None
    decode: InstanceView | None
    plain_reason: PlainReason | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The instance for a decode leg, None when none may take it."""

    view: InstanceView | None
    holder: HolderChoice | None = None
    """How it is with the conversation's holder; None where none is preferred."""
    has_only_others: bool = False
    """Whether some could take it, but none of them exchanges with the prefill instance."""


def plan(request: RouteRequest, snapshot: FleetSnapshot) -> Plan:
    """Return how ``request`` runs, as the fleet stands now."""
    decode = choose_decode(request, snapshot).view
    plain_reason = _why_plain(request.traits)
    if decode is None or plain_reason is not None:
        return Plan(None, None, decode, plain_reason)
    if request.mode is not RouteMode.PULL:
        must_push = request.mode is RouteMode.PUSH
        receiver = choose_decode(request, snapshot, must_push=True).view if must_push else decode
        sender = choose_prefill(request, snapshot, must_push=must_push, receiver=receiver)
        if sender and receiver and sender.can_push and receiver.can_push:
            return Plan(Mode.PUSH, sender, receiver)
    prefill = choose_prefill(request, snapshot)
    if prefill is None:
        is_there = bool(_able(snapshot.prefill))
        plain_reason = PlainReason.INCOMPATIBLE if is_there else PlainReason.NO_PREFILL_INSTANCE
    return Plan(Mode.PULL, prefill, decode, plain_reason)


def choose_prefill(
    request: RouteRequest,
    snapshot: FleetSnapshot,
    *,
    excluded_urls: Collection[str] = (),
    must_push: bool = False,
    receiver: InstanceView | None = None,
) -> InstanceView | None:
    """Return the instance for a prefill leg, None when none is left.

    It exchanges with ``receiver``; where that is not chosen yet, with the conversation's holder if
    it may, else with some decode instance.
    """
    candidates = _able(snapshot.prefill, excluded_urls, must_push)
    if not snapshot.is_divided:
        return _best(request, candidates, ())
    partners = [receiver] if receiver else _able(snapshot.decode, (), must_push)
    if not partners:
        return None
    is_near = any(partner.url == request.holder_url for partner in partners)
    return _best(request, _fitting(candidates, partners), ("near_holder",) if is_near else ())


def choose_decode(
    request: RouteRequest,
    snapshot: FleetSnapshot,
    *,
    excluded_urls: Collection[str] = (),
    must_push: bool = False,
    sender_url: str = "",
) -> Choice:
    """Return the instance for a decode leg: the conversation's holder, where that may be.

    It exchanges with the prefill instance ``sender_url``; a push whose prefill instance is not
    chosen yet (empty), with one that can push.
    """
    able = candidates = _able(snapshot.decode, excluded_urls, must_push)
    if snapshot.is_divided and (sender_url or must_push):
        senders = [view for view in snapshot.prefill if view.url == sender_url]
        partners = senders if sender_url else _able(snapshot.prefill, (), must_push)
        candidates = _fitting(able, partners)
    scorers: tuple[str, ...] = ()
    if must_push and request.is_pushed_by_load:
        scorers = ("inflight", "free_blocks")
    holder = None
    if request.prefers_holder:
        scorers = ("holder", *scorers)
        holder = _holder_choice(request, candidates)
    has_only_others = bool(able and not candidates)
    return Choice(_best(request, candidates, scorers), holder, has_only_others)


def _why_plain(traits: RequestTraits) -> PlainReason | None:
    if traits.num_prompts > 1:
        return PlainReason.SEVERAL_PROMPTS
    return PlainReason.SEVERAL_CHOICES if traits.num_choices > 1 else None


# -- who may take a leg -----------------------------------------------------------------------
def _able(
    views: Sequence[InstanceView], excluded_urls: Collection[str] = (), must_push: bool = False
) -> list[InstanceView]:
    """Keep those that answer and are not draining, and that can push where it is asked for.

    Suspect instances count only where there is no healthy one: a single reset connection must not
    empty a fleet. ``excluded_urls`` leave before health is looked at, so that a retry may use a
    suspect instance when the only healthy one has just failed.
    """
    serving = [
        view
        for view in views
        if not view.is_draining
        and view.url not in excluded_urls
        and (view.can_push or not must_push)
    ]
    healthy = [view for view in serving if view.health is Health.HEALTHY]
    return healthy or [view for view in serving if view.health is Health.SUSPECT]


def _fitting(
    candidates: list[InstanceView], partners: Sequence[InstanceView]
) -> list[InstanceView]:
    """Keep those which exchange with one of ``partners``, as far as is known; all without any."""
    if not partners or not any(view.apart_from for view in candidates):
        return candidates
    urls = [partner.url for partner in partners]
    return [view for view in candidates if any(url not in view.apart_from for url in urls)]


# -- how well an instance suits it ------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Scorer:
    """How well an instance suits a leg by one measure, 0 to 1, and how much that counts."""

    weight: float
    score: Callable[[RouteRequest, InstanceView, int], float]
    """Of the request, an instance, and the fewest legs in flight on any that may be chosen."""


def _score_holder(request: RouteRequest, view: InstanceView, least_inflight: int) -> float:
    """The holder of the conversation, unless it is overloaded, then anybody else."""
    if view.url != request.holder_url:
        return 0.5
    return 1.0 if view.num_inflight <= least_inflight + request.holder_slack_requests else 0.0


def _score_near_holder(request: RouteRequest, view: InstanceView, _: int) -> float:
    """A prefill instance that exchanges with the holder of the conversation."""
    return 0.0 if request.holder_url in view.apart_from else 1.0


def _score_inflight(_: RouteRequest, view: InstanceView, least_inflight: int) -> float:
    """The fewest legs in flight."""
    return 1.0 / (1 + view.num_inflight - least_inflight)


def _score_free_blocks(_: RouteRequest, view: InstanceView, __: int) -> float:
    """The largest free share of its pool, when it was last asked."""
    return view.identity.free_share if view.identity is not None else 0.0


_SCORERS = {
    # More than all of the load.
    "holder": Scorer(4.0, _score_holder),
    "near_holder": Scorer(1.0, _score_near_holder),
    "inflight": Scorer(1.0, _score_inflight),
    # Less than one leg in flight counts, up to a thousand of them.
    "free_blocks": Scorer(1e-6, _score_free_blocks),
}


def _best(
    request: RouteRequest, candidates: Sequence[InstanceView], scorers: Sequence[str]
) -> InstanceView | None:
    """Return one with the highest sum of weighted ``scorers``.

    Of several, the one whose last turn is longest ago: so all get their share, also where some may
    take every second request only.
    """
    if len(candidates) > 1 and scorers:
        least_inflight = min(view.num_inflight for view in candidates)
        scores = [
            sum(_weighted(name, request, view, least_inflight) for name in scorers)
            for view in candidates
        ]
        best = max(scores)
        candidates = [view for view, score in zip(candidates, scores, strict=True) if score == best]
    return min(candidates, key=lambda view: view.last_turn, default=None)


def _weighted(name: str, request: RouteRequest, view: InstanceView, least_inflight: int) -> float:
    scorer = _SCORERS[name]
    return scorer.weight * scorer.score(request, view, least_inflight)


def _holder_choice(request: RouteRequest, candidates: Sequence[InstanceView]) -> HolderChoice:
    least_inflight = min((view.num_inflight for view in candidates), default=0)
    for view in candidates:
        if view.url == request.holder_url:
            is_chosen = _score_holder(request, view, least_inflight) == 1.0
            return HolderChoice.HOLDER if is_chosen else HolderChoice.OVERLOADED
    return HolderChoice.ELSEWHERE
