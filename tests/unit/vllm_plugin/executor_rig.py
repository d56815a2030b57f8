"""An executor over a pretended exchange, which holds what it is given as the real one does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvferry.connector.ports import (
    ConnectorSnapshot,
    FirstTokenArrival,
    HandoffOffer,
    HistoryRequest,
    PrefillEnd,
    PromptIdentity,
    ReceiveResult,
)
from kvferry.protocol.ids import BlockNumber, TransferId
from kvferry.protocol.params import Mode, PeerAddress
from kvferry.vllm_plugin.pins import PinnedBlocks
from kvferry.vllm_plugin.worker_half import OrderExecutor
from tests.unit.vllm_plugin.fake_engine import PEER


class FakeExchange:
    """Holds what it is given to fill, offer or send, as the real one does."""

    def __init__(self, pins: PinnedBlocks) -> None:
        self.pins = pins
        self.results: list[ReceiveResult] = []
        self.held: dict[TransferId, tuple[BlockNumber, ...]] = {}
        self.calls: list[tuple[object, ...]] = []
        self.peers: list[PeerAddress] = []
        self.error: Exception | None = None
        self.admitted: set[TransferId] = set()
        self.offers: set[TransferId] = set()
        self.on_begin: Callable[[], None] = lambda: None

    def _hold(self, transfer_id: TransferId, given: Sequence[BlockNumber]) -> None:
        if self.error is not None:
            raise self.error
        self.pins.hold(given)
        self.held[transfer_id] = tuple(given)

    def let_go(self, transfer_id: TransferId) -> None:
        self.pins.drop(self.held.pop(transfer_id))

    def begin_receive(
        self,
        transfer_id: TransferId,
        peer: PeerAddress,
        prompt: PromptIdentity,
        *,
        mode: Mode = Mode.PULL,
    ) -> None:
        if self.error is not None:
            raise self.error
        self.peers.append(peer)
        self.calls.append(("begin_receive", transfer_id, mode))
        self.on_begin()

    def may_receive(self, transfer_id: TransferId, num_blocks: int) -> bool:
        return transfer_id in self.admitted

    def receive(
        self, transfer_id: TransferId, blocks: Sequence[BlockNumber], first_block: int
    ) -> None:
        self._hold(transfer_id, blocks)

    def give_back(self, transfer_id: TransferId) -> bool:
        return False

    def end_receive(self, transfer_id: TransferId, *, needed: bool) -> None:
        self.calls.append(("end_receive", transfer_id, needed))

    def take_results(self) -> list[ReceiveResult]:
        results, self.results = self.results, []
        return results

    def take_first_tokens(self) -> list[FirstTokenArrival]:
        return []

    def contact(self, peer: PeerAddress) -> None:
        self.peers.append(peer)

    def read_history(self, peer: PeerAddress, history_request: HistoryRequest) -> TransferId:
        transfer_id = TransferId("history-1")
        self.peers.append(peer)
        self._hold(transfer_id, history_request.blocks)
        return transfer_id

    def begin_send(self, transfer_id: TransferId, prompt: PromptIdentity) -> None:
        self.calls.append(("begin_send", transfer_id))

    def advance_send(
        self, transfer_id: TransferId, blocks: Sequence[BlockNumber], num_tokens: int
    ) -> None:
        self.calls.append(("advance_send", tuple(blocks), num_tokens))

    def pause_send(self, transfer_id: TransferId) -> None:
        self.calls.append(("pause_send", transfer_id))

    def complete_send(
        self, transfer_id: TransferId, blocks: Sequence[BlockNumber], end: PrefillEnd
    ) -> HandoffOffer:
        self._hold(transfer_id, blocks)
        return HandoffOffer(PEER, 30.0)

    def is_send_wanted(self, transfer_id: TransferId) -> bool:
        return True

    def take_stopped_sends(self) -> list[TransferId]:
        return []

    def offer(
        self, transfer_id: TransferId, blocks: Sequence[BlockNumber], prompt: PromptIdentity
    ) -> HandoffOffer:
        self._hold(transfer_id, blocks)
        self.offers.add(transfer_id)
        return HandoffOffer(PEER, 30.0)

    def withdraw(self, transfer_id: TransferId) -> None:
        self.calls.append(("withdraw", transfer_id))

    def give_up_oldest(self, num_blocks: int) -> int:
        for transfer_id in self.offers:
            self.let_go(transfer_id)
        return num_blocks

    def snapshot(self) -> ConnectorSnapshot:
        return ConnectorSnapshot()


class ExecutorRig:
    """An executor over a pretended exchange."""

    def __init__(self, rank: int = 0) -> None:
        self.pins = PinnedBlocks(32)
        self.exchange = FakeExchange(self.pins)
        self.num_told = 0
        self.executor = OrderExecutor(self.exchange, self.pins, self._tell, rank)

    def _tell(self) -> None:
        self.num_told += 1
