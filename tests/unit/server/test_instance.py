from __future__ import annotations

import contextlib
from typing import Any, cast

from kvferry.blocks.pool import BlockPool
from kvferry.blocks.retention import RetentionLimits, RetentionTable
from kvferry.engine.core import EngineCounters
from kvferry.engine.runner import EngineSnapshot
from kvferry.protocol.ids import BlockHash
from kvferry.server.instance import Instance
from kvferry.transport.registry import create_transport
from tests.support.fake_clock import FakeClock


class IdleEngine:
    """Retains two of its ten blocks for a minute and takes no step."""

    def __init__(self, clock: FakeClock) -> None:
        self.pool = BlockPool(10)
        self.retention = RetentionTable(self.pool, clock, RetentionLimits(duration_s=60))
        hashes = [BlockHash(bytes([number]) * 32) for number in range(2)]
        blocks = self.pool.allocate(2)
        for block, block_hash in zip(blocks, hashes, strict=True):
            self.pool.publish(block, block_hash)
        self.pool.drop(blocks)
        self.retention.retain(hashes)

    def snapshot(self) -> EngineSnapshot:
        return EngineSnapshot(0, 0, 0, self.pool.snapshot(), EngineCounters(), None)


def test_an_idle_instance_shows_no_retention_past_its_time() -> None:
    clock = FakeClock()
    nothing = cast(Any, None)
    instance = Instance(
        config=nothing,
        tokenizer=nothing,
        engine=cast(Any, IdleEngine(clock)),
        exchange=nothing,
        transport=create_transport("shm"),
        metrics=nothing,
        parts=contextlib.ExitStack(),
    )
    retained = instance.figures().retained
    assert (retained.num_conversations, retained.num_blocks, retained.share) == (1, 2, 0.2)
    clock.advance(60)
    retained = instance.figures().retained
    assert (retained.num_conversations, retained.num_blocks, retained.share) == (0, 0, 0.0)
    assert {reason: count for reason, count in retained.ends.items() if count} == {"expired": 1}
