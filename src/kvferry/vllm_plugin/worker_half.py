"""The worker half: the exchange beside the KV memory, and what it tells vLLM after each step.

Owns the transport, the exchange and the socket that orders come by. ``report`` is called on vLLM's
worker thread in every step; all else happens on the exchange's own threads, whether or not the
engine steps.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvferry.clock import SystemClock
from kvferry.connector.config import ExchangeConfig
from kvferry.connector.exchange import Exchange, ExchangeMemory
from kvferry.connector.ports import HISTORY_MODE, ConnectorPort, PrefillEnd, ReceiveOutcome
from kvferry.errors import FerryError, LocalProtocolError
from kvferry.observe.log import get_logger
from kvferry.observe.metrics import Metrics
from kvferry.protocol.compatibility import Compatibility, KVLayout
from kvferry.protocol.ids import BlockNumber, RequestId, TransferId
from kvferry.protocol.keys import is_loopback
from kvferry.protocol.params import Mode
from kvferry.protocol.prefill_result import FirstToken
from kvferry.transport.base import MemoryRegion, Transport
from kvferry.transport.registry import create_transport
from kvferry.vllm_plugin import orders
from kvferry.vllm_plugin.pins import PinnedBlocks
from kvferry.vllm_plugin.settings import PluginSettings
from kvferry.vllm_plugin.worker_link import OrderServer

IDLE_STEP_S = 0.002
"""How long a step without a forward waits for an end: vLLM steps on and on while a request is
parked, and would keep the exchange's threads from a core."""
_ALL = 2**40
_log = get_logger(__name__)


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
        self._rank = layout.tensor_parallel_rank
        self._step_orders = orders.StepOrders(0)
        self.unfilled_blocks: set[int] = set()
        """Blocks of this step's ends that were not filled."""
        self._pins = PinnedBlocks(regions[0].num_blocks)
        with contextlib.ExitStack() as parts:
            self._transport = _create_transport(config, settings)
            parts.callback(self._transport.close)
            self._transport.register(list(regions))
            memory = ExchangeMemory(self._pins, layout, self._transport, regions, compatibility)
            exchange = Exchange(config, memory, SystemClock(), Metrics().exchange)
            parts.callback(exchange.close)
            self._port = exchange.port
            self._executor = OrderExecutor(self._port, self._pins, self._event.set, self._rank)
            self._server = OrderServer(self._executor.execute)
            parts.callback(self._server.close)
            exchange.start(self._event.set)
            self._parts = parts.pop_all()
        peer = exchange.address
        self.hello = orders.WorkerHello(
            address=peer,
            fingerprint=layout.fingerprint(),
            num_blocks=self._pins.num_blocks,
            block_size_tokens=layout.block_size_tokens,
            orders_path=self._server.path,
        )
        name, where = peer.instance_id, peer.control_address
        _log.info("instance %s, epoch %d, answers on %s", name, peer.epoch, where)
        _log.info("the control port takes %s", config.key_text)

    def begin_step(self, step: orders.StepOrders) -> None:
        """vLLM begins a step. Raises ``EngineError``, which ends vLLM's engine with all requests,
        if nobody executes orders any more: else what it has parked would wait for ever."""
        self._server.check()
        self._step_orders = step
        self._pins.note_pool(step.pool)
        self._parked.add(step.loads)

    def take_ends(self, ended_requests: set[str]) -> StepEnds:
        """Return what to tell vLLM of parked requests; a step with nothing else to do waits."""
        ends = self._take_ends(ended_requests)
        waits = self._parked.num_parked > 0 or self._step_orders.is_waiting
        if waits and not (ends.finished or self._step_orders.has_forward):
            self._event.wait(IDLE_STEP_S)
            ends = self._take_ends(set())
        self.unfilled_blocks = ends.unfilled_blocks
        return ends

    def report(self) -> orders.StepReport | None:
        """Return what the scheduler half is to know of this step; None: nothing."""
        returned = tuple(self._pins.take_returned())
        ends = self._parked.take_reports()
        admitted = tuple(self._executor.take_admitted())
        if not (returned or ends or admitted or self._step_orders.has_forward):
            return None
        return orders.StepReport(self._step_orders.step, returned, ends, admitted)

    def figures(self) -> orders.FigureValues:
        """Return the exchange's figures. Of several ranks the first speaks for all: they hold
        shards of the same blocks."""
        if self._rank:
            return {}
        num_blind_links = self._transport.num_blind_links()
        return orders.exchange_figures(
            self._port.snapshot(), self._pins.num_retained, num_blind_links
        )

    def close(self) -> None:
        """End the exchange and the transport. Safe to repeat."""
        self._parts.close()

    def _take_ends(self, ended_requests: set[str]) -> StepEnds:
        self._event.clear()
        self._parked.note(self._executor.take_ends())
        return self._parked.take(ended_requests)


@dataclass(slots=True)
class StepEnds:
    """What vLLM is told of parked requests after a step."""

    finished: set[str] = field(default_factory=set)
    """Failed ones included."""
    failed: set[str] = field(default_factory=set)
    unfilled_blocks: set[int] = field(default_factory=set)
    """Of requests that were not filled to the end, a partial block among them: vLLM counts in whole
    blocks, and what is in it is added after that."""


class ParkedRequests:
    """Which requests vLLM has parked, and how filling ended; each is told once. Worker's thread."""

    def __init__(self) -> None:
        self._loads: dict[RequestId, orders.Blocks] = {}
        self._ends: dict[RequestId, orders.FillEnd] = {}
        """Those that vLLM has not been told of."""
        self._reports: list[orders.FillEnd] = []

    @property
    def num_parked(self) -> int:
        """Requests whose end is awaited."""
        return len(self._loads)

    def add(self, loads: Mapping[RequestId, orders.Blocks]) -> None:
        """vLLM has parked these, until their blocks are filled."""
        self._loads.update(loads)

    def note(self, ends: Sequence[orders.FillEnd]) -> None:
        """Filling has ended for these; vLLM may not have said yet that it parked them."""
        self._ends.update({end.request_id: end for end in ends})
        self._reports += [end for end in ends if not end.is_received]

    def take(self, ended_requests: set[str]) -> StepEnds:
        """Return what to tell vLLM; ``ended_requests`` were aborted, and their blocks wait.

        The exchange has references of its own on what a transfer may still touch.
        """
        told = StepEnds()
        for request_id in [r for r in self._loads if r in ended_requests or r in self._ends]:
            blocks = self._loads.pop(request_id)
            told.finished.add(request_id)
            if request_id in ended_requests:
                continue
            end = self._ends.pop(request_id)
            if end.is_received:
                told.unfilled_blocks.update(blocks[end.num_blocks :])
                self._reports.append(end)
            else:
                told.failed.add(request_id)
        for ended in ended_requests:
            end_of_ended = self._ends.pop(RequestId(ended), None)
            if end_of_ended is not None and end_of_ended.is_received:
                self._reports.append(end_of_ended)
        return told

    def take_reports(self) -> tuple[orders.FillEnd, ...]:
        """Return the ends that the scheduler half is to know now: failures at once, and what was
        received together with what vLLM is told."""
        reports, self._reports = self._reports, []
        return tuple(reports)


@dataclass(slots=True)
class _Receive:
    """What fills a request's blocks; ``mode`` as the exchange's metrics name it."""

    request_id: RequestId
    mode: str


@dataclass(slots=True)
class _Sending:
    """A prefill that is pushed: whose it is, and its blocks, pinned until its end."""

    request_id: RequestId
    blocks: list[BlockNumber] = field(default_factory=list)


class OrderExecutor:
    """Executes the scheduler half's orders: orders in, ends out. ``execute`` on one thread,
    ``take_ends`` and ``take_admitted`` on another.

    Owns which receive is which request's. Every order names blocks with a pin of their own, which
    is dropped once the exchange has taken the references that it needs.
    """

    def __init__(
        self,
        exchange: ConnectorPort,
        pins: PinnedBlocks,
        on_end: Callable[[], None],
        rank: int = 0,
    ) -> None:
        self._exchange = exchange
        self._pins = pins
        self._on_end = on_end
        self._rank = rank
        """Tensor-parallel: of a peer, the worker of the same rank is meant."""
        self._lock = threading.Lock()
        self._receives: dict[TransferId, _Receive] = {}
        """Those that no order has ended yet."""
        self._failed: list[orders.FillEnd] = []
        self._refused: set[RequestId] = set()
        """Whose receive could not begin, and who has been told so."""
        self._sending: dict[TransferId, _Sending] = {}
        self._not_admitted: set[TransferId] = set()
        """Pushes to here whose prefill has not been admitted, as far as was told."""

    def execute(self, order: orders.Order) -> orders.Answer:
        """Carry out ``order``. An order that can't be is told as an end, or in the answer."""
        try:
            return self._execute(order) or orders.Answer()
        except FerryError as error:
            _log.warning("%s: %s", type(order).__name__, error)
            return orders.Answer(error=str(error) or type(error).__name__)

    def take_ends(self) -> list[orders.FillEnd]:
        """Return how filling ended since the last call, each once."""
        with self._lock:
            # vLLM has no way to end a prefill from here: those that nobody wants run to their end.
            self._exchange.take_stopped_sends()
            ends, self._failed = self._failed, []
            for result in self._exchange.take_results():
                receive = self._receives.get(result.transfer_id)
                if receive is None:
                    continue
                # A push tells no count: all that was registered is written.
                num_full = result.num_blocks - (1 if result.num_partial_tokens else 0)
                num_blocks = num_full if result.num_blocks else _ALL
                received = result.outcome is ReceiveOutcome.RECEIVED
                ends.append(
                    orders.FillEnd(
                        receive.request_id,
                        result.outcome.value,
                        result.detail,
                        num_blocks if received else 0,
                        result.num_partial_tokens,
                        result.num_bytes,
                        receive.mode,
                    )
                )
            return ends

    def take_admitted(self) -> list[RequestId]:
        """Return the pushes whose prefill has got its blocks since the last call, each once."""
        with self._lock:
            # Nobody whose prefill still waits may take so many blocks.
            admitted = [t for t in self._not_admitted if self._exchange.may_receive(t, _ALL)]
            self._not_admitted.difference_update(admitted)
            return [self._receives[transfer_id].request_id for transfer_id in admitted]

    def _execute(self, order: orders.Order) -> orders.Answer | None:  # noqa: C901
        """Carry it out; None is answered where nothing is asked."""
        match order:
            case orders.Begin():
                self._begin(order)
            case orders.Fill():
                self._fill(order)
            case orders.Contact():
                self._exchange.contact(order.peer.of_rank(self._rank))
            case orders.FillHistory():
                self._fill_history(order)
            case orders.End():
                self._end(order)
            case orders.Offer():
                return self._offer(order)
            case orders.BeginSend():
                self._exchange.begin_send(order.transfer_id, order.prompt)
                self._sending[order.transfer_id] = _Sending(order.request_id)
            case orders.AdvanceSend():
                blocks = self._add_sending(order)
                self._exchange.advance_send(order.transfer_id, tuple(blocks), order.num_tokens)
            case orders.RestartSend() | orders.Withdraw():
                self._stop_sending(order)
            case orders.CompleteSend():
                return self._complete(order)
            case orders.Retain():
                self._pins.retain(order.hashes, order.blocks, order.partial)
            case orders.LetGo():
                self._pins.let_go(order.hashes)
            case orders.NotePool():
                self._pins.note_pool(order.pool)
            case orders.MakeRoom():
                self._exchange.give_up_oldest(order.num_blocks)
            case orders.Forget():
                return self._forget()
        return None

    # -- receiving ----------------------------------------------------------------------------

    def _begin(self, order: orders.Begin) -> None:
        peer = order.peer.of_rank(self._rank)
        # Told at once: a push that waits for its prefill would wait for ever. Under the lock, since
        # the result may come before this knows whose it is.
        with self._failing(order.request_id), self._lock:
            self._refused.add(order.request_id)
            self._exchange.begin_receive(order.transfer_id, peer, order.prompt, mode=order.mode)
            self._refused.discard(order.request_id)
            self._receives[order.transfer_id] = _Receive(order.request_id, order.mode.value)
            if order.mode is Mode.PUSH:
                self._not_admitted.add(order.transfer_id)

    def _fill(self, order: orders.Fill) -> None:
        with self._pinned(order.blocks):
            if order.request_id in self._refused:
                return
            with self._failing(order.request_id):
                receive = self._receives.get(order.transfer_id)
                if receive is None or receive.request_id != order.request_id:
                    raise LocalProtocolError(f"receive of {order.transfer_id} was not begun")
                self._exchange.receive(order.transfer_id, order.blocks, order.first_block)

    def _fill_history(self, order: orders.FillHistory) -> None:
        # Under the lock, as in ``_begin``.
        with self._pinned(order.wanted.blocks), self._failing(order.request_id), self._lock:
            peer = order.peer.of_rank(self._rank)
            transfer_id = self._exchange.read_history(peer, order.wanted)
            self._receives[transfer_id] = _Receive(order.request_id, HISTORY_MODE)

    def _end(self, order: orders.End) -> None:
        with self._lock:
            ended = [t for t, r in self._receives.items() if r.request_id == order.request_id]
            for transfer_id in ended:
                del self._receives[transfer_id]
                self._not_admitted.discard(transfer_id)
            self._failed = [f for f in self._failed if f.request_id != order.request_id]
            self._refused.discard(order.request_id)
        for transfer_id in ended:
            self._exchange.end_receive(transfer_id, needed=order.needed)

    # -- sending ------------------------------------------------------------------------------

    def _offer(self, order: orders.Offer) -> orders.Answer:
        with self._pinned(order.blocks):
            offer = self._exchange.offer(order.transfer_id, order.blocks, order.prompt)
            return orders.Answer(lease_s=offer.lease_s)

    def _complete(self, order: orders.CompleteSend) -> orders.Answer:
        blocks = self._add_sending(order)
        # vLLM samples by a generator of its own, so decode computes the last token again.
        end = PrefillEnd(FirstToken(order.first_token_id, seed=0))
        try:
            offer = self._exchange.complete_send(order.transfer_id, tuple(blocks), end)
            return orders.Answer(lease_s=offer.lease_s)
        finally:
            del self._sending[order.transfer_id]
            self._pins.drop(blocks)

    def _add_sending(self, order: orders.AdvanceSend | orders.CompleteSend) -> list[BlockNumber]:
        """Return all blocks of the push, with the order's new ones."""
        self._pins.pin(order.blocks)
        sending = self._sending.get(order.transfer_id)
        # Another request under the same id must not be sent as this one's prompt.
        if sending is None or sending.request_id != order.request_id:
            self._pins.drop(order.blocks)
            raise LocalProtocolError(f"the push of {order.transfer_id} was not begun")
        sending.blocks += order.blocks
        return sending.blocks

    def _stop_sending(self, order: orders.RestartSend | orders.Withdraw) -> None:
        """What runs has references of its own; nothing new starts from these blocks."""
        sending = self._sending.get(order.transfer_id)
        if sending is not None and sending.request_id != order.request_id:
            return
        if isinstance(order, orders.Withdraw):
            self._exchange.withdraw(order.transfer_id)
            self._sending.pop(order.transfer_id, None)
        elif sending is not None:
            self._exchange.advance_send(order.transfer_id, (), 0)
            self._exchange.pause_send(order.transfer_id)
        if sending is not None:
            blocks, sending.blocks = sending.blocks, []
            self._pins.drop(blocks)

    def _forget(self) -> orders.Answer:
        """End all that may give this memory's content to a peer that has not asked for it yet."""
        for transfer_id, sending in list(self._sending.items()):
            self._stop_sending(orders.Withdraw(sending.request_id, transfer_id))
        self._exchange.give_up_oldest(_ALL)
        self._pins.forget()
        return orders.Answer(returned=tuple(self._pins.take_returned()))

    # -- whose fault --------------------------------------------------------------------------

    @contextlib.contextmanager
    def _pinned(self, blocks: Sequence[BlockNumber]) -> Iterator[None]:
        self._pins.pin(blocks)
        try:
            yield
        finally:
            self._pins.drop(blocks)

    @contextlib.contextmanager
    def _failing(self, request_id: RequestId) -> Iterator[None]:
        """Nothing was posted if this raises, if by a bug: the request's end is that it failed."""
        try:
            yield
        except Exception as error:
            end = orders.FillEnd(request_id, ReceiveOutcome.FAILED.value, str(error))
            with self._lock:
                self._failed.append(end)
            self._on_end()
            raise


def _create_transport(config: ExchangeConfig, settings: PluginSettings) -> Transport:
    backend = settings.transport_backend
    if backend != "UCX":
        return create_transport("nixl", backend=backend)
    # On loopback peers are on this host; elsewhere UCX has to look at every device.
    devices = "lo" if is_loopback(config.control_host) else None
    return create_transport("nixl", ucx_tls=settings.ucx_tls, ucx_net_devices=devices)
