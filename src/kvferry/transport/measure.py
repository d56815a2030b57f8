"""Measures moving blocks against one plain copy of the same bytes by the same transport.

Two processes, both on this host. The plain copy is one block as large as all that is moved, over a
link of its own; the two are measured in turns, so that a busy machine slows both.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvferry.errors import ConfigError, TransferFailedError
from kvferry.transport.base import Link, TransferStatus
from kvferry.transport.peer_process import Command, PeerProcess, PeerSetup, Pool, finish

POOL_FACTOR = 4
"""Blocks in each pool for every block moved, so that scattered ones lie far apart."""


@dataclass(frozen=True, slots=True)
class CopyMeasurement:
    """Medians of one measurement; all speeds in bytes a second."""

    transport: str
    operation: Literal["READ", "WRITE"]
    num_bytes: int
    block_bytes: int
    is_scattered: bool
    num_repeats: int
    blocks_bytes_per_s: float
    plain_bytes_per_s: float
    ratio: float
    """Median over the repeats of blocks' speed by the plain copy's beside it."""


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """What to move, and how often."""

    transport: str = "nixl"
    options: dict[str, str | None] = field(default_factory=dict)
    operation: Literal["READ", "WRITE"] = "READ"
    num_bytes: int = 64 * 1024 * 1024
    block_bytes: int = 360 * 1024
    is_scattered: bool = False
    num_repeats: int = 15
    num_warm_ups: int = 2


class _Side:
    """A pool here, one in another process, and the link between them."""

    def __init__(self, plan: CopyPlan, num_blocks: int, block_bytes: int) -> None:
        setup = PeerSetup(plan.transport, plan.options, num_blocks, block_bytes)
        self._pool = Pool(setup)
        self._peer = PeerProcess(setup)
        self._operation = plan.operation
        try:
            self._link: Link = self._pool.transport.open_link("measured")
            self._link.connect(self._peer.metadata)
            self._peer.ask(Command("connect", metadata=self._link.local_metadata))
            self._peer.ask(Command("fill", value=1))
        except BaseException:
            self._peer.kill()
            raise

    def time_s(self, local: Sequence[int], remote: Sequence[int]) -> float:
        """Move the blocks; return the seconds from before posting to DONE."""
        self._peer.ask(Command("serve", value=1))
        before = time.perf_counter()
        post = self._link.read if self._operation == "READ" else self._link.write
        transfer = post(local, remote)
        if finish(self._link, transfer) is not TransferStatus.DONE:
            raise TransferFailedError("the measured transfer failed")
        elapsed_s = time.perf_counter() - before
        self._link.release(transfer)
        self._peer.ask(Command("serve", value=0))
        return elapsed_s

    def close(self) -> None:
        self._pool.transport.close()
        self._peer.kill()


def measure_copy(plan: CopyPlan, seed: int = 1) -> CopyMeasurement:
    """Carry out ``plan``.

    Raises ``ConfigError`` if it makes no sense, ``TransferError`` if bytes could not be moved.
    """
    num_moved = plan.num_bytes // plan.block_bytes
    if num_moved < 1 or plan.num_repeats < 1:
        raise ConfigError("a measurement takes at least one block and one repeat")
    moved_bytes = num_moved * plan.block_bytes
    local, remote = _choose(plan, num_moved, random.Random(seed))
    pairs: list[tuple[float, float]] = []
    blocks = _Side(plan, POOL_FACTOR * num_moved, plan.block_bytes)
    try:
        plain = _Side(plan, 1, moved_bytes)
        try:
            for _ in range(plan.num_warm_ups + plan.num_repeats):
                pairs.append((blocks.time_s(local, remote), plain.time_s([0], [0])))
        finally:
            plain.close()
    finally:
        blocks.close()
    return _summary(plan, moved_bytes, pairs[plan.num_warm_ups :])


def _choose(plan: CopyPlan, num_moved: int, rng: random.Random) -> tuple[list[int], list[int]]:
    if not plan.is_scattered:
        return list(range(num_moved)), list(range(num_moved))
    pool = range(POOL_FACTOR * num_moved)
    return rng.sample(pool, num_moved), rng.sample(pool, num_moved)


def _summary(
    plan: CopyPlan, moved_bytes: int, pairs: Sequence[tuple[float, float]]
) -> CopyMeasurement:
    return CopyMeasurement(
        transport=plan.transport,
        operation=plan.operation,
        num_bytes=moved_bytes,
        block_bytes=plan.block_bytes,
        is_scattered=plan.is_scattered,
        num_repeats=len(pairs),
        blocks_bytes_per_s=moved_bytes / statistics.median(blocks for blocks, _ in pairs),
        plain_bytes_per_s=moved_bytes / statistics.median(plain for _, plain in pairs),
        ratio=statistics.median(plain / blocks for blocks, plain in pairs),
    )
