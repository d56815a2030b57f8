"""Two exchanges in one process, joined by real control sockets and a real transport."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.blocks.pool import BlockPool
from kvferry.clock import SystemClock
from kvferry.connector.config import ExchangeConfig
from kvferry.connector.exchange import Exchange, ExchangeMemory
from kvferry.connector.ports import (
    ConnectorPort,
    ConnectorSnapshot,
    HandoffOffer,
    PromptIdentity,
    ReceiveResult,
)
from kvferry.observe.metrics import Metrics
from kvferry.protocol.compatibility import Compatibility, KVLayout
from kvferry.protocol.ids import BlockNumber, Epoch, InstanceId, TransferId
from kvferry.transport.base import MemoryRegion, Transport
from kvferry.transport.registry import create_transport
from tests.support.block_integrity import assert_whole

BLOCK_BYTES = 4096
NUM_BLOCKS = 64
PROMPT = PromptIdentity(16 * 8, b"p" * 32)
WAIT_S = 20.0

LAYOUT = KVLayout(
    model_name="tiny",
    weights_digest="weights",
    config_digest="config",
    kv_dtype="float32",
    num_layers=1,
    num_kv_heads=1,
    head_size=8,
    block_size_tokens=16,
    block_bytes=BLOCK_BYTES,
    attention_backend="test",
    region_strides=(BLOCK_BYTES,),
)


@dataclass
class Side:
    """One instance without an engine."""

    exchange: Exchange
    pool: BlockPool
    memory: npt.NDArray[np.uint8]
    transport: Transport
    metrics: Metrics
    has_results: threading.Event
    on_results: Callable[[], None]
    """Called on the mover's thread; tests may replace it."""

    @property
    def port(self) -> ConnectorPort:
        """What an engine would call."""
        return self.exchange.port

    def offer(self, transfer_id: TransferId, count: int = 8) -> tuple[list[BlockNumber], bytes]:
        """Fill and offer ``count`` blocks; return them and their bytes."""
        blocks = self.pool.allocate(count)
        rng = np.random.default_rng(len(transfer_id))
        for block in blocks:
            self.memory[block] = rng.integers(0, 256, BLOCK_BYTES, dtype=np.uint8)
        self.last_offer: HandoffOffer = self.port.offer(transfer_id, blocks, PROMPT)
        self.pool.drop(blocks)
        return blocks, self.memory[blocks].tobytes()

    def receive(
        self, transfer_id: TransferId, peer: Side, count: int = 8
    ) -> tuple[list[BlockNumber], ReceiveResult]:
        """Receive ``count`` blocks from ``peer`` and wait for the end."""
        self.port.begin_receive(transfer_id, peer.exchange.address, PROMPT)
        blocks = self.pool.allocate(count)
        self.port.receive(transfer_id, blocks, 0)
        return blocks, self.wait_result()

    def wait_result(self) -> ReceiveResult:
        """Wait for the one result that is due."""
        assert self.has_results.wait(WAIT_S)
        self.has_results.clear()
        (result,) = self.port.take_results()
        return result

    def counter(self, name: str, **labels: str) -> float:
        """Return a metric's value."""
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    def counts(self, expected: float, name: str, **labels: str) -> bool:
        """Wait until a metric has ``expected``; the mover may count a result after it is taken."""
        pause = threading.Event()
        for _ in range(int(WAIT_S / 0.01)):
            if self.counter(name, **labels) == expected:
                return True
            pause.wait(0.01)
        return False

    def close(self) -> None:
        """Close what was opened."""
        self.exchange.close()
        self.transport.close()


def make_side(name: str, transport_name: str = "shm", **changes: object) -> Side:
    """Build and start one side. ``layout`` in ``changes`` replaces the layout, ``compatibility``
    is told beside it."""
    layout = changes.pop("layout", LAYOUT)
    compatibility = changes.pop("compatibility", None)
    assert isinstance(layout, KVLayout)
    assert compatibility is None or isinstance(compatibility, Compatibility)
    transport = create_transport(transport_name)
    view = transport.allocate(BLOCK_BYTES * NUM_BLOCKS)
    memory = np.frombuffer(view, dtype=np.uint8)
    regions = [MemoryRegion(memory.ctypes.data, BLOCK_BYTES, BLOCK_BYTES, NUM_BLOCKS)]
    transport.register(regions)
    pool, metrics, event = BlockPool(NUM_BLOCKS), Metrics(), threading.Event()
    config = ExchangeConfig(instance_id=InstanceId(name), epoch=Epoch(hash(name) % 1000 + 1))
    config = dataclasses.replace(config, **changes)  # type: ignore[arg-type]
    exchange_memory = ExchangeMemory(pool, layout, transport, regions, compatibility)
    exchange = Exchange(config, exchange_memory, SystemClock(), metrics.exchange)
    blocks = memory.reshape(NUM_BLOCKS, BLOCK_BYTES)
    side = Side(exchange, pool, blocks, transport, metrics, event, event.set)
    exchange.start(lambda: side.on_results())
    return side


@contextmanager
def pair(transport_name: str = "shm", **changes: object) -> Iterator[tuple[Side, Side]]:
    """A prefill and a decode side; both must be whole and idle in the end."""
    prefill = make_side("prefill", transport_name, **changes)
    decode = make_side("decode", transport_name, **changes)
    try:
        yield prefill, decode
    finally:
        decode.close()
        prefill.close()


def wait_whole(*sides: Side) -> None:
    """Wait until the last releases have arrived, every block is free and nothing is left to do."""
    deadline = threading.Event()
    for _ in range(int(WAIT_S / 0.01)):
        if all(side.pool.num_free == NUM_BLOCKS and is_idle(side) for side in sides):
            break
        deadline.wait(0.01)
    for side in sides:
        assert_whole(side.pool)
        assert is_idle(side), side.port.snapshot()


def is_idle(side: Side) -> bool:
    """Whether the exchange has nothing in hand."""
    snapshot = side.port.snapshot()
    return dataclasses.replace(snapshot, outcomes={}, num_peers_resting=0) == ConnectorSnapshot()
