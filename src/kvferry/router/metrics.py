"""What the router counts: how requests end, and the figures of its steps, legs and instances.

Labels hold only configured or enumerated values, never anything from a client.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from functools import partial
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvferry.observe.metrics import Metrics
from kvferry.protocol.params import Mode, Role
from kvferry.router.config import DecodeChoice
from kvferry.router.fleet.registry import Fleet, Health
from kvferry.router.history.recall import LookupResult
from kvferry.router.request.credits import HandoffCredits
from kvferry.router.request.plan import HolderChoice, PlainReason

_STEP_BUCKETS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
_RECEIVE_OUTCOMES = frozenset(
    ("received", "gone", "expired", "declined", "mismatch", "incompatible", "unreachable", "slow")
    + ("failed", "corrupt")
)
"""What an instance may say; anything else is another release's."""


class Outcome(enum.StrEnum):
    """How a request ended; every request has exactly one."""

    OK = "ok"
    BAD_REQUEST = "bad_request"
    """Refused with a 4xx, by the router or by an engine."""
    PREFILL_FAILED = "prefill_failed"
    DECODE_FAILED = "decode_failed"
    CLIENT_GONE_BEFORE_PREFILL_DONE = "client_gone_before_prefill_done"
    CLIENT_GONE_AFTER_PREFILL = "client_gone_after_prefill"
    """Prefill had finished (or was not needed), and the client had got no byte yet."""
    CLIENT_GONE_STREAMING = "client_gone_streaming"
    MISMATCH = "mismatch"
    """Answered by decode, which computed the prompt: prefill made another one of the request."""
    FALLBACK_DECODE_ONLY = "fallback_decode_only"
    """Answered by a decode instance alone because prefill could not do its part."""
    NO_INSTANCE = "no_instance"
    NO_CREDIT = "no_credit"
    """Too many handoffs were under way for every decode instance, for too long."""
    OVERLOADED = "overloaded"
    TIMEOUT = "timeout"


GOOD_OUTCOMES = (Outcome.OK, Outcome.MISMATCH, Outcome.FALLBACK_DECODE_ONLY)
"""The client has got its whole answer."""
_GONE_WHEN = {
    Outcome.CLIENT_GONE_BEFORE_PREFILL_DONE: "before_prefill_done",
    Outcome.CLIENT_GONE_AFTER_PREFILL: "after_prefill",
    Outcome.CLIENT_GONE_STREAMING: "streaming",
}
_Label = TypeVar("_Label", bound=enum.StrEnum)


class RouterFigures:
    """All metrics of one router, their label values bound once."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._group = metrics.router
        self.requests = _bound(self._group.requests, Outcome)
        self.client_gone = {
            outcome: self._group.client_gone.labels(when) for outcome, when in _GONE_WHEN.items()
        }
        self.leg_seconds = {role: self._group.leg_s.labels(role.value) for role in Role}
        self._declare_requests(metrics.registry)
        self._declare_handoffs(metrics.registry)
        self._declare_conversations(metrics.registry)
        self._declare_instances(metrics.registry)

    def _declare_requests(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, buckets=_STEP_BUCKETS_S, registry=registry)
        self._step_s = histogram(
            "kvferry_router_step_seconds", "How long each step of a request took", ["step"]
        )
        self.first_byte_s = histogram(
            "kvferry_router_time_to_first_byte_seconds",
            "From a request's arrival to the first byte of its answer",
        )
        plain = counter(
            "kvferry_router_plain_decodes",
            "Requests run on a decode instance alone, by reason",
            ["reason"],
        )
        self.plain_decodes = _bound(plain, PlainReason)
        retries = counter(
            "kvferry_router_leg_retries", "Legs sent again to another instance", ["leg"]
        )
        self.leg_retries = _bound(retries, Role)
        self._legs_failed = counter(
            "kvferry_router_legs_failed",
            "Legs that an instance failed, by cause",
            ["instance", "leg", "cause"],
        )

    def _declare_handoffs(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        handoffs = counter(
            "kvferry_router_handoffs",
            "Handoffs begun, by mode and by when decode is chosen (early, late, after_prefill)",
            ["mode", "choice"],
        )
        self.pulls = handoffs.labels(Mode.PULL.value, "after_prefill")
        self.pushes = {
            choice: handoffs.labels(Mode.PUSH.value, choice.value) for choice in DecodeChoice
        }
        self.prefills_not_needed = counter(
            "kvferry_router_prefills_not_needed",
            "Pushes whose prefill was ended because decode had all it needed",
        )
        self.credit_waits = counter(
            "kvferry_router_credit_waits",
            "Requests that had to wait for a decode instance to take one more handoff",
        )
        cancels = counter(
            "kvferry_router_transfer_cancels",
            "Handoffs that an instance was to be told to end (result: told, refused, unreachable)",
            ["result"],
        )
        self.cancels_told = cancels.labels("told")
        self.cancels_refused = cancels.labels("refused")
        self.cancels_unreachable = cancels.labels("unreachable")
        self._receives = counter(
            "kvferry_router_receives",
            "Decode legs of handoffs by how they say that their receive has ended",
            ["outcome"],
        )

    def _declare_conversations(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        self._conversations = Gauge(
            "kvferry_router_conversations",
            "Ids and turns of conversations that are remembered",
            registry=registry,
        )
        lookups = counter(
            "kvferry_router_conversation_lookups",
            "Requests by how their conversation was found (id, prefix, miss, stale)",
            ["result"],
        )
        self.conversation_lookups = _bound(lookups, LookupResult)
        choices = counter(
            "kvferry_router_holder_choices",
            "Decode legs of known conversations, by why they went where they did",
            ["choice"],
        )
        self.holder_choices = _bound(choices, HolderChoice)
        self.history_hints = counter(
            "kvferry_router_history_hints",
            "Prefill legs that were told who probably holds blocks of their prompt",
        )

    def _declare_instances(self, registry: CollectorRegistry) -> None:
        gauge = partial(Gauge, registry=registry)
        self._instance_inflight = gauge(
            "kvferry_router_instance_inflight",
            "Legs in flight on an instance",
            ["instance", "role"],
        )
        self._outstanding = gauge(
            "kvferry_router_outstanding_handoffs",
            "Pushes for a decode instance whose prefill is neither admitted nor answered",
            ["instance"],
        )
        self._instance_receives = gauge(
            "kvferry_router_instance_receives",
            "Receives that have ended on an instance since its start, as it tells them itself",
            ["instance", "outcome"],
        )
        self._incompatible_pairs = gauge(
            "kvferry_router_incompatible_pairs",
            "Pairs of a prefill and a decode instance that are known to exchange nothing",
        )

    def leg_failed(self, url: str, role: Role, cause: str) -> None:
        """Count a leg that ``url`` failed; ``cause`` is one of an enumeration."""
        self._legs_failed.labels(url, role.value, cause).inc()

    def receive_ended(self, outcome: str) -> None:
        """Count a decode leg whose receive has ended so."""
        self._receives.labels(_known_receive(outcome)).inc()

    def observe_step(self, step: str, seconds: float) -> None:
        """Record the duration of a named step."""
        self._step_s.labels(step).observe(seconds)

    def render(
        self, fleet: Fleet, credits: HandoffCredits, num_inflight: int, num_conversations: int
    ) -> bytes:
        """Return all metrics as Prometheus' text; gauges are as they stand now."""
        self._group.inflight.set(num_inflight)
        self._conversations.set(num_conversations)
        snapshot = fleet.snapshot()
        views = (*snapshot.prefill, *snapshot.decode)
        self._instance_receives.clear()
        for view in views:
            healthy = 1 if view.health is Health.HEALTHY else 0
            self._group.instance_healthy.labels(view.url, view.role.value).set(healthy)
            self._instance_inflight.labels(view.url, view.role.value).set(view.num_inflight)
            for outcome, count in view.identity.receives.items() if view.identity else ():
                self._instance_receives.labels(view.url, _known_receive(outcome)).set(count)
        decode_urls = {view.url for view in snapshot.decode}
        self._incompatible_pairs.set(
            sum(len(view.apart_from & decode_urls) for view in snapshot.prefill)
        )
        for view in snapshot.decode:
            self._outstanding.labels(view.url).set(credits.num_outstanding(view.url))
        return self._metrics.render()


def _bound(counter: Counter, labels: Iterable[_Label]) -> dict[_Label, Counter]:
    return {label: counter.labels(label.value) for label in labels}


def _known_receive(outcome: str) -> str:
    return outcome if outcome in _RECEIVE_OUTCOMES else "other"
