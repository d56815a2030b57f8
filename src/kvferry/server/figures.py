"""What an instance tells of itself: what ``/metrics`` and ``/kvferry/instance`` show of its state.

Owns how snapshots and totals become metrics and JSON. Knows no request.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import Counter

from kvferry.protocol.prefill_result import PrefillReport

if TYPE_CHECKING:
    # torch is heavy: only building an instance imports it.
    from kvferry.engine.runner import EngineSnapshot
    from kvferry.server.instance import Instance


@dataclass(slots=True)
class ReadBackTotals:
    """What became of read-backs: of prefills that asked a conversation's holder.

    On the event loop only.
    """

    num_tokens: int = 0
    """Prompt tokens that were read back."""
    num_bytes: int = 0
    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    """Read-backs by how they ended."""
    recomputed_tokens: collections.Counter[str] = field(default_factory=collections.Counter)
    """Prompt tokens computed since one failed, by how it ended."""

    def add(self, prefill: PrefillReport) -> None:
        """A prefill has ended that asked a holder."""
        self.num_tokens += prefill.num_read_back_tokens
        self.num_bytes += prefill.num_read_back_bytes
        self.outcomes[prefill.read_back_outcome] += 1
        if prefill.num_recomputed_tokens:
            self.recomputed_tokens[prefill.read_back_outcome] += prefill.num_recomputed_tokens


class InstanceFigures:
    """Shows one instance's state as metrics, and as JSON."""

    def __init__(self, instance: Instance) -> None:
        self.read_backs = ReadBackTotals()
        self._instance = instance
        self._shown: dict[Counter, int] = {}
        """Totals as they were shown last; those that are not here yet were 0."""

    def as_metrics(self) -> bytes:
        """Return all metrics in Prometheus' text form, those of the state as it is now."""
        metrics, now = self._instance.metrics, self._instance.engine.snapshot()
        engine, exchange, pool = metrics.engine, metrics.exchange, now.pool
        engine.num_requests_running.set(now.num_running)
        engine.num_requests_waiting.set(now.num_waiting + now.num_receiving)
        engine.kv_cache_usage_perc.set(1 - pool.num_free / max(1, pool.num_blocks))
        engine.retained_blocks.set(pool.num_retained)
        engine.retained_share.set(_retained_share(now))
        self._advance(engine.num_preemptions, now.num_preemptions)
        self._advance(engine.retained_evicted, pool.num_retained_evicted)
        for reason, total in now.retention_ends.items():
            self._advance(engine.retention_ends.labels(reason), total)
        self._advance(engine.read_back_tokens, self.read_backs.num_tokens)
        for outcome, total in self.read_backs.recomputed_tokens.items():
            self._advance(engine.recomputed_tokens.labels(outcome), total)
        held = self._instance.exchange.port.snapshot()
        exchange.handoffs_held.set(held.num_handoffs_held)
        exchange.leased_blocks.set(held.num_blocks_leased)
        exchange.quarantined_blocks.set(held.num_blocks_quarantined)
        exchange.resting_peers.set(held.num_peers_resting)
        exchange.blind_links.set(self._instance.transport.num_blind_links())
        return metrics.render()

    def as_json(self) -> dict[str, Any]:
        """Return who this is, as the control port tells it, with the load beside it."""
        exchange, now = self._instance.exchange, self._instance.engine.snapshot()
        info = exchange.info()
        shown = {
            "fingerprint": info.fingerprint.hex(),
            # Not the key: who has another one is told by this where it is.
            "user_key": self._instance.config.exchange.user_key_file,
            "num_requests_running": now.num_running,
            "num_requests_waiting": now.num_waiting + now.num_receiving,
            "retained": {
                "num_conversations": now.num_conversations,
                "num_blocks": now.pool.num_retained,
                "share": _retained_share(now),
                "num_evicted": now.pool.num_retained_evicted,
                "ends": now.retention_ends,
            },
            "read_back": self.read_backs,
            "exchange": exchange.port.snapshot(),
        }
        result: dict[str, Any] = msgspec.to_builtins(info, builtin_types=(bytes,))
        return result | {name: msgspec.to_builtins(value) for name, value in shown.items()}

    def _advance(self, counter: Counter, total: int) -> None:
        """Show ``total``, which never goes down."""
        counter.inc(total - self._shown.get(counter, 0))
        self._shown[counter] = total


def _retained_share(now: EngineSnapshot) -> float:
    return now.pool.num_retained / max(1, now.pool.num_blocks)
