"""A peer without an engine: reads a conversation's blocks out of real servers, to compare them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np

from kvferry.blocks.pool import BlockPool
from kvferry.clock import SystemClock
from kvferry.connector.config import ExchangeConfig
from kvferry.connector.exchange import Exchange, ExchangeMemory
from kvferry.connector.ports import HistoryRequest, ReceiveOutcome, ReceiveResult
from kvferry.observe.metrics import Metrics
from kvferry.protocol.compatibility import KVLayout
from kvferry.protocol.hashing import block_hashes, chain_root
from kvferry.protocol.ids import InstanceId, new_epoch
from kvferry.protocol.params import PeerAddress
from kvferry.transport.base import MemoryRegion
from kvferry.transport.registry import create_transport
from tests.own_key import own_key
from tests.vllm.asking import Question

_NUM_BLOCKS = 16
_READ_S = 30.0


class BlockReader:
    """Reads by content, as any instance does."""

    def __init__(self, layout: KVLayout, stack: contextlib.ExitStack) -> None:
        self._layout = layout
        (stride_bytes,) = layout.region_strides
        self._memory = np.zeros((layout.num_regions, _NUM_BLOCKS, stride_bytes), np.uint8)
        self._pool = BlockPool(_NUM_BLOCKS)
        self._done = threading.Event()
        self._exchange = self._open(stride_bytes, stack)

    def read(self, peer: PeerAddress, question: Question) -> bytes:
        """Return the full blocks of a prompt as ``peer`` holds them; all must be there."""
        size = self._layout.block_size_tokens
        root = chain_root(self._layout.fingerprint(), salt=question.salt, lora="")
        hashes = block_hashes(root, question.tokens, size)
        blocks = self._pool.allocate(len(hashes))
        history_request = HistoryRequest(
            tuple(hashes), tuple(blocks), question.tokens, size, len(hashes)
        )
        name = self._exchange.port.read_history(peer, history_request)
        result = self._wait()
        self._exchange.port.end_receive(name, needed=True)
        assert (result.outcome, result.num_blocks) == (ReceiveOutcome.RECEIVED, len(hashes)), result
        content = self._memory[:, np.array(blocks)].tobytes()
        self._memory[:] = 0
        self._pool.drop(blocks)
        return content

    def _wait(self) -> ReceiveResult:
        deadline_s = time.monotonic() + _READ_S
        while True:
            results: Sequence[ReceiveResult] = self._exchange.port.take_results()
            if results:
                return results[0]
            assert self._done.wait(max(0.0, deadline_s - time.monotonic())), "nothing was read"
            self._done.clear()

    def _open(self, stride_bytes: int, stack: contextlib.ExitStack) -> Exchange:
        transport = create_transport("nixl", ucx_tls=None, ucx_net_devices="lo")
        stack.callback(transport.close)
        block_bytes = self._layout.block_bytes // self._layout.num_regions
        transport.register(
            [
                MemoryRegion(region.ctypes.data, block_bytes, stride_bytes, _NUM_BLOCKS)
                for region in self._memory
            ]
        )
        config = ExchangeConfig(
            instance_id=InstanceId("reader"),
            epoch=new_epoch(),
            cluster_key=own_key().secret,
            history_timeout_s=_READ_S,
        )
        memory = ExchangeMemory(self._pool, self._layout, transport)
        exchange = Exchange(config, memory, SystemClock(), Metrics().exchange)
        stack.callback(exchange.close)
        exchange.start(self._done.set)
        return exchange


@contextlib.contextmanager
def block_reader(layout: KVLayout) -> Iterator[BlockReader]:
    """A reader for blocks of that layout."""
    with contextlib.ExitStack() as stack:
        yield BlockReader(layout, stack)
