"""The connector's pure half as the walk drives it; all that is known of ``connector`` is here.

One call goes in by name; its answer and what is to be done come out, however the connector hands
them over.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvferry.blocks.retention import RenewingBlocks
from kvferry.clock import Clock
from kvferry.connector.config import ExchangeConfig
from kvferry.connector.effects import (
    ActivateReader,
    ContactPeer,
    DeactivateReader,
    DisconnectPeer,
    DisconnectReader,
    Effect,
    Notify,
    PostRead,
    PostWrite,
    Send,
    StopProgress,
)
from kvferry.connector.events import (
    AcquireAnswered,
    Event,
    Noticed,
    PeerLost,
    PeerQuiet,
    ReadEnded,
    ReadStatus,
    RegisterAnswered,
    ReleaseAnswered,
    RenewAnswered,
    WriteEnded,
)
from kvferry.connector.peers.sessions import never_registered
from kvferry.connector.planner import Planner
from kvferry.connector.ports import (
    ConnectorSnapshot,
    HistoryRequest,
    PrefillEnd,
    PromptIdentity,
    ReceiveOutcome,
    ReceiveResult,
)
from kvferry.protocol.compatibility import KVLayout
from kvferry.protocol.ids import Epoch, InstanceId
from kvferry.protocol.messages import (
    Acquire,
    AcquireHistory,
    Asked,
    Hello,
    Register,
    Release,
    Renew,
)
from tests.integration.exchange_pair import LAYOUT as EXCHANGE_LAYOUT

__all__ = [
    "AcquireAnswered",
    "ConnectorSnapshot",
    "ContactPeer",
    "DisconnectPeer",
    "DisconnectReader",
    "Driven",
    "Effect",
    "Event",
    "HistoryRequest",
    "Noticed",
    "Notify",
    "PeerLost",
    "PeerQuiet",
    "PostRead",
    "PostWrite",
    "PrefillEnd",
    "PromptIdentity",
    "ReadEnded",
    "ReadStatus",
    "ReceiveOutcome",
    "ReceiveResult",
    "RegisterAnswered",
    "ReleaseAnswered",
    "RenewAnswered",
    "Acquire",
    "AcquireHistory",
    "Asked",
    "Register",
    "Release",
    "Renew",
    "Send",
    "never_registered",
    "ActivateReader",
    "StopProgress",
    "DeactivateReader",
    "WriteEnded",
]

BLOCK_TOKENS = 4
LAYOUT: KVLayout = msgspec.structs.replace(EXCHANGE_LAYOUT, block_size_tokens=BLOCK_TOKENS)


class Driven:
    """One instance's planner."""

    def __init__(
        self, name: InstanceId, epoch: Epoch, blocks: RenewingBlocks, clock: Clock
    ) -> None:
        self.blocks = blocks
        self.hello = Hello(name, epoch, LAYOUT, "walk", b"")
        config = ExchangeConfig(
            instance_id=name,
            epoch=epoch,
            max_held_share=0.5,
            max_registered_share=0.5,
            max_history_share=0.75,
            max_quarantine_share=0.5,
            max_early_registrations=2,
            max_inflight_bytes=2 * LAYOUT.block_bytes,
        )
        self._planner = Planner(config, LAYOUT, blocks, clock)

    def call(self, name: str, *args: object, **options: object) -> tuple[Any, list[Effect]]:
        """Call the planner; return its answer, None where it has none, and what is to be done."""
        answer = getattr(self._planner, name)(*args, **options)
        effects: list[Effect] = []
        while (effect := self._planner.take_effect()) is not None:
            effects.append(effect)
        return answer, effects
