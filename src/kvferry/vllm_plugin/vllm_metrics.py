"""The plugin's figures among vLLM's own metrics and log lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvferry.vllm_plugin.figures import AMOUNTS, TOTALS, split

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT

_HELP = {
    "receives": "Receives that ended, by outcome; any but received means recompute",
    "transfer_bytes": "KV bytes received",
    "handoffs": "Handoffs that ended at the holder, by outcome",
    "history_leases": "Leases of peers that read a conversation back from here, by outcome",
    "handoffs_held": "Finished prefills held for a reader",
    "leased_blocks": "Blocks that a lease covers",
    "quarantined_blocks": "Blocks that a posted transfer may still touch",
    "retained_blocks": "Blocks kept for a conversation's next turn",
    "blind_links": "Peers on this host whose death could not be proven, and that may write here",
}


class FerryStats(KVConnectorStats):
    """Figures since the start: of two with one name, the later says all."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Forget them."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Keep the later ones; scheduler and worker tell different figures."""
        self.data = {**self.data, **other.data}
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what vLLM writes to its log."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not self.data


class FerryPromMetrics(KVConnectorPromMetrics):
    """The figures in Prometheus' form, with vLLM's labels before our own."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._totals = {
            name: self._counter_cls(f"kvferry_{name}", _HELP[name], [*labelnames, *labels])
            for name, labels in TOTALS.items()
        }
        self._amounts = {
            name: self._gauge_cls(f"kvferry_{name}", _HELP[name], list(labelnames))
            for name in AMOUNTS
        }
        self._seen: dict[tuple[int, str, tuple[str, ...]], float] = {}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Show the figures of one engine."""
        engine = self.per_engine_labelvalues[engine_idx]
        for name, labels, value in split(transfer_stats_data):
            if name in self._amounts:
                self._amounts[name].labels(*engine).set(value)
                continue
            key = (engine_idx, name, labels)
            self._totals[name].labels(*engine, *labels).inc(value - self._seen.get(key, 0))
            self._seen[key] = value
