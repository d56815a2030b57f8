"""``OrderExecutor``: obeys the scheduler half's orders, in the process that has the KV memory.

Owns which receive is which request's. Every order names blocks with a pin of their own; the executor
drops it once the exchange has taken the references it needs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvferry.connector.ports import (
    HISTORY_MODE,
    ConnectorPort,
    PrefillEnd,
    PromptIdentity,
    ReceiveOutcome,
)
from kvferry.connector.wish import HistoryWish
from kvferry.errors import FerryError, LocalProtocolError
from kvferry.observe.log import get_logger
from kvferry.protocol.first_token import FirstToken
from kvferry.protocol.ids import BlockNumber, RequestId, TransferId
from kvferry.protocol.params import Mode
from kvferry.vllm_plugin.orders import (
    AdvanceSend,
    Answer,
    Begin,
    BeginSend,
    CompleteSend,
    Contact,
    End,
    Fill,
    FillEnd,
    FillHistory,
    Forget,
    LetGo,
    MakeRoom,
    NotePool,
    Offer,
    Order,
    RestartSend,
    Retain,
    Withdraw,
)
from kvferry.vllm_plugin.pins import PinnedBlocks

_log = get_logger(__name__)


@dataclass(slots=True)
class _Sending:
    """A prefill that is pushed: whose it is, and its blocks, pinned until its end."""

    request_id: RequestId
    blocks: list[BlockNumber] = field(default_factory=list)


class OrderExecutor:
    """Orders in, ends out. ``obey`` on one thread, ``take_ends`` on another."""

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
        self._request_of: dict[TransferId, RequestId] = {}
        self._mode_of: dict[TransferId, str] = {}
        self._failed: list[FillEnd] = []
        self._refused: set[RequestId] = set()
        """Whose receive could not begin, and who has been told so."""
        self._sending: dict[TransferId, _Sending] = {}
        self._registered: set[TransferId] = set()
        """Pushes whose prefill has not been admitted, as far as was told."""

    @property
    def num_receives(self) -> int:
        """Receives that no order has ended yet."""
        with self._lock:
            return len(self._request_of)

    def obey(self, order: Order) -> Answer:
        """Carry out ``order``. An order that can't be is told as an end, or in the answer."""
        try:
            return self._obey(order)
        except FerryError as error:
            _log.warning("%s: %s", type(order).__name__, error)
            return Answer(error=str(error) or type(error).__name__)

    def take_ends(self) -> list[FillEnd]:
        """Return how filling ended since the last call, each once."""
        with self._lock:
            # vLLM has no way to end a prefill from here: those that nobody wants run to their end.
            self._exchange.take_stopped_sends()
            ends, self._failed = self._failed, []
            for result in self._exchange.take_results():
                request_id = self._request_of.get(result.transfer_id)
                if request_id is None:
                    continue
                received = result.outcome is ReceiveOutcome.RECEIVED
                # A push tells no count: all that was registered is written.
                num_full = result.num_blocks - (1 if result.num_partial_tokens else 0)
                num_blocks = num_full if result.num_blocks else _ALL
                ends.append(
                    FillEnd(
                        request_id,
                        result.outcome.value,
                        result.detail,
                        num_blocks if received else 0,
                        result.num_partial_tokens,
                        result.num_bytes,
                        self._mode_of.get(result.transfer_id, ""),
                    )
                )
            return ends

    def take_admitted(self) -> list[RequestId]:
        """Return the pushes whose prefill has got its blocks since the last call, each once."""
        with self._lock:
            # Nobody whose prefill still waits may take so many blocks.
            admitted = [t for t in self._registered if self._exchange.may_receive(t, _ALL)]
            self._registered.difference_update(admitted)
            return [self._request_of[transfer_id] for transfer_id in admitted]

    def _obey(self, order: Order) -> Answer:  # noqa: C901 - one branch per order
        match order:
            case Begin():
                self._begin(order)
            case Fill():
                self._fill(order)
            case Contact():
                self._exchange.contact(order.peer.of_rank(self._rank))
            case FillHistory():
                self._fill_history(order)
            case End():
                self._end(order)
            case Offer():
                return self._offer(order)
            case BeginSend():
                identity = PromptIdentity(order.num_tokens, order.digest)
                self._exchange.begin_send(order.transfer_id, identity)
                self._sending[order.transfer_id] = _Sending(order.request_id)
            case AdvanceSend():
                self._advance(order)
            case RestartSend() | Withdraw():
                self._stop_sending(order)
            case CompleteSend():
                return self._complete(order)
            case Retain():
                self._pins.retain(order.hashes, order.blocks, order.num_partial_tokens)
            case LetGo():
                self._pins.let_go(order.hashes)
            case NotePool():
                self._pins.note_pool(order.pool)
            case MakeRoom():
                self._exchange.give_up_oldest(order.num_blocks)
            case Forget():
                return self._forget()
        return Answer()

    # -- receiving ----------------------------------------------------------------------------

    def _begin(self, order: Begin) -> None:
        identity = PromptIdentity(order.num_tokens, order.digest)
        peer = order.peer.of_rank(self._rank)
        # Told at once: a push that waits for its prefill would wait for ever. Under the lock, since
        # the result may come before this knows whose it is.
        with self._failing(order.request_id), self._lock:
            self._refused.add(order.request_id)
            self._exchange.begin_receive(order.transfer_id, peer, identity, mode=order.mode)
            self._refused.discard(order.request_id)
            self._request_of[order.transfer_id] = order.request_id
            self._mode_of[order.transfer_id] = order.mode.value
            if order.mode is Mode.PUSH:
                self._registered.add(order.transfer_id)

    def _fill(self, order: Fill) -> None:
        if order.request_id in self._refused:
            with self._pinned(order.blocks):
                return
        with self._pinned(order.blocks), self._failing(order.request_id):
            if self._request_of.get(order.transfer_id) != order.request_id:
                raise LocalProtocolError(f"receive of {order.transfer_id} was not begun")
            self._exchange.receive(order.transfer_id, order.blocks, order.first_block)

    def _fill_history(self, order: FillHistory) -> None:
        # Under the lock, as in ``_begin``.
        with self._pinned(order.blocks), self._failing(order.request_id), self._lock:
            wish = HistoryWish(
                order.hashes,
                order.blocks,
                order.tokens,
                order.block_size_tokens,
                order.min_blocks,
            )
            transfer_id = self._exchange.read_history(order.peer.of_rank(self._rank), wish)
            self._request_of[transfer_id] = order.request_id
            self._mode_of[transfer_id] = HISTORY_MODE

    def _end(self, order: End) -> None:
        with self._lock:
            ended = [t for t, r in self._request_of.items() if r == order.request_id]
            for transfer_id in ended:
                del self._request_of[transfer_id]
                del self._mode_of[transfer_id]
                self._registered.discard(transfer_id)
            self._failed = [f for f in self._failed if f.request_id != order.request_id]
            self._refused.discard(order.request_id)
        for transfer_id in ended:
            self._exchange.end_receive(transfer_id, needed=order.needed)

    # -- sending ------------------------------------------------------------------------------

    def _offer(self, order: Offer) -> Answer:
        with self._pinned(order.blocks):
            identity = PromptIdentity(order.num_tokens, order.digest)
            offer = self._exchange.offer(order.transfer_id, order.blocks, identity)
            return Answer(lease_s=offer.lease_s)

    def _advance(self, order: AdvanceSend) -> None:
        sending = self._add_sending(order)
        self._exchange.advance_send(order.transfer_id, tuple(sending.blocks), order.num_tokens)

    def _complete(self, order: CompleteSend) -> Answer:
        sending = self._add_sending(order)
        # vLLM samples by a generator of its own, so decode computes the last token again.
        end = PrefillEnd(FirstToken(order.first_token_id, seed=0))
        try:
            offer = self._exchange.complete_send(order.transfer_id, tuple(sending.blocks), end)
            return Answer(lease_s=offer.lease_s)
        finally:
            del self._sending[order.transfer_id]
            self._pins.drop(sending.blocks)

    def _add_sending(self, order: AdvanceSend | CompleteSend) -> _Sending:
        self._pins.pin(order.blocks)
        sending = self._sending.get(order.transfer_id)
        # Another request under the same id must not be sent as this one's prompt.
        if sending is None or sending.request_id != order.request_id:
            self._pins.drop(order.blocks)
            raise LocalProtocolError(f"the push of {order.transfer_id} was not begun")
        sending.blocks += order.blocks
        return sending

    def _stop_sending(self, order: RestartSend | Withdraw) -> None:
        """What runs has references of its own; nothing new starts from these blocks."""
        sending = self._sending.get(order.transfer_id)
        if sending is not None and sending.request_id != order.request_id:
            return
        if isinstance(order, Withdraw):
            self._exchange.withdraw(order.transfer_id)
            self._sending.pop(order.transfer_id, None)
        elif sending is not None:
            self._exchange.advance_send(order.transfer_id, (), 0)
            self._exchange.pause_send(order.transfer_id)
        if sending is not None:
            blocks, sending.blocks = sending.blocks, []
            self._pins.drop(blocks)

    def _forget(self) -> Answer:
        """End all that may give this memory's content to a peer that has not asked for it yet."""
        for transfer_id, sending in list(self._sending.items()):
            self._stop_sending(Withdraw(sending.request_id, transfer_id))
        self._exchange.give_up_oldest(_ALL)
        self._pins.forget()
        return Answer(returned=tuple(self._pins.take_returned()))

    # -- whose fault --------------------------------------------------------------------------

    @contextmanager
    def _pinned(self, blocks: Sequence[BlockNumber]) -> Iterator[None]:
        self._pins.pin(blocks)
        try:
            yield
        finally:
            self._pins.drop(blocks)

    @contextmanager
    def _failing(self, request_id: RequestId) -> Iterator[None]:
        """Nothing was posted if this raises, if by a bug: the request's end is that it failed."""
        try:
            yield
        except Exception as error:
            end = FillEnd(request_id, ReceiveOutcome.FAILED.value, str(error))
            with self._lock:
                self._failed.append(end)
            self._on_end()
            raise


_ALL = 2**40
