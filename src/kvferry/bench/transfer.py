"""Measures moving blocks against one plain copy of the same bytes by the same transport.

Two processes, both on this host. The plain copy is one block as large as all that is moved, over a
link of its own; the two are measured in turns, so that a busy machine slows both. The other process
is this module run as a program: it has a pool, and ends when its input does.
"""

from __future__ import annotations

import random
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from kvferry.bench.report import Report, format_table
from kvferry.errors import ConfigError, TransferFailedError
from kvferry.transport.base import (
    Link,
    MemoryRegion,
    Transfer,
    TransferStatus,
    Transport,
    address_of,
)
from kvferry.transport.registry import create_transport

Operation = Literal["READ", "WRITE"]
OPERATIONS: tuple[Operation, ...] = ("READ", "WRITE")
_POOL_FACTOR = 4
"""Blocks in each pool for every block moved, so that scattered ones lie far apart."""
_NUM_WARM_UPS = 2
_SERVE_INTERVAL_S = 0.0005
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class CopyMeasurement:
    """Medians of one measurement; all speeds in bytes a second."""

    transport: str
    operation: Operation
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
    operation: Operation = "READ"
    num_bytes: int = 64 * 1024 * 1024
    block_bytes: int = 360 * 1024
    is_scattered: bool = False
    num_repeats: int = 15


def measure_copy(plan: CopyPlan, seed: int = 1) -> CopyMeasurement:
    """Carry out ``plan``.

    Raises ``ConfigError`` if it makes no sense, ``TransferError`` if bytes could not be moved.
    """
    num_moved = plan.num_bytes // plan.block_bytes
    if num_moved < 1 or plan.num_repeats < 1:
        raise ConfigError("a measurement takes at least one block and one repeat")
    moved_bytes, rng = num_moved * plan.block_bytes, random.Random(seed)
    local, remote = _choose(plan, num_moved, rng), _choose(plan, num_moved, rng)
    pairs: list[tuple[float, float]] = []
    with (
        _Side(plan, _POOL_FACTOR * num_moved, plan.block_bytes) as blocks,
        _Side(plan, 1, moved_bytes) as plain,
    ):
        for _ in range(_NUM_WARM_UPS + plan.num_repeats):
            pairs.append((blocks.time_s(local, remote), plain.time_s([0], [0])))
    counted = pairs[_NUM_WARM_UPS:]
    return CopyMeasurement(
        transport=plan.transport,
        operation=plan.operation,
        num_bytes=moved_bytes,
        block_bytes=plan.block_bytes,
        is_scattered=plan.is_scattered,
        num_repeats=len(counted),
        blocks_bytes_per_s=moved_bytes / statistics.median(blocks_s for blocks_s, _ in counted),
        plain_bytes_per_s=moved_bytes / statistics.median(plain_s for _, plain_s in counted),
        ratio=statistics.median(plain_s / blocks_s for blocks_s, plain_s in counted),
    )


def _choose(plan: CopyPlan, num_moved: int, rng: random.Random) -> list[int]:
    pool = range(_POOL_FACTOR * num_moved)
    return rng.sample(pool, num_moved) if plan.is_scattered else list(pool[:num_moved])


def _open_pool(transport_name: str, num_blocks: int, block_bytes: int) -> Transport:
    """Return a transport with one registered pool."""
    transport = create_transport(transport_name)
    view = transport.allocate(num_blocks * block_bytes)
    region = MemoryRegion(address_of(view), block_bytes, block_bytes, num_blocks)
    transport.register([region])
    return transport


class _Side:
    """A pool here, one in another process, and the link between them."""

    def __init__(self, plan: CopyPlan, num_blocks: int, block_bytes: int) -> None:
        self._operation = plan.operation
        self._transport = _open_pool(plan.transport, num_blocks, block_bytes)
        self._peer = subprocess.Popen(
            [sys.executable, "-m", __name__, plan.transport, str(num_blocks), str(block_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        try:
            self._link: Link = self._transport.open_link("measured")
            self._link.connect(bytes.fromhex(self._hear()))
            self._ask(self._link.local_metadata.hex())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> _Side:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def time_s(self, local: Sequence[int], remote: Sequence[int]) -> float:
        """Move the blocks; return the seconds from before posting to DONE."""
        self._ask("serve")
        before_s = time.perf_counter()
        post = self._link.read if self._operation == "READ" else self._link.write
        transfer = post(local, remote)
        self._wait_done(transfer)
        elapsed_s = time.perf_counter() - before_s
        self._link.release(transfer)
        self._ask("rest")
        return elapsed_s

    def close(self) -> None:
        """Close the pool and end the other process."""
        self._transport.close()
        self._peer.kill()
        self._peer.wait(_TIMEOUT_S)
        for stream in (self._peer.stdin, self._peer.stdout):
            if stream is not None:
                stream.close()

    def _wait_done(self, transfer: Transfer) -> None:
        """Poll without a pause until ``transfer`` has ended."""
        deadline_s = time.perf_counter() + _TIMEOUT_S
        while (status := self._link.poll(transfer)) is TransferStatus.IN_PROGRESS:
            if time.perf_counter() > deadline_s:
                raise TransferFailedError(f"still in progress after {_TIMEOUT_S:.0f} s")
        if status is not TransferStatus.DONE:
            raise TransferFailedError("the measured transfer failed")

    def _ask(self, line: str) -> None:
        assert self._peer.stdin is not None
        self._peer.stdin.write(f"{line}\n".encode())
        self._hear()

    def _hear(self) -> str:
        stdout = self._peer.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], _TIMEOUT_S)[0]:
            raise TransferFailedError(f"the other process said nothing for {_TIMEOUT_S:.0f} s")
        line = stdout.readline()
        if not line:
            raise TransferFailedError(f"the other process ended with {self._peer.wait()}")
        return line.decode().strip()


def _serve(transport_name: str, num_blocks: int, block_bytes: int) -> None:
    """Be the other process: between two lines of input, drive the link; then rest until the next.

    Each line is answered once it is obeyed.
    """
    transport = _open_pool(transport_name, num_blocks, block_bytes)
    link = transport.open_link("starter")
    _say(link.local_metadata.hex())
    link.connect(bytes.fromhex(sys.stdin.readline()))
    _say("connected")
    while sys.stdin.readline():
        _say("serving")
        while not select.select([sys.stdin], [], [], _SERVE_INTERVAL_S)[0]:
            link.progress()
        sys.stdin.readline()
        _say("resting")
    transport.close()


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def report_copies(measured: Sequence[CopyMeasurement]) -> Report:
    """Return a table of speeds in GiB/s and their ratios."""
    rows = [
        [
            item.transport,
            item.operation,
            "scattered" if item.is_scattered else "contiguous",
            f"{item.num_bytes / 2**20:.1f}",
            f"{item.blocks_bytes_per_s / 2**30:.2f}",
            f"{item.plain_bytes_per_s / 2**30:.2f}",
            f"{item.ratio:.3f}",
        ]
        for item in measured
    ]
    header = ["transport", "does", "blocks", "MiB", "blocks GiB/s", "plain copy GiB/s", "ratio"]
    fields = {"measured": [asdict(item) for item in measured]}
    return Report("transfer", 1, fields, format_table(header, rows))


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
