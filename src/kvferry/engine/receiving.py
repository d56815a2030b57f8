"""The engine's part in what it receives: a handoff on decode, a conversation's history on prefill.

Owns which transfer is which request's, and what came for a request that is still on its way to
the engine's thread. What a result means for the request is the core's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from kvferry.connector.ports import ConnectorPort, PrefillEnd, ReceiveResult
from kvferry.engine.handoff import prompt_identity
from kvferry.engine.live_request import LiveRequest
from kvferry.engine.plan import HistoryStart, StepPlan
from kvferry.errors import LocalProtocolError
from kvferry.protocol.ids import TransferId
from kvferry.protocol.params import KvTransferParams, Role

_MORE_BLOCKS_THAN_ANY_SHARE = 2**40


class Receives:
    """A ``ReceiveDesk`` for the scheduler, on the engine's thread.

    ``begin`` and ``decline`` are for arrival, on the caller's thread. What comes for a transfer
    that was begun and has not ended is never lost, however much comes at once; what comes for any
    other belongs to nobody. So what is kept is bounded by the requests themselves.
    """

    def __init__(self, connector: ConnectorPort | None) -> None:
        self._connector = connector
        # Around the connector's calls too: what a peer sends at once finds its transfer known.
        self._lock = threading.Lock()
        self._by_transfer: dict[TransferId, LiveRequest | None] = {}
        """None: begun, and on its way to the engine's thread."""
        self._tokens: dict[TransferId, PrefillEnd] = {}
        self._results: dict[TransferId, ReceiveResult] = {}

    # -- at arrival ---------------------------------------------------------------------------

    def begin(self, request: LiveRequest, transfer: KvTransferParams) -> None:
        """Let the peer know. Raises ``RequestError`` if the id is in use here."""
        if transfer.peer is None or self._connector is None:
            raise LocalProtocolError("role decode without a peer, or without a connector")
        with self._lock:
            self._connector.begin_receive(
                transfer.transfer_id, transfer.peer, prompt_identity(request), mode=transfer.mode
            )
            self._by_transfer[transfer.transfer_id] = None

    def decline(self, transfer: KvTransferParams) -> None:
        """Nothing is needed of the peer's blocks: let it go."""
        self._end(transfer.transfer_id, needed=False)

    # -- on the engine's thread ---------------------------------------------------------------

    def add(self, request: LiveRequest) -> None:
        """A request is in service from now on."""
        transfer = request.transfer_as(Role.DECODE)
        if transfer is not None and request.wants_receive:
            with self._lock:
                self._by_transfer[transfer.transfer_id] = request

    def end(self, request: LiveRequest, *, needed: bool = False) -> None:
        """Nothing more is wanted of the peer; it is told."""
        self._end_history(request)
        transfer = request.transfer_as(Role.DECODE)
        if transfer is not None:
            self._end(transfer.transfer_id, needed=needed)

    def take(
        self,
    ) -> tuple[list[tuple[LiveRequest, PrefillEnd]], list[tuple[LiveRequest, ReceiveResult]]]:
        """Return the first tokens and the ends of receives that came, in this order."""
        if self._connector is None:
            return [], []
        with self._lock:
            # In this order: the first token that belongs to a result taken here is there already.
            for result in self._connector.take_results():
                if result.transfer_id in self._by_transfer:
                    self._results[result.transfer_id] = result
            for arrival in self._connector.take_first_tokens():
                if arrival.transfer_id in self._by_transfer:
                    self._tokens[arrival.transfer_id] = arrival.end
            tokens = [(r, self._tokens.pop(i)) for i, r in self._in_service(self._tokens)]
            results = [(r, self._results.pop(i)) for i, r in self._in_service(self._results)]
            for result in [result for _, result in results]:
                del self._by_transfer[result.transfer_id]
            return tokens, results

    def _in_service(self, ids: Iterable[TransferId]) -> list[tuple[TransferId, LiveRequest]]:
        found = [(transfer_id, self._by_transfer[transfer_id]) for transfer_id in ids]
        return [(transfer_id, request) for transfer_id, request in found if request is not None]

    def _end(self, transfer_id: TransferId, *, needed: bool) -> None:
        if self._connector is None:
            return
        with self._lock:
            # Nothing of it may be left for another request under the same id.
            self._by_transfer.pop(transfer_id, None)
            self._tokens.pop(transfer_id, None)
            self._results.pop(transfer_id, None)
            self._connector.end_receive(transfer_id, needed=needed)

    def _start_history(self, start: HistoryStart) -> None:
        request, holder = start.request, start.request.history
        if self._connector is None or holder is None:
            raise AssertionError(f"request {request.request.request_id} has no history to read")
        with self._lock:
            request.history_id = self._connector.read_history(holder, start.wish)
            self._by_transfer[request.history_id] = request

    def _end_history(self, request: LiveRequest) -> None:
        if request.history_id is not None:
            self._end(request.history_id, needed=True)
            request.history_id = None

    def follow(self, plan: StepPlan) -> list[LiveRequest]:
        """Tell the connector what the scheduler has decided.

        Returns the requests whose receive was ended meanwhile (their client has left, say), and of
        which no result will come.
        """
        ended: list[LiveRequest] = []
        if self._connector is None:
            return ended
        for start in plan.receives:
            try:
                self._connector.receive(_id_of(start.request), start.blocks, start.first_block)
            except LocalProtocolError:
                # A push may fail at any moment, so also just now: its result is on the way.
                if not start.request.is_pushed:
                    ended.append(start.request)
        for history in plan.histories:
            self._start_history(history)
        for request in plan.not_needed:
            self.end(request)
        for request in plan.cancelled:
            self.end(request, needed=True)
        return ended

    # -- the scheduler's questions ------------------------------------------------------------

    def may_receive(self, request: LiveRequest, num_blocks: int) -> bool:
        """Whether ``num_blocks`` may be given to the peer to fill."""
        return self._connector is None or self._connector.may_receive(_id_of(request), num_blocks)

    def is_peer_at_work(self, request: LiveRequest) -> bool:
        """Whether the peer's prefill has its own blocks: then the receive ends by itself."""
        # A read-back ends by itself, whatever its holder does.
        return request.is_prefill or self.may_receive(request, _MORE_BLOCKS_THAN_ANY_SHARE)

    def give_back(self, request: LiveRequest) -> bool:
        """Take blocks back that the peer has not filled; False if it is too late for that."""
        return self._connector is not None and self._connector.give_back(_id_of(request))

    def num_returning(self) -> int:
        """Blocks that come back once no transfer can touch them."""
        return 0 if self._connector is None else self._connector.snapshot().num_blocks_quarantined


def _id_of(request: LiveRequest) -> TransferId:
    transfer = request.transfer_as(Role.DECODE)
    if transfer is None:
        raise AssertionError(f"request {request.request.request_id} receives nothing")
    return transfer.transfer_id
