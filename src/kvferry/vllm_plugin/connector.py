"""``FerryConnector``: vLLM's connector interface over the plugin's two halves, and its metrics.

Nothing is decided here. vLLM makes one object in the scheduler's process and one in each worker's;
a hook that belongs to the other half is never called.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.request import RequestStatus

from kvferry.clock import SystemClock
from kvferry.errors import LocalProtocolError
from kvferry.observe.log import ROOT_LOGGER_NAME, configure_logging
from kvferry.vllm_plugin.adapters import AdapterContents
from kvferry.vllm_plugin.engine_facts import (
    check_engine,
    check_version,
    lora_kind,
    read_memory,
    read_rank,
)
from kvferry.vllm_plugin.orders import (
    FIGURES,
    ChangedFigures,
    FigureValues,
    StepOrders,
    StepReport,
    WorkerHello,
    split_figures,
)
from kvferry.vllm_plugin.scheduler_half import SchedulerHalf
from kvferry.vllm_plugin.settings import parse_settings
from kvferry.vllm_plugin.worker_half import WorkerHalf
from kvferry.vllm_plugin.worker_link import Workers

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_ENDED_WELL = frozenset({RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED})


@dataclass
class FerryStep(KVConnectorMetadata):
    """One step's orders, as vLLM carries them."""

    orders: StepOrders


@dataclass
class FerryReport(KVConnectorWorkerMetadata):
    """One step's reports by rank, as vLLM carries them."""

    reports: dict[int, StepReport] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Put the reports of several workers together."""
        if not isinstance(other, FerryReport):
            raise LocalProtocolError("a report of another connector's worker")
        return FerryReport({**self.reports, **other.reports})


@dataclass
class FerryHandshake(KVConnectorHandshakeMetadata):
    """Who the worker half is, as vLLM carries it."""

    hello: WorkerHello


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
        self._metrics = {
            name: (self._counter_cls if labels else self._gauge_cls)(
                f"kvferry_{name}", help_text, [*labelnames, *labels]
            )
            for name, (help_text, labels) in FIGURES.items()
        }
        self._seen: dict[tuple[int, str, tuple[str, ...]], float] = {}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Show the figures of one engine."""
        engine = self.per_engine_labelvalues[engine_idx]
        for name, labels, value in split_figures(transfer_stats_data):
            metric = self._metrics[name].labels(*engine, *labels)
            if not labels:
                metric.set(value)
                continue
            key = (engine_idx, name, tuple(labels))
            metric.inc(value - self._seen.get(key, 0))
            self._seen[key] = value


class FerryConnector(KVConnectorBase_V1, SupportsHMA):
    """Moves KV between instances by pull, by push and by read-back. Raises ``ConfigError`` for a
    configuration that is not supported."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_beside_vllm()
        _be_known_by_name()
        check_version(vllm.__version__)
        check_engine(vllm_config, kv_cache_config)
        self._settings = parse_settings(self._kv_transfer_config.kv_connector_extra_config)
        self._settings.check_ports(vllm_config.parallel_config.tensor_parallel_size)
        self._adapters = AdapterContents(lora_kind(vllm_config))
        self._figures: Callable[[], FigureValues] = dict
        """Those of whichever half this process has."""
        self._changed_figures = ChangedFigures()
        self._opened = contextlib.ExitStack()

    # -- worker's process ---------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Start the exchange beside the memory."""
        rank = read_rank(self._vllm_config)
        regions, layout, compatibility = read_memory(
            self._vllm_config, self._kv_cache_config, kv_caches, rank
        )
        config = self._settings.exchange_config(str(self._kv_transfer_config.engine_id), rank)
        self._rank = rank.rank
        self._worker = WorkerHalf(config, self._settings, layout, compatibility, regions)
        self._opened.callback(self._worker.close)
        self._figures = self._worker.figures

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Tell the scheduler half where its orders go."""
        return FerryHandshake(self._worker.hello)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: object) -> None:
        """Note which requests are parked; the transfers themselves have begun already."""
        metadata = self._get_connector_metadata()
        if isinstance(metadata, FerryStep):
            self._worker.begin_step(metadata.orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded while a forward runs."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: object,
    ) -> None:
        """Nothing is saved while a forward runs."""

    def wait_for_save(self) -> None:
        """Nothing is saved while a forward runs."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Tell which parked requests may go on, and which of them compute their prompt."""
        ends = self._worker.take_ends(finished_req_ids)
        return KVConnectorTransferResults(
            finished_recving=ends.finished, failed_recving=ends.failed
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Tell which blocks of a read-back the holder did not have."""
        return self._worker.unfilled_blocks

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Send the step's report to the scheduler half."""
        report = self._worker.report()
        return FerryReport({self._rank: report}) if report is not None else None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Send the figures on their way to vLLM's metrics, when they have changed."""
        values = self._changed_figures.take(self._figures())
        return FerryStats(data=dict(values)) if values else None

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Make figures of what was sent."""
        return FerryStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """Show the figures among vLLM's metrics."""
        _be_known_by_name()
        return FerryPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """End what this process has of the exchange."""
        self._opened.close()

    # -- scheduler's process ------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Keep vLLM's cache manager: its pool counts our references.

        A reset of its cache says no while a block has a reference, and no hook comes before it. So
        on this one object it lets go of ours first.
        """
        super().bind_kv_cache_manager(kv_cache_manager)
        self._manager = kv_cache_manager
        reset = kv_cache_manager.reset_prefix_cache

        def forget_and_reset() -> bool:
            self._scheduler.forget_content()
            is_reset = bool(reset())
            if is_reset:
                self._adapters.note_cache_reset()
            return is_reset

        kv_cache_manager.reset_prefix_cache = forget_and_reset

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Connect to the worker halves, by rank."""
        handshakes = [handshake for _, handshake in sorted(metadata.items())]
        if not all(isinstance(handshake, FerryHandshake) for handshake in handshakes):
            raise LocalProtocolError("the worker half belongs to another connector")
        workers = Workers.connect([handshake.hello for handshake in handshakes])
        self._opened.callback(workers.close)
        self._scheduler = SchedulerHalf(
            self._settings, self._adapters, workers, self._manager, SystemClock()
        )
        self._figures = self._scheduler.figures

    def on_new_request(self, request: Request) -> None:
        """Let the peer of a new request know."""
        self._scheduler.add(request, is_supported=_is_tokens_only(request))

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tell how many tokens a peer is to fill; None: ask again."""
        count = self._scheduler.count_external(request, num_computed_tokens)
        return count, bool(count)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Have a peer fill the blocks, or let it go."""
        block_ids = blocks.get_block_ids()[0]
        self._scheduler.note_allocated(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Send a step's orders to the worker half."""
        preempted = scheduler_output.preempted_req_ids or ()
        return FerryStep(
            self._scheduler.plan_step(scheduler_output.num_scheduled_tokens, preempted)
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take in a step's reports."""
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, FerryReport):
            self._scheduler.note_step_done(metadata.reports)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See ``request_finished_all_groups``."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Hand over, or retain, the blocks of a request that has ended.

        Always False: references of our own keep what is wanted of them.
        """
        kept = list(block_ids[0]) if _is_tokens_only(request) else []
        ended_well = request.status in _ENDED_WELL
        return False, self._scheduler.finish(request, kept, ended_well=ended_well)

    def reset_cache(self) -> bool:
        """Keep nothing that may be given to a peer. A reset of vLLM's own cache has done it too."""
        self._scheduler.forget_content()
        return True

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """A handoff brings the whole prompt, and there is one group."""
        return (0,)


def _log_beside_vllm() -> None:
    """Write kvferry's lines where vLLM writes its own, unless someone has said otherwise."""
    if not logging.getLogger(ROOT_LOGGER_NAME).handlers:
        configure_logging("info", stream=sys.stderr)


def _be_known_by_name() -> None:
    """Have vLLM find the class by its name alone, as ``MultiConnector`` does with figures, in each
    process in which they pass."""
    with contextlib.suppress(ValueError):  # It is known already.
        KVConnectorFactory.register_connector(
            FerryConnector.__name__, FerryConnector.__module__, FerryConnector.__name__
        )


def _is_tokens_only(request: Request) -> bool:
    return not request.mm_features and request.prompt_embeds is None
