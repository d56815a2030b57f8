"""The engine's part in a handoff, on prefill's side.

Owns the order of the connector's calls from admission to the handoff; the connector does the
moving. Decode's side is ``receiving``.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.connector.ports import ConnectorPort, HandoffOffer, PrefillEnd, PromptIdentity
from kvferry.engine.live_request import LiveRequest
from kvferry.engine.plan import Chunk
from kvferry.errors import FerryError, LocalProtocolError
from kvferry.protocol.hashing import prompt_digest
from kvferry.protocol.ids import TransferId
from kvferry.protocol.params import FirstToken, KvTransferParams, Mode, Role, TokenLogprob


def prompt_identity(request: LiveRequest) -> PromptIdentity:
    """Return what both sides of a handoff compare."""
    tokens = request.request.prompt_token_ids
    return PromptIdentity(len(tokens), prompt_digest(request.root, tokens))


class HandoffSender:
    """Prefill's side, on the engine's thread."""

    def __init__(self, connector: ConnectorPort | None) -> None:
        self._connector = connector
        self._pushes: dict[TransferId, LiveRequest] = {}
        """Begun and not complete."""

    def begin(self, request: LiveRequest) -> None:
        """``request`` has its blocks. Push: the connector hears of it, the first time only.

        Raises ``RequestError`` if the transfer's id was used before.
        """
        transfer = _push_of(request)
        if transfer is None or self._connector is None:
            return
        if self._pushes.get(transfer.transfer_id) is not request:
            self._connector.begin_send(transfer.transfer_id, prompt_identity(request))
            self._pushes[transfer.transfer_id] = request

    def advance(self, chunks: Sequence[Chunk]) -> None:
        """A step with ``chunks`` has completed. Push: what it filled can be written.

        The last chunk's waits for ``complete``, which follows at once: the first token must not
        queue behind its bytes.
        """
        if not self._pushes or self._connector is None:
            return
        for request in [chunk.request for chunk in chunks if not chunk.samples]:
            transfer = _push_of(request)
            if transfer is not None:
                blocks = tuple(request.blocks)
                self._connector.advance_send(transfer.transfer_id, blocks, request.num_computed)

    # -- the scheduler's questions ------------------------------------------------------------

    def make_room(self, num_blocks: int) -> int:
        """See ``SendDesk``."""
        return 0 if self._connector is None else self._connector.give_up_oldest(num_blocks)

    def pause(self, request: LiveRequest) -> None:
        """See ``SendDesk``. Push: the connector lets go of what it has not posted."""
        transfer = _push_of(request)
        if transfer is None or self._connector is None:
            return
        if self._pushes.get(transfer.transfer_id) is request:
            self._connector.pause_send(transfer.transfer_id)

    # -- a prefill's way ----------------------------------------------------------------------

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
        report = request.prefill_report()
        end = PrefillEnd(first_token, request.prefill_end_s, report)
        offer = self._offer(request, transfer, end)
        return KvTransferParams(
            transfer_id=transfer.transfer_id,
            role=Role.DECODE,
            mode=transfer.mode,
            peer=offer.peer,
            first_token=first_token,
            num_prompt_tokens=request.num_prompt_tokens,
            lease_s=offer.lease_s,
            prefill_end_s=request.prefill_end_s,
            prefill_report=report,
        )

    def _offer(
        self, request: LiveRequest, transfer: KvTransferParams, end: PrefillEnd
    ) -> HandoffOffer:
        if self._connector is None:
            raise LocalProtocolError("a handoff needs a connector")
        blocks = tuple(request.blocks)
        if transfer.mode is Mode.PUSH:
            del self._pushes[transfer.transfer_id]
            return self._connector.complete_send(transfer.transfer_id, blocks, end)
        return self._connector.offer(transfer.transfer_id, blocks, prompt_identity(request))

    def give_up(self, request: LiveRequest) -> None:
        """``request`` ends without a handoff. Push: the receiver is told at once.

        One that was never admitted is begun for that, since only what was begun can fail.
        """
        transfer = _push_of(request)
        if transfer is None or self._connector is None:
            return
        try:
            self.begin(request)
        except FerryError:
            return  # the id is another's
        del self._pushes[transfer.transfer_id]
        self._connector.withdraw(transfer.transfer_id)

    def is_wanted(self, request: LiveRequest) -> bool:
        """Push: whether the receiver has not said, before the first step, that it needs nothing."""
        transfer = _push_of(request)
        if transfer is None or self._connector is None:
            return True
        return self._connector.is_send_wanted(transfer.transfer_id)

    def take_stopped(self) -> list[LiveRequest]:
        """Return the requests whose receiver needs nothing of them (any more)."""
        if not self._pushes or self._connector is None:
            return []
        stopped = (self._pushes.get(i) for i in self._connector.take_stopped_sends())
        return [request for request in stopped if request is not None]


def _push_of(request: LiveRequest) -> KvTransferParams | None:
    transfer = request.transfer_as(Role.PREFILL)
    return transfer if transfer is not None and transfer.mode is Mode.PUSH else None
