"""The connector's pure half as the walk drives it; all that is known of ``connector`` is here.

One call goes in by name; its answer and what is to be done come out, however the connector hands
them over.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvferry.blocks.renewing import RenewingBlocks
from kvferry.clock import Clock
from kvferry.connector.config import ExchangeConfig
from kvferry.connector.effects import (
    ContactPeer,
    DisconnectPeer,
    DisconnectReader,
    Effect,
    Notify,
    PostRead,
    PostWrite,
    SendAcquire,
    SendAcquireHistory,
    SendRegister,
    SendRelease,
    SendRenew,
    StartServing,
    StopProgress,
    StopServing,
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
from kvferry.connector.planner import Planner
from kvferry.connector.ports import (
    ConnectorSnapshot,
    PrefillEnd,
    PromptIdentity,
    ReceiveOutcome,
    ReceiveResult,
)
from kvferry.connector.requests import to_request
from kvferry.connector.wish import HistoryWish
from kvferry.protocol.ids import Epoch, InstanceId
from kvferry.protocol.layout import KVLayout
from kvferry.protocol.messages import Hello, Request
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
    "HistoryWish",
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
    "SendAcquire",
    "SendAcquireHistory",
    "SendRegister",
    "SendRelease",
    "SendRenew",
    "Sendable",
    "StartServing",
    "StopProgress",
    "StopServing",
    "WriteEnded",
    "to_message",
]

BLOCK_TOKENS = 4
LAYOUT: KVLayout = msgspec.structs.replace(EXCHANGE_LAYOUT, block_size_tokens=BLOCK_TOKENS)
Sendable = SendAcquire | SendAcquireHistory | SendRegister | SendRenew | SendRelease

_ANSWERS = {
    "give_back", "give_up_oldest", "read_history",
    "answer_acquire", "answer_register", "answer_renew", "answer_release",
}  # fmt: skip
"""Calls that return an answer and what is to be done."""
_ANSWERS_ONLY = {"may_receive", "is_send_wanted", "take_results", "take_first_tokens",
                 "take_stopped_sends", "snapshot"}  # fmt: skip
_NEITHER = {"pause_send"}


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
        result = getattr(self._planner, name)(*args, **options)
        if name in _ANSWERS:
            answer, effects = result
            return answer, effects
        if name in _ANSWERS_ONLY:
            return result, []
        return None, [] if name in _NEITHER else result


def to_message(effect: Sendable, hello: Hello) -> Request:
    """Return the message that ``effect`` is on the wire."""
    return to_request(effect, hello, want_block_digests=False)
