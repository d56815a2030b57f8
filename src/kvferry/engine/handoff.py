"""The engine's part in moving KV: what it sends as prefill, and what it receives.

Owns the order of the connector's calls for each request, which transfer is which request's, and
what came for a request that is still on its way to the engine's thread. The connector does the
moving; what a result means for the request is the core's.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence

from kvferry.connector.ports import ConnectorPort, PrefillEnd, ReceiveResult
from kvferry.engine.live_request import Chunk, HistoryStart, LiveRequest, StepPlan
from kvferry.errors import FerryError, LocalProtocolError, RequestError
from kvferry.protocol.ids import TransferId
from kvferry.protocol.params import FirstToken, KvTransferParams, Mode, Role, TokenLogprob

logger = logging.getLogger(__name__)

_MORE_BLOCKS_THAN_ANY_SHARE = 2**40


class _ConnectorUser:
    """Whoever calls the connector, which an engine that exchanges nothing does not have."""

    def __init__(self, connector: ConnectorPort | None) -> None:
        self._connector = connector

    @property
    def _port(self) -> ConnectorPort:
        """The connector, for a request with a transfer: none is taken without a connector."""
        if self._connector is None:
            raise LocalProtocolError("a request with a transfer, and no connector")
        return self._connector


class HandoffSender(_ConnectorUser):
    """Prefill's side of handoffs, on the engine's thread."""

    def __init__(self, connector: ConnectorPort | None) -> None:
        super().__init__(connector)
        self._pushes: dict[TransferId, LiveRequest] = {}
        """Begun and not complete."""

    def begin(self, request: LiveRequest) -> None:
        """``request`` has its blocks. Push: the connector hears of it, the first time only.

        Raises ``RequestError`` if the transfer's id was used before.
        """
        transfer = _push_of(request)
        if transfer is not None and self._pushes.get(transfer.transfer_id) is not request:
            self._port.begin_send(transfer.transfer_id, request.prompt_identity)
            self._pushes[transfer.transfer_id] = request

    def is_wanted(self, request: LiveRequest) -> bool:
        """Push: whether the receiver has not said, before the first step, that it needs nothing."""
        transfer = _push_of(request)
        return transfer is None or self._port.is_send_wanted(transfer.transfer_id)

    def advance(self, chunks: Sequence[Chunk]) -> None:
        """A step with ``chunks`` has completed. Push: what it filled can be written.

        The last chunk's waits for ``complete``, which follows at once: the first token must not
        queue behind its bytes.
        """
        for request in [chunk.request for chunk in chunks if not chunk.samples]:
            transfer = _push_of(request)
            if transfer is not None:
                blocks = tuple(request.blocks)
                self._port.advance_send(transfer.transfer_id, blocks, request.num_computed)

    def pause(self, request: LiveRequest) -> None:
        """``request`` is about to lose its blocks, which are to be free at once.

        Push: the connector lets go of what it has not posted.
        """
        transfer = _push_of(request)
        if transfer is not None and self._pushes.get(transfer.transfer_id) is request:
            self._port.pause_send(transfer.transfer_id)

    def complete(
        self, request: LiveRequest, transfer: KvTransferParams, logprob: TokenLogprob | None
    ) -> KvTransferParams:
        """Hand over the blocks of the whole prompt; return the decode leg's parameters.

        The step that filled the last block has completed, and the first token is sampled. Raises
        ``RequestError`` if the transfer's id is in use.
        """
        first_token = FirstToken(
            request.token_ids[request.num_prompt_tokens], request.seed, logprob
        )
        end = PrefillEnd(first_token, request.report.prefill_end_s, request.prefill_report())
        transfer_id, blocks = transfer.transfer_id, tuple(request.blocks)
        if transfer.mode is Mode.PUSH:
            del self._pushes[transfer_id]
            offer = self._port.complete_send(transfer_id, blocks, end)
        else:
            offer = self._port.offer(transfer_id, blocks, request.prompt_identity)
        return KvTransferParams(
            transfer_id=transfer_id,
            role=Role.DECODE,
            mode=transfer.mode,
            peer=offer.peer,
            first_token=first_token,
            num_prompt_tokens=request.num_prompt_tokens,
            lease_s=offer.lease_s,
            prefill_end_s=end.ended_s,
            prefill_report=end.report,
        )

    def give_up(self, request: LiveRequest) -> None:
        """``request`` ends without a handoff. Push: the receiver is told at once.

        One that was never admitted is begun for that, since only what was begun can fail.
        """
        transfer = _push_of(request)
        if transfer is None:
            return
        try:
            self.begin(request)
        except FerryError:
            return  # the id is another's
        del self._pushes[transfer.transfer_id]
        self._port.withdraw(transfer.transfer_id)

    def take_stopped(self) -> list[LiveRequest]:
        """Return the requests whose receiver needs nothing of them (any more)."""
        if not self._pushes:
            return []
        stopped = (self._pushes.get(i) for i in self._port.take_stopped_sends())
        return [request for request in stopped if request is not None]

    def make_room(self, num_blocks: int) -> int:
        """Give up offers worth that many blocks; return how many were freed."""
        return 0 if self._connector is None else self._connector.give_up_oldest(num_blocks)


def _push_of(request: LiveRequest) -> KvTransferParams | None:
    transfer = request.transfer_as(Role.PREFILL)
    return transfer if transfer is not None and transfer.mode is Mode.PUSH else None


class Receives(_ConnectorUser):
    """What requests receive: a handoff on decode, a conversation's history on prefill.

    ``begin`` and ``decline`` are for arrival, on the caller's thread; the rest is for the engine's.
    What comes for a transfer that was begun and has not ended is never lost, however much comes at
    once; what comes for any other belongs to nobody. So what is kept is bounded by the requests
    themselves.
    """

    def __init__(self, connector: ConnectorPort | None) -> None:
        super().__init__(connector)
        # Around the connector's calls too: what a peer sends at once finds its transfer known.
        self._lock = threading.Lock()
        self._by_transfer: dict[TransferId, LiveRequest | None] = {}
        """None: begun, and on its way to the engine's thread."""
        self._tokens: dict[TransferId, PrefillEnd] = {}
        self._results: dict[TransferId, ReceiveResult] = {}

    # -- at arrival ---------------------------------------------------------------------------

    def begin(self, request: LiveRequest) -> None:
        """Shake hands with whoever has blocks of the prompt, before the request is admitted.

        Raises ``RequestError`` if the id of a handoff is in use here.
        """
        if request.history is not None:
            try:
                self._port.contact(request.history)
                request.wants_history = True
            except RequestError as error:
                # Only a hint: one that cannot be followed costs a recompute.
                logger.warning("a history hint was ignored: %s", error)
        transfer = request.transfer_as(Role.DECODE)
        if transfer is None:
            return
        if transfer.peer is None:
            raise LocalProtocolError("role decode without a peer")
        with self._lock:
            self._port.begin_receive(
                transfer.transfer_id, transfer.peer, request.prompt_identity, mode=transfer.mode
            )
            self._by_transfer[transfer.transfer_id] = None
        request.wants_receive = True

    def decline(self, request: LiveRequest) -> None:
        """It needs nothing of the peer's blocks: let them go, if it has begun with them."""
        transfer = request.transfer_as(Role.DECODE)
        if transfer is not None and request.wants_receive:
            self._end(transfer.transfer_id, needed=False)

    # -- on the engine's thread ---------------------------------------------------------------

    def add(self, request: LiveRequest) -> None:
        """A request is in service from now on."""
        transfer = request.transfer_as(Role.DECODE)
        if transfer is not None and request.wants_receive:
            with self._lock:
                self._by_transfer[transfer.transfer_id] = request

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
            for _, result in results:
                del self._by_transfer[result.transfer_id]
            return tokens, results

    def _in_service(self, ids: Iterable[TransferId]) -> list[tuple[TransferId, LiveRequest]]:
        found = [(transfer_id, self._by_transfer[transfer_id]) for transfer_id in ids]
        return [(transfer_id, request) for transfer_id, request in found if request is not None]

    def follow(self, plan: StepPlan) -> list[LiveRequest]:
        """Tell the connector what the scheduler has decided.

        Returns the requests whose receive was ended meanwhile (their client has left, say), and of
        which no result will come.
        """
        ended: list[LiveRequest] = []
        for start in plan.receives:
            try:
                self._port.receive(_id_of(start.request), start.blocks, start.first_block)
            except LocalProtocolError:
                # A push may fail at any moment, so also just now: its result is on the way.
                if not start.request.is_pushed:
                    ended.append(start.request)
        for history in plan.histories:
            self._read_history(history)
        for request in plan.not_needed:
            self.end(request)
        for request in plan.cancelled:
            self.end(request, needed=True)
        return ended

    def _read_history(self, start: HistoryStart) -> None:
        request, holder = start.request, start.request.history
        if holder is None:
            raise AssertionError(f"request {request.request_id} has no history to read")
        with self._lock:
            request.history_id = self._port.read_history(holder, start.history_request)
            self._by_transfer[request.history_id] = request

    def end(self, request: LiveRequest, *, needed: bool = False) -> None:
        """Nothing more is wanted of the peer; it is told."""
        if request.history_id is not None:
            self._end(request.history_id, needed=True)
            request.history_id = None
        transfer = request.transfer_as(Role.DECODE)
        if transfer is not None:
            self._end(transfer.transfer_id, needed=needed)

    def _end(self, transfer_id: TransferId, *, needed: bool) -> None:
        with self._lock:
            # Nothing of it may be left for another request under the same id.
            self._by_transfer.pop(transfer_id, None)
            self._tokens.pop(transfer_id, None)
            self._results.pop(transfer_id, None)
            self._port.end_receive(transfer_id, needed=needed)

    # -- the scheduler's questions ------------------------------------------------------------

    def may_receive(self, request: LiveRequest, num_blocks: int) -> bool:
        """Whether ``num_blocks`` may be given to the peer to fill."""
        return self._port.may_receive(_id_of(request), num_blocks)

    def is_peer_at_work(self, request: LiveRequest) -> bool:
        """Whether the peer's prefill has its own blocks: then the receive ends by itself."""
        # A read-back ends by itself, whatever its holder does.
        return request.is_prefill or self.may_receive(request, _MORE_BLOCKS_THAN_ANY_SHARE)

    def give_back(self, request: LiveRequest) -> bool:
        """Take blocks back that the peer has not filled; False if it is too late for that."""
        return self._port.give_back(_id_of(request))

    def num_returning(self) -> int:
        """Blocks that come back once no transfer can touch them."""
        return 0 if self._connector is None else self._connector.snapshot().num_blocks_quarantined


def _id_of(request: LiveRequest) -> TransferId:
    transfer = request.transfer_as(Role.DECODE)
    if transfer is None:
        raise AssertionError(f"request {request.request_id} receives nothing")
    return transfer.transfer_id
