"""The worker half: the exchange beside the KV memory, and what it tells vLLM after each step.

Owns the transport, the exchange and the socket that orders come by. ``report`` is called on vLLM's
worker thread in every step; all else happens on the exchange's own threads, whether or not the
engine steps.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.clock import SystemClock
from kvferry.connector.config import ExchangeConfig, is_loopback
from kvferry.connector.exchange import Exchange, ExchangeMemory
from kvferry.observe.log import get_logger
from kvferry.observe.metrics import Metrics
from kvferry.protocol.compatibility import Compatibility
from kvferry.protocol.ids import RequestId
from kvferry.protocol.layout import KVLayout
from kvferry.transport.base import MemoryRegion, Transport
from kvferry.transport.registry import create_transport
from kvferry.vllm_plugin.order_executor import OrderExecutor
from kvferry.vllm_plugin.figures import ChangedFigures, FigureValues, exchange_figures
from kvferry.vllm_plugin.worker_link import OrderServer
from kvferry.vllm_plugin.orders import (
    FillEnd,
    Load,
    PartialFill,
    StepOrders,
    StepReport,
    WorkerHello,
)
from kvferry.vllm_plugin.pins import PinnedBlocks
from kvferry.vllm_plugin.settings import PluginSettings

IDLE_STEP_S = 0.002
"""How long a step without a forward waits for an end: vLLM steps on and on while a request is
parked, and would keep the exchange's threads from a core."""
_log = get_logger(__name__)


@dataclass(slots=True)
class StepEnds:
    """What vLLM is told of parked requests after a step."""

    finished: set[str] = field(default_factory=set)
    """Failed ones included."""
    failed: set[str] = field(default_factory=set)
    unfilled_blocks: set[int] = field(default_factory=set)
    """Of requests that were not filled to the end, a partial block among them: vLLM counts in whole
    blocks, and what is in it is added after that."""
    partials: list[PartialFill] = field(default_factory=list)


class ParkedRequests:
    """Which requests vLLM has parked, and how filling ended; each is told once. Worker's thread."""

    def __init__(self) -> None:
        self._loads: dict[RequestId, Load] = {}
        self._early: dict[RequestId, FillEnd] = {}

    @property
    def num_parked(self) -> int:
        """Requests whose end is awaited."""
        return len(self._loads)

    def add(self, loads: Sequence[Load]) -> None:
        """vLLM has parked these."""
        self._loads.update({load.request_id: load for load in loads})

    def note(self, ends: Sequence[FillEnd]) -> None:
        """Filling has ended for these; vLLM may not have said yet that it parked them."""
        self._early.update({end.request_id: end for end in ends})

    def take(self, ended_requests: set[str]) -> StepEnds:
        """Return what to tell vLLM; ``ended_requests`` were aborted, and their blocks wait.

        The exchange has references of its own on what a transfer may still touch.
        """
        told = StepEnds()
        for request_id in [r for r in self._loads if r in ended_requests or r in self._early]:
            load = self._loads.pop(request_id)
            end = self._early.pop(request_id, None)
            told.finished.add(request_id)
            if end is None or request_id in ended_requests:
                continue
            if not end.is_received:
                told.failed.add(request_id)
            told.unfilled_blocks.update(load.blocks[end.num_blocks :] if end.is_received else ())
            if end.num_partial_tokens:
                told.partials.append(
                    PartialFill(request_id, end.num_blocks, end.num_partial_tokens)
                )
        for ended in ended_requests:
            self._early.pop(RequestId(ended), None)
        return told


class WorkerHalf:
    """Made once vLLM's KV memory is there. Threads run from then on, until ``close``."""

    def __init__(
        self,
        config: ExchangeConfig,
        settings: PluginSettings,
        layout: KVLayout,
        compatibility: Compatibility,
        regions: Sequence[MemoryRegion],
    ) -> None:
        self._event = threading.Event()
        self._parked = ParkedRequests()
        self._ends = StepEnds()
        self._new_ends: tuple[FillEnd, ...] = ()
        self._new_admitted: tuple[RequestId, ...] = ()
        self._figures = ChangedFigures()
        self._rank = layout.tensor_parallel_rank
        self._orders = StepOrders(0)
        self._pins = PinnedBlocks(regions[0].num_blocks)
        with contextlib.ExitStack() as parts:
            transport = _create_transport(config, settings)
            parts.callback(transport.close)
            transport.register(list(regions))
            memory = ExchangeMemory(self._pins, layout, transport, regions, compatibility)
            exchange = Exchange(config, memory, SystemClock(), Metrics().exchange)
            parts.callback(exchange.close)
            self._exchange = exchange
            self._transport = transport
            self._executor = OrderExecutor(exchange.port, self._pins, self._event.set, self._rank)
            self._server = OrderServer(self._executor.obey)
            parts.callback(self._server.close)
            exchange.start(self._event.set)
            self._parts = parts.pop_all()
        self.hello = WorkerHello(
            exchange.address, layout.fingerprint(), self._pins.num_blocks, self._server.path
        )
        _log.info("instance %s, epoch %d, answers on %s", *_shown(self.hello))
        _log.info("the control port takes %s", config.key_text)

    def begin_step(self, orders: StepOrders) -> None:
        """vLLM begins a step. Raises ``EngineError``, which ends vLLM's engine with all requests,
        if orders are not obeyed any more: else what it has parked would wait for ever."""
        self._server.check()
        self._orders = orders
        self._pins.note_pool(orders.pool)
        self._parked.add(orders.loads)

    def take_ends(self, ended_requests: set[str]) -> StepEnds:
        """Return what to tell vLLM of parked requests; a step with nothing else to do waits."""
        self._collect()
        ends = self._parked.take(ended_requests)
        waits = self._parked.num_parked > 0 or self._orders.is_waiting
        if waits and not (ends.finished or self._orders.has_forward):
            self._event.wait(IDLE_STEP_S)
            self._collect()
            ends = self._parked.take(set())
        self._ends = ends
        return ends

    def take_unfilled_blocks(self) -> set[int]:
        """Return the blocks of this step's ends that were not filled."""
        return self._ends.unfilled_blocks

    def report(self) -> StepReport | None:
        """Return what the scheduler half is to know of this step; None: nothing."""
        returned = tuple(self._pins.take_returned())
        ends, self._new_ends = self._new_ends, ()
        admitted, self._new_admitted = self._new_admitted, ()
        partials = tuple(self._ends.partials)
        if not (returned or ends or admitted or partials or self._orders.has_forward):
            return None
        return StepReport(self._orders.step, returned, ends, admitted, partials)

    def take_figures(self) -> FigureValues | None:
        """Return the exchange's figures if any has changed since the last call.

        Of several ranks the first speaks for all: they hold shards of the same blocks.
        """
        if self._rank:
            return None
        return self._figures.take(
            exchange_figures(
                self._exchange.port.snapshot(),
                self._pins.num_retained,
                self._transport.num_blind_links(),
            )
        )

    def close(self) -> None:
        """End the exchange and the transport. Safe to repeat."""
        self._parts.close()

    def _collect(self) -> None:
        self._event.clear()
        ends = self._executor.take_ends()
        self._new_ends += tuple(ends)
        self._new_admitted += tuple(self._executor.take_admitted())
        self._parked.note(ends)


def _create_transport(config: ExchangeConfig, settings: PluginSettings) -> Transport:
    backend = settings.transport_backend
    if backend != "UCX":
        return create_transport("nixl", backend=backend)
    # On loopback peers are on this host; elsewhere UCX has to look at every device.
    devices = "lo" if is_loopback(config.control_host) else None
    return create_transport("nixl", ucx_tls=settings.ucx_tls, ucx_net_devices=devices)


def _shown(hello: WorkerHello) -> tuple[str, int, str]:
    peer = hello.address
    return peer.instance_id, peer.epoch, peer.control_address
