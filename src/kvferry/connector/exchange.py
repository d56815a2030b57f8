"""One instance's KV exchange: planner and mover joined. Engines call its ``port``."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry import __version__
from kvferry.clock import Clock
from kvferry.connector.config import ExchangeConfig
from kvferry.connector.mover import Mover
from kvferry.connector.planner import Planner
from kvferry.connector.ports import BlockPort, ConnectorPort
from kvferry.errors import ConfigError
from kvferry.observe.metrics import ExchangeMetrics
from kvferry.protocol import messages
from kvferry.protocol.compatibility import Compatibility, KVLayout
from kvferry.protocol.ids import BlockNumber
from kvferry.protocol.params import PeerAddress
from kvferry.transport.base import MemoryKind, MemoryRegion, Transport

CAPABILITIES = ("pull", "push", "history")


@dataclass(frozen=True, slots=True)
class ExchangeMemory:
    """What is exchanged: the pool's blocks, their layout, how they move, and where they lie.

    ``regions`` are needed only to verify blocks; ``compatibility`` is what peers compare beyond the
    layout.
    """

    blocks: BlockPort
    layout: KVLayout
    transport: Transport
    regions: Sequence[MemoryRegion] = ()
    compatibility: Compatibility | None = None


class Exchange:
    """``start`` opens for business, ``close`` ends all. The transport has its memory by then.

    Opens the control port; raises ``ConfigError`` if that fails.
    """

    def __init__(
        self, config: ExchangeConfig, memory: ExchangeMemory, clock: Clock, metrics: ExchangeMetrics
    ) -> None:
        self._config = config
        self._memory = memory
        digester = BlockDigester(memory.regions) if config.verify_transfers else None
        transport = memory.transport
        self._planner = Planner(
            config,
            memory.layout,
            memory.blocks,
            clock,
            transport=transport.name,
            digests_of=digester.digests if digester else None,
        )
        hello = messages.Hello(
            config.instance_id,
            config.epoch,
            memory.layout,
            transport.name,
            b"",
            memory.compatibility,
        )
        self._mover = Mover(config, hello, transport, self._planner, clock, metrics, self._describe)
        self.address = PeerAddress(config.instance_id, config.epoch, self._mover.control_address)
        self._planner.address = self.address

    @property
    def port(self) -> ConnectorPort:
        """What an engine calls, from any thread."""
        return self._planner

    def start(self, on_results: Callable[[], None]) -> None:
        """Start the mover. ``on_results`` is called on its thread when there are new results."""
        self._mover.on_results = on_results
        self._mover.start()

    def close(self) -> None:
        """Stop the mover, end every link and free the control port."""
        self._mover.close()

    def info(self) -> messages.InstanceInfo:
        """Return what this instance says of itself."""
        return self._describe(self.address.control_address)

    def _describe(self, control_address: str) -> messages.InstanceInfo:
        layout = self._memory.layout
        return messages.InstanceInfo(
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
            compatibility=self._memory.compatibility,
            receives=self._planner.ends_of_receives(),
        )


class BlockDigester:
    """Digests of blocks as they are in the host's memory, for transfers that are verified.

    Raises ``ConfigError`` for memory that it cannot read.
    """

    def __init__(self, regions: Sequence[MemoryRegion]) -> None:
        if not regions or any(region.kind is not MemoryKind.DRAM for region in regions):
            raise ConfigError(
                "transfers cannot be verified here (--verify-transfers): the KV blocks lie in a "
                "device's memory; leave the option out, or verify a deployment on CPUs"
            )
        self._regions = tuple(regions)

    def digests(self, blocks: Sequence[BlockNumber]) -> tuple[bytes, ...]:
        """Return 32 bytes per block: BLAKE2b-256 of all its runs, as they are now."""
        return tuple(self._digest(block) for block in blocks)

    def _digest(self, block: BlockNumber) -> bytes:
        state = hashlib.blake2b(digest_size=32)
        for region in self._regions:
            address = region.address + block * region.stride_bytes
            state.update((ctypes.c_char * region.block_bytes).from_address(address))
        return state.digest()
