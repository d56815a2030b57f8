"""One instance's KV exchange: planner and mover joined, behind the port that engines call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from kvferry import __version__
from kvferry.clock import Clock
from kvferry.connector.config import ExchangeConfig, is_loopback
from kvferry.connector.machine.effects import ContactPeer
from kvferry.connector.mover.mover import Mover
from kvferry.connector.peers.inbound import BlockDigester
from kvferry.connector.peers.parts import MoverParts
from kvferry.connector.planner import Planner
from kvferry.connector.ports import (
    BlockPort,
    ConnectorSnapshot,
    FirstTokenArrival,
    HandoffOffer,
    PrefillEnd,
    PromptIdentity,
    ReceiveOutcome,
    ReceiveResult,
)
from kvferry.connector.wish import HistoryWish
from kvferry.errors import RequestError
from kvferry.observe.metrics import ExchangeMetrics
from kvferry.protocol.ids import BlockNumber, TransferId
from kvferry.protocol.layout import KVLayout
from kvferry.protocol.messages import Hello, InstanceInfo
from kvferry.protocol.params import Mode, PeerAddress, is_port
from kvferry.transport.base import Transport

CAPABILITIES = ("pull", "push", "history")
HISTORY_MODE = "history"
"""Label of read-backs in metrics, beside the modes of a handoff."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExchangeMemory:
    """What is exchanged: the pool's blocks, their layout, and how they move.

    ``view`` is the pool's memory where this process can read it; needed only to verify blocks.
    """

    blocks: BlockPort
    layout: KVLayout
    transport: Transport
    view: memoryview | None = None


class Exchange:
    """Implements ``ConnectorPort``. ``start`` opens for business, ``close`` ends all."""

    def __init__(
        self, config: ExchangeConfig, memory: ExchangeMemory, clock: Clock, metrics: ExchangeMetrics
    ) -> None:
        self._config = config
        self._memory = memory
        self._metrics = metrics
        self._planner = Planner(config, memory.layout, memory.blocks, clock)
        digester = None
        if config.verify_blocks and memory.view is not None:
            digester = BlockDigester(memory.view, memory.layout.block_bytes)
        name = memory.transport.name
        hello = Hello(config.instance_id, config.epoch, memory.layout, name, b"")
        self._parts = MoverParts(
            config,
            hello,
            memory.transport,
            self._planner,
            clock,
            metrics,
            digester,
            self._describe,
        )
        self._mover = Mover(self._parts)
        self._modes: dict[TransferId, str] = {}
        self.address = PeerAddress(config.instance_id, config.epoch, self._mover.control_address)

    def start(self, on_results: Callable[[], None]) -> None:
        """Start the mover. ``on_results`` is called on its thread when there are new results."""
        self._parts.on_results = on_results
        self._mover.start()

    def close(self) -> None:
        """Stop the mover, end every link and free the control port."""
        self._mover.close()

    def info(self) -> InstanceInfo:
        """Return what this instance says of itself."""
        return self._describe(self.address.control_address)

    def begin_receive(
        self,
        transfer_id: TransferId,
        peer: PeerAddress,
        prompt: PromptIdentity,
        *,
        mode: Mode = Mode.PULL,
    ) -> None:
        """See ``ConnectorPort``. Raises ``RequestError`` for an address that is not allowed, and
        where this instance would wait for itself to push."""
        self._check_address(peer.control_address)
        if mode is Mode.PUSH:
            self._check_is_another(peer, "peer", "is the router's --control right?")
        self._mover.decide(self._planner.begin_receive, transfer_id, peer, prompt, mode)
        self._modes[transfer_id] = mode

    def may_receive(self, transfer_id: TransferId, num_blocks: int) -> bool:
        """See ``ConnectorPort``."""
        return self._planner.may_receive(transfer_id, num_blocks)

    def receive(
        self, transfer_id: TransferId, blocks: Sequence[BlockNumber], first_block: int
    ) -> None:
        """See ``ConnectorPort``."""
        self._mover.decide(self._planner.receive, transfer_id, blocks, first_block)

    def give_back(self, transfer_id: TransferId) -> bool:
        """See ``ConnectorPort``."""
        return self._mover.answer(self._planner.give_back, transfer_id)

    def end_receive(self, transfer_id: TransferId, *, needed: bool) -> None:
        """See ``ConnectorPort``."""
        self._modes.pop(transfer_id, None)
        self._mover.decide(self._planner.end_receive, transfer_id, needed=needed)

    def contact(self, peer: PeerAddress) -> None:
        """See ``ConnectorPort``."""
        self._check_holder(peer)
        self._mover.submit([ContactPeer(peer)])

    def read_history(self, peer: PeerAddress, wish: HistoryWish) -> TransferId:
        """See ``ConnectorPort``."""
        self._check_holder(peer)
        transfer_id = self._mover.answer(self._planner.read_history, peer, wish)
        self._modes[transfer_id] = HISTORY_MODE
        return transfer_id

    def take_results(self) -> list[ReceiveResult]:
        """See ``ConnectorPort``."""
        results = [
            dataclasses.replace(result, transport=self._memory.transport.name)
            for result in self._planner.take_results()
        ]
        for result in results:
            self._count(result)
        return results

    def take_first_tokens(self) -> list[FirstTokenArrival]:
        """See ``ConnectorPort``."""
        return self._planner.take_first_tokens()

    def begin_send(self, transfer_id: TransferId, prompt: PromptIdentity) -> None:
        """See ``ConnectorPort``."""
        self._mover.decide(self._planner.begin_send, transfer_id, prompt)

    def advance_send(
        self, transfer_id: TransferId, blocks: Sequence[BlockNumber], num_tokens: int
    ) -> None:
        """See ``ConnectorPort``."""
        self._mover.decide(self._planner.advance_send, transfer_id, blocks, num_tokens)

    def pause_send(self, transfer_id: TransferId) -> None:
        """See ``ConnectorPort``."""
        self._planner.pause_send(transfer_id)

    def complete_send(
        self, transfer_id: TransferId, blocks: Sequence[BlockNumber], end: PrefillEnd
    ) -> HandoffOffer:
        """See ``ConnectorPort``."""
        self._mover.decide(self._planner.complete_send, transfer_id, blocks, end)
        return HandoffOffer(self.address, self._config.handoff_lease_s)

    def is_send_wanted(self, transfer_id: TransferId) -> bool:
        """See ``ConnectorPort``."""
        return self._planner.is_send_wanted(transfer_id)

    def take_stopped_sends(self) -> list[TransferId]:
        """See ``ConnectorPort``."""
        return self._planner.take_stopped_sends()

    def offer(
        self, transfer_id: TransferId, blocks: Sequence[BlockNumber], prompt: PromptIdentity
    ) -> HandoffOffer:
        """See ``ConnectorPort``."""
        self._mover.decide(self._planner.offer, transfer_id, blocks, prompt)
        return HandoffOffer(self.address, self._config.handoff_lease_s)

    def withdraw(self, transfer_id: TransferId) -> None:
        """See ``ConnectorPort``."""
        self._mover.decide(self._planner.withdraw, transfer_id)

    def give_up_oldest(self, num_blocks: int) -> int:
        """See ``ConnectorPort``."""
        return self._mover.answer(self._planner.give_up_oldest, num_blocks)

    def snapshot(self) -> ConnectorSnapshot:
        """See ``ConnectorPort``."""
        return dataclasses.replace(
            self._planner.snapshot(),
            num_peers_resting=self._mover.num_resting_peers(),
            num_links_served=self._mover.num_served(),
        )

    def _count(self, result: ReceiveResult) -> None:
        mode = self._modes.get(result.transfer_id, Mode.PULL)
        self._metrics.receives.labels(mode, result.outcome).inc()
        if result.outcome is ReceiveOutcome.RECEIVED:
            self._metrics.transfer_bytes.labels("in", mode).inc(result.num_bytes)
            if result.duration_s is not None:
                self._metrics.transfer_s.labels(mode).observe(result.duration_s)

    def _describe(self, control_address: str) -> InstanceInfo:
        layout = self._memory.layout
        return InstanceInfo(
            instance_id=self._config.instance_id,
            epoch=self._config.epoch,
            control_address=control_address,
            fingerprint=layout.fingerprint(),
            layout=layout,
            transport=self._memory.transport.name,
            capabilities=CAPABILITIES,
            num_blocks=self._memory.blocks.num_blocks,
            num_free_blocks=self._memory.blocks.num_free,
            software_version=__version__,
        )

    def _check_holder(self, peer: PeerAddress) -> None:
        self._check_address(peer.control_address)
        self._check_is_another(peer, "history", "it holds its own history anyway")

    def _check_is_another(self, peer: PeerAddress, param: str, advice: str) -> None:
        if peer.instance_id == self.address.instance_id:
            raise RequestError(
                f"{peer.instance_id} is this instance itself: {advice}",
                param=f"kv_transfer_params.{param}",
                code="invalid_value",
            )

    def _check_address(self, control_address: str) -> None:
        scheme, _, rest = control_address.partition("://")
        host, _, port = rest.rpartition(":")
        if scheme != "tcp" or not host or not is_port(port):
            raise RequestError(
                f"peer.control_address {control_address!r} is not of the form tcp://host:port",
                param="kv_transfer_params.peer",
                code="invalid_value",
            )
        if self._config.cluster_key is None and not is_loopback(host):
            raise RequestError(
                f"peer.control_address {control_address} is on another host, which needs a "
                "cluster key on both",
                param="kv_transfer_params.peer",
                code="peer_not_allowed",
            )


def create_exchange(
    config: ExchangeConfig, memory: ExchangeMemory, clock: Clock, metrics: ExchangeMetrics
) -> Exchange:
    """Build an exchange: opens the control port (``ConfigError`` if that fails), starts nothing.

    The transport's memory must be registered already.
    """
    return Exchange(config, memory, clock, metrics)
