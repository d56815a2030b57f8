"""``FerryConnector``: vLLM's connector interface over the plugin's two halves.

Nothing is decided here. vLLM makes one object in the scheduler's process and one in each worker's;
a hook that belongs to the other half is never called.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterable, Sequence
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
from vllm.v1.request import RequestStatus

from kvferry.clock import SystemClock
from kvferry.errors import LocalProtocolError
from kvferry.observe.log import ROOT_LOGGER_NAME, configure_logging
from kvferry.vllm_plugin.adapters import AdapterContents
from kvferry.vllm_plugin.compat import check_engine, check_version
from kvferry.vllm_plugin.engine_facts import (
    lora_kind,
    read_compatibility,
    read_facts,
    read_layout,
    read_rank,
    read_regions,
)
from kvferry.vllm_plugin.figures import ChangedFigures, ReceiveFigures
from kvferry.vllm_plugin.worker_link import OrderClient
from kvferry.vllm_plugin.orders import StepOrders, StepReport, WorkerHello
from kvferry.vllm_plugin.ranks import RankOrders, RankPins, RankReports, check_hellos
from kvferry.vllm_plugin.retention import OrderSender
from kvferry.vllm_plugin.scheduler_half import SchedulerHalf
from kvferry.vllm_plugin.settings import parse_settings
from kvferry.vllm_plugin.request_state import StepFacts
from kvferry.vllm_plugin.vllm_metrics import FerryPromMetrics, FerryStats
from kvferry.vllm_plugin.worker_half import WorkerHalf

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
        PromMetric,
        PromMetricT,
    )
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
        facts = read_facts(vllm_config, kv_cache_config)
        check_engine(facts)
        transfer = self._kv_transfer_config
        self._settings = parse_settings(transfer.kv_connector_extra_config)
        self._settings.check_ports(facts.tensor_parallel_size)
        self._engine_id = str(transfer.engine_id)
        self._block_size = facts.block_size_tokens
        self._worker_half: WorkerHalf | None = None
        self._scheduler_half: SchedulerHalf | None = None
        self._adapters = AdapterContents(lora_kind(vllm_config))
        self._rank = 0
        self._clients: list[OrderClient] = []
        self._rank_reports: RankReports | None = None
        self._receives = ReceiveFigures()
        self._changed_receives = ChangedFigures()
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler_half = SchedulerHalf(
                self._settings, self._block_size, SystemClock(), self._adapters
            )

    # -- worker's process ---------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Start the exchange beside the memory."""
        rank = read_rank(self._vllm_config)
        regions = read_regions(kv_caches, self._kv_cache_config)
        layout = read_layout(self._vllm_config, self._kv_cache_config, kv_caches, regions, rank)
        compatibility = read_compatibility(self._vllm_config, self._kv_cache_config, kv_caches)
        config = self._settings.exchange_config(self._engine_id, rank)
        self._rank = rank.rank
        self._worker_half = WorkerHalf(config, self._settings, layout, compatibility, regions)

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
        return self._worker.take_unfilled_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Send the step's report to the scheduler half."""
        report = self._worker.report()
        return FerryReport({self._rank: report}) if report is not None else None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Send the figures on their way to vLLM's metrics, when they have changed."""
        if self._worker_half is None:
            values = self._changed_receives.take(self._receives.values())
        else:
            values = self._worker_half.take_figures()
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
        if self._worker_half is not None:
            self._worker_half.close()
        for client in self._clients:
            client.close()

    @property
    def _worker(self) -> WorkerHalf:
        if self._worker_half is None:
            raise LocalProtocolError("a worker's hook before register_kv_caches")
        return self._worker_half

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
        hellos = []
        for _, handshake in sorted(metadata.items()):
            if not isinstance(handshake, FerryHandshake):
                raise LocalProtocolError("the worker half belongs to another connector")
            hellos.append(handshake.hello)
        check_hellos(hellos)
        self._clients = [OrderClient(hello.orders_path) for hello in hellos]
        orders: OrderSender = self._clients[0]
        if len(hellos) > 1:
            pins = RankPins(len(hellos))
            orders = RankOrders(self._clients, pins)
            self._rank_reports = RankReports(len(hellos), pins, self._scheduler.is_tracked)
        self._scheduler.join(hellos[0], orders, self._manager.block_pool, self._block_ids)

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
        preempted = frozenset(scheduler_output.preempted_req_ids or ())
        facts = StepFacts(scheduler_output.num_scheduled_tokens, preempted)
        return FerryStep(self._scheduler.plan_step(facts))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take in a step's report."""
        metadata = connector_output.kv_connector_worker_meta
        if not isinstance(metadata, FerryReport):
            return
        if self._rank_reports is None:
            report = metadata.reports[0]
        else:
            report = self._rank_reports.join(metadata.reports)
        self._receives.count(report.ends)
        self._scheduler.note_step_done(report)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See ``request_finished_all_groups``."""
        return self._finish(request, block_ids)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Hand over, or retain, the blocks of a request that has ended.

        Always False: references of our own keep what is wanted of them.
        """
        return self._finish(request, block_ids[0])

    def reset_cache(self) -> bool:
        """Keep nothing that may be given to a peer. A reset of vLLM's own cache has done it too."""
        self._scheduler.forget_content()
        return True

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """A handoff brings the whole prompt, and there is one group."""
        return (0,)

    def _finish(
        self, request: Request, block_ids: Iterable[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        kept = list(block_ids) if _is_tokens_only(request) else []
        ended_well = request.status in _ENDED_WELL
        return False, self._scheduler.finish(request, kept, ended_well=ended_well)

    def _block_ids(self, request_id: str) -> Sequence[int]:
        block_ids: Sequence[int] = self._manager.get_block_ids(request_id)[0]
        return block_ids

    @property
    def _scheduler(self) -> SchedulerHalf:
        if self._scheduler_half is None:
            raise LocalProtocolError("a scheduler's hook in a worker's process")
        return self._scheduler_half


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
