"""The engine's part in a handoff: what prefill offers, and what decode does on arrival.

Owns the order of the connector's calls on both sides; the connector does the moving.
"""

from __future__ import annotations

from kvferry.connector.ports import ConnectorPort, PromptIdentity
from kvferry.engine.live_request import LiveRequest
from kvferry.errors import LocalProtocolError
from kvferry.protocol.hashing import prompt_digest
from kvferry.protocol.params import FirstToken, KvTransferParams, Role, TokenLogprob


def prompt_identity(request: LiveRequest) -> PromptIdentity:
    """Return what both sides of a handoff compare."""
    tokens = request.request.prompt_token_ids
    return PromptIdentity(len(tokens), prompt_digest(request.root, tokens))


class HandoffSender:
    """Prefill's side, on the engine's thread."""

    def __init__(self, connector: ConnectorPort | None) -> None:
        self._connector = connector

    def offer(
        self, request: LiveRequest, transfer: KvTransferParams, logprob: TokenLogprob | None
    ) -> KvTransferParams:
        """Offer the blocks of the whole prompt; return the decode leg's parameters.

        The step that filled the last block has completed, and the first token is sampled. Raises
        ``RequestError`` if the transfer's id is in use.
        """
        if self._connector is None:
            raise LocalProtocolError("a handoff needs a connector")
        offer = self._connector.offer(
            transfer.transfer_id, tuple(request.blocks), prompt_identity(request)
        )
        first_token = request.token_ids[request.num_prompt_tokens]
        return KvTransferParams(
            transfer_id=transfer.transfer_id,
            role=Role.DECODE,
            mode=transfer.mode,
            peer=offer.peer,
            first_token=FirstToken(first_token, request.seed, logprob),
            num_prompt_tokens=request.num_prompt_tokens,
            lease_s=offer.lease_s,
            prefill_end_s=request.prefill_end_s,
        )


class HandoffReceiver:
    """Decode's side at arrival, on the caller's thread."""

    def __init__(self, connector: ConnectorPort) -> None:
        self._connector = connector

    def begin(self, request: LiveRequest, transfer: KvTransferParams) -> None:
        """Have the peer keep the blocks. Raises ``RequestError`` if the id is in use here."""
        if transfer.peer is None:
            raise LocalProtocolError("role decode without a peer")
        self._connector.begin_receive(transfer.transfer_id, transfer.peer, prompt_identity(request))

    def decline(self, transfer: KvTransferParams) -> None:
        """Nothing is needed of the peer's blocks: let it go."""
        self._connector.end_receive(transfer.transfer_id, needed=False)
