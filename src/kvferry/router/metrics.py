"""What the router counts: the ``observe`` group of routers, and the figures of its own steps.

Labels hold only configured or enumerated values, never anything from a client.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvferry.observe.metrics import CONTENT_TYPE, Metrics
from kvferry.protocol.params import Mode, Role
from kvferry.router.config import DecodeChoice
from kvferry.router.fleet.registry import Fleet, Health
from kvferry.router.history.recall import LookupResult
from kvferry.router.request.context import Outcome
from kvferry.router.request.credits import HandoffCredits
from kvferry.router.request.decider import PlainReason
from kvferry.router.request.preference import HolderChoice

__all__ = ["CONTENT_TYPE", "RouterFigures"]

_STEP_BUCKETS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
_RECEIVE_OUTCOMES = frozenset(
    ("received", "gone", "expired", "declined", "mismatch", "incompatible", "unreachable", "slow")
    + ("failed", "corrupt")
)
"""What an instance may say; anything else is another release's."""
_GONE_WHEN = {
    Outcome.CLIENT_GONE_BEFORE_PREFILL_DONE: "before_prefill_done",
    Outcome.CLIENT_GONE_AFTER_PREFILL: "after_prefill",
    Outcome.CLIENT_GONE_STREAMING: "streaming",
}


class RouterFigures:
    """All metrics of one router, their label values bound once."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._group = metrics.router
        self.requests = {outcome: self._group.requests.labels(outcome.value) for outcome in Outcome}
        self.client_gone = {
            outcome: self._group.client_gone.labels(when) for outcome, when in _GONE_WHEN.items()
        }
        self.leg_seconds = {role: self._group.leg_s.labels(role.value) for role in Role}
        self._declare_legs(metrics.registry)
        self._declare_handoffs(metrics.registry)
        self._declare_receives(metrics.registry)
        self._declare_conversations(metrics.registry)
        self._declare_times(metrics.registry)

    def _declare_legs(self, registry: CollectorRegistry) -> None:
        plain = Counter(
            "kvferry_router_plain_decodes",
            "Requests run on a decode instance alone, by reason",
            ["reason"],
            registry=registry,
        )
        self.plain_decodes = {reason: plain.labels(reason.value) for reason in PlainReason}
        retries = Counter(
            "kvferry_router_leg_retries",
            "Legs sent again to another instance",
            ["leg"],
            registry=registry,
        )
        self.leg_retries = {role: retries.labels(role.value) for role in Role}
        self._legs_failed = Counter(
            "kvferry_router_legs_failed",
            "Legs that an instance failed, by cause",
            ["instance", "leg", "cause"],
            registry=registry,
        )

    def _declare_handoffs(self, registry: CollectorRegistry) -> None:
        handoffs = Counter(
            "kvferry_router_handoffs",
            "Handoffs begun, by mode and by when decode is chosen (early, late, after_prefill)",
            ["mode", "choice"],
            registry=registry,
        )
        self.pulls = handoffs.labels(Mode.PULL.value, "after_prefill")
        self.pushes = {
            choice: handoffs.labels(Mode.PUSH.value, choice.value) for choice in DecodeChoice
        }
        self.prefills_not_needed = Counter(
            "kvferry_router_prefills_not_needed",
            "Pushes whose prefill was ended because decode had all it needed",
            registry=registry,
        )
        self.credit_waits = Counter(
            "kvferry_router_credit_waits",
            "Requests that had to wait for a decode instance to take one more handoff",
            registry=registry,
        )
        cancels = Counter(
            "kvferry_router_transfer_cancels",
            "Handoffs that an instance was to be told to end (result: told, refused, unreachable)",
            ["result"],
            registry=registry,
        )
        self.cancels_told = cancels.labels("told")
        self.cancels_refused = cancels.labels("refused")
        self.cancels_unreachable = cancels.labels("unreachable")

    def _declare_receives(self, registry: CollectorRegistry) -> None:
        self._receives = Counter(
            "kvferry_router_receives",
            "Decode legs of handoffs by how they say that their receive has ended",
            ["outcome"],
            registry=registry,
        )
        self._instance_receives = Gauge(
            "kvferry_router_instance_receives",
            "Receives that have ended on an instance since its start, as it tells them itself",
            ["instance", "outcome"],
            registry=registry,
        )
        self._incompatible_pairs = Gauge(
            "kvferry_router_incompatible_pairs",
            "Pairs of a prefill and a decode instance that are known to exchange nothing",
            registry=registry,
        )

    def _declare_conversations(self, registry: CollectorRegistry) -> None:
        self._conversations = Gauge(
            "kvferry_router_conversations",
            "Ids and turns of conversations that are remembered",
            registry=registry,
        )
        lookups = Counter(
            "kvferry_router_conversation_lookups",
            "Requests by how their conversation was found (id, prefix, miss, stale)",
            ["result"],
            registry=registry,
        )
        self.conversation_lookups = {
            result: lookups.labels(result.value) for result in LookupResult
        }
        choices = Counter(
            "kvferry_router_holder_choices",
            "Decode legs of known conversations, by why they went where they did",
            ["choice"],
            registry=registry,
        )
        self.holder_choices = {choice: choices.labels(choice.value) for choice in HolderChoice}
        self.history_hints = Counter(
            "kvferry_router_history_hints",
            "Prefill legs that were told who probably holds blocks of their prompt",
            registry=registry,
        )

    def _declare_times(self, registry: CollectorRegistry) -> None:
        self._step_s = Histogram(
            "kvferry_router_step_seconds",
            "How long each step of a request took",
            ["step"],
            buckets=_STEP_BUCKETS_S,
            registry=registry,
        )
        self.first_byte_s = Histogram(
            "kvferry_router_time_to_first_byte_seconds",
            "From a request's arrival to the first byte of its answer",
            buckets=_STEP_BUCKETS_S,
            registry=registry,
        )
        self._instance_inflight = Gauge(
            "kvferry_router_instance_inflight",
            "Legs in flight on an instance",
            ["instance", "role"],
            registry=registry,
        )
        self._outstanding = Gauge(
            "kvferry_router_outstanding_handoffs",
            "Pushes for a decode instance whose prefill is neither admitted nor answered",
            ["instance"],
            registry=registry,
        )
        self._steps: dict[str, Histogram] = {}

    def leg_failed(self, url: str, role: Role, cause: str) -> None:
        """Count a leg that ``url`` failed; ``cause`` is one of an enumeration."""
        self._legs_failed.labels(url, role.value, cause).inc()

    def receive_ended(self, outcome: str) -> None:
        """Count a decode leg whose receive has ended so."""
        known = outcome if outcome in _RECEIVE_OUTCOMES else "other"
        self._receives.labels(known).inc()

    def observe_step(self, step: str, seconds: float) -> None:
        """Record the duration of a named step."""
        bound = self._steps.get(step)
        if bound is None:
            bound = self._steps[step] = self._step_s.labels(step)
        bound.observe(seconds)

    def render(
        self, fleet: Fleet, credits: HandoffCredits, num_inflight: int, num_conversations: int
    ) -> bytes:
        """Return all metrics as Prometheus' text; gauges are as they stand now."""
        self._group.inflight.set(num_inflight)
        self._conversations.set(num_conversations)
        snapshot = fleet.snapshot()
        for view in (*snapshot.prefill, *snapshot.decode):
            healthy = 1 if view.health is Health.HEALTHY else 0
            self._group.instance_healthy.labels(view.url, view.role.value).set(healthy)
            self._instance_inflight.labels(view.url, view.role.value).set(view.num_inflight)
        decode_urls = {view.url for view in snapshot.decode}
        self._incompatible_pairs.set(
            sum(len(view.apart_from & decode_urls) for view in snapshot.prefill)
        )
        self._instance_receives.clear()
        for view in {view.url: view for view in (*snapshot.prefill, *snapshot.decode)}.values():
            for outcome, count in view.identity.receives.items() if view.identity else ():
                known = outcome if outcome in _RECEIVE_OUTCOMES else "other"
                self._instance_receives.labels(view.url, known).set(count)
        for view in snapshot.decode:
            self._outstanding.labels(view.url).set(credits.num_outstanding(view.url))
        return self._metrics.render()
