"""Every Prometheus metric of kvferry, declared once.

A process exposes only the groups that it uses: a group registers when it is first asked for. There
is no registry outside the one that ``Metrics`` is given. Names that vLLM has too mean the same.
"""

from __future__ import annotations

import threading

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
"""HTTP content type of ``Metrics.render``."""

_FIRST_TOKEN_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5,
    1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0,
)  # fmt: skip
_TOKEN_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3,
    0.5, 1.0, 2.5, 5.0,
)  # fmt: skip
_REQUEST_BUCKETS_S = (
    0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 900.0,
)  # fmt: skip
_TRANSFER_BUCKETS_S = (
    0.0005, 0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
    30.0,
)  # fmt: skip


class EngineMetrics:
    """One engine: requests, tokens, time."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.num_requests_running = Gauge(
            "kvferry_num_requests_running", "Requests in the running batch", registry=registry
        )
        self.num_requests_waiting = Gauge(
            "kvferry_num_requests_waiting", "Requests that wait for admission", registry=registry
        )
        self.kv_cache_usage_perc = Gauge(
            "kvferry_kv_cache_usage_perc", "Share of the blocks in use; 1 is all", registry=registry
        )
        self.prompt_tokens = Counter(
            "kvferry_prompt_tokens", "Prompt tokens of admitted requests", registry=registry
        )
        self.generation_tokens = Counter(
            "kvferry_generation_tokens", "Tokens generated", registry=registry
        )
        self.num_preemptions = Counter(
            "kvferry_num_preemptions", "Requests that gave up their blocks", registry=registry
        )
        self.request_success = Counter(
            "kvferry_request_success",
            "Requests that ended, by finish reason",
            ["finished_reason"],
            registry=registry,
        )
        self._declare_reuse(registry)
        self._declare_retention(registry)
        self._declare_times(registry)

    def _declare_reuse(self, registry: CollectorRegistry) -> None:
        self.read_back_tokens = Counter(
            "kvferry_read_back_tokens",
            "Prompt tokens whose KV was read from an instance that had it",
            registry=registry,
        )
        self.recomputed_tokens = Counter(
            "kvferry_recomputed_tokens",
            "Prompt tokens computed because a read-back failed (reason: gone, expired, declined, "
            "unreachable, slow, mismatch, incompatible, failed, corrupt)",
            ["reason"],
            registry=registry,
        )

    def _declare_retention(self, registry: CollectorRegistry) -> None:
        self.retained_blocks = Gauge(
            "kvferry_retained_blocks", "Blocks retained for a later turn", registry=registry
        )
        self.retained_share = Gauge(
            "kvferry_retained_share", "The same as a share of the pool; 1 is all", registry=registry
        )
        self.retained_evicted = Counter(
            "kvferry_retained_evicted",
            "Retained blocks reused because no other block was free",
            registry=registry,
        )
        self.retention_ends = Counter(
            "kvferry_retention_ends",
            "Conversations retained no longer "
            "(reason: expired, superseded, ended, cap, evicted, reset)",
            ["reason"],
            registry=registry,
        )

    def _declare_times(self, registry: CollectorRegistry) -> None:
        self.time_to_first_token_s = Histogram(
            "kvferry_time_to_first_token_seconds",
            "From a request's arrival to its first token",
            buckets=_FIRST_TOKEN_BUCKETS_S,
            registry=registry,
        )
        self.inter_token_latency_s = Histogram(
            "kvferry_inter_token_latency_seconds",
            "From one token of a request to its next",
            buckets=_TOKEN_BUCKETS_S,
            registry=registry,
        )
        self.e2e_request_latency_s = Histogram(
            "kvferry_e2e_request_latency_seconds",
            "From a request's arrival to its end",
            buckets=_REQUEST_BUCKETS_S,
            registry=registry,
        )


class ExchangeMetrics:
    """One instance's part in moving KV, as holder and as reader."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._declare_moves(registry)
        self._declare_holds(registry)
        self._declare_control(registry)

    def _declare_moves(self, registry: CollectorRegistry) -> None:
        self.receives = Counter(
            "kvferry_receives",
            "Receives that ended, by outcome; any but received means recompute",
            ["mode", "outcome"],
            registry=registry,
        )
        self.transfer_bytes = Counter(
            "kvferry_transfer_bytes",
            "KV bytes moved (direction: in, out)",
            ["direction", "mode"],
            registry=registry,
        )
        self.transfer_s = Histogram(
            "kvferry_transfer_seconds",
            "From asking for a read, or hearing of a push's first WRITE, to the end",
            ["mode"],
            buckets=_TRANSFER_BUCKETS_S,
            registry=registry,
        )

        self.verified_blocks = Counter(
            "kvferry_verified_blocks",
            "With --verify-transfers, blocks received by whether their digests were compared "
            "(result: compared, not_told by a peer without the option)",
            ["result"],
            registry=registry,
        )

    def _declare_holds(self, registry: CollectorRegistry) -> None:
        self.handoffs_held = Gauge(
            "kvferry_handoffs_held", "Finished prefills held for a reader", registry=registry
        )
        self.leased_blocks = Gauge(
            "kvferry_leased_blocks", "Blocks that a lease covers", registry=registry
        )
        self.quarantined_blocks = Gauge(
            "kvferry_quarantined_blocks",
            "Blocks that a posted transfer may still touch",
            registry=registry,
        )
        self.blind_links = Gauge(
            "kvferry_blind_links",
            "Peers on this host that may write here and whose death could not be proven: what they "
            "might touch would stay in quarantine",
            registry=registry,
        )
        self.resting_peers = Gauge(
            "kvferry_resting_peers",
            "Peers lost a moment ago and not tried again yet",
            registry=registry,
        )
        self.handoffs = Counter(
            "kvferry_handoffs",
            "Handoffs that ended at the holder "
            "(outcome: read, expired, cancelled, not_needed, pressure, failed)",
            ["outcome"],
            registry=registry,
        )

        self.history_leases = Counter(
            "kvferry_history_leases",
            "Leases of peers that read a conversation back from here "
            "(outcome: read, expired, cancelled, failed, not_needed, replaced)",
            ["outcome"],
            registry=registry,
        )

    def _declare_control(self, registry: CollectorRegistry) -> None:
        self.dropped_events = Counter(
            "kvferry_dropped_events",
            "What a peer, a transfer or a clock said of a transfer in a state that has no rule for "
            "it; it changed nothing",
            ["role", "event"],
            registry=registry,
        )
        self.control_malformed = Counter(
            "kvferry_control_malformed",
            "Control messages dropped as malformed",
            ["reason"],
            registry=registry,
        )
        self.control_requests = Counter(
            "kvferry_control_requests",
            "Control requests answered, by message type and result",
            ["type", "result"],
            registry=registry,
        )
        self.unsigned_params = Counter(
            "kvferry_unsigned_params",
            "Requests whose kv_transfer_params were ignored: signature absent or wrong",
            registry=registry,
        )


class RouterMetrics:
    """One router."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "kvferry_router_requests",
            "Requests that ended, by outcome",
            ["outcome"],
            registry=registry,
        )
        self.inflight = Gauge(
            "kvferry_router_inflight", "Requests being answered", registry=registry
        )
        self.leg_s = Histogram(
            "kvferry_router_leg_seconds",
            "How long one leg of a request took (leg: prefill, decode)",
            ["leg"],
            buckets=_REQUEST_BUCKETS_S,
            registry=registry,
        )
        self.instance_healthy = Gauge(
            "kvferry_router_instance_healthy",
            "1 while an instance answers its health check, else 0",
            ["instance", "role"],
            registry=registry,
        )
        self.client_gone = Counter(
            "kvferry_router_client_gone",
            "Clients that left before the end of their answer, by the leg they left in",
            ["when"],
            registry=registry,
        )


class Metrics:
    """The metrics of one process, by group. Thread-safe."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self._lock = threading.Lock()
        self._engine: EngineMetrics | None = None
        self._exchange: ExchangeMetrics | None = None
        self._router: RouterMetrics | None = None

    @property
    def engine(self) -> EngineMetrics:
        """Requests, tokens and time of an engine."""
        with self._lock:
            if self._engine is None:
                self._engine = EngineMetrics(self.registry)
            return self._engine

    @property
    def exchange(self) -> ExchangeMetrics:
        """KV moved, held and refused by an instance."""
        with self._lock:
            if self._exchange is None:
                self._exchange = ExchangeMetrics(self.registry)
            return self._exchange

    @property
    def router(self) -> RouterMetrics:
        """Requests and instances of a router."""
        with self._lock:
            if self._router is None:
                self._router = RouterMetrics(self.registry)
            return self._router

    def render(self) -> bytes:
        """Return the text exposition of the groups in use, for ``GET /metrics``."""
        return generate_latest(self.registry)
