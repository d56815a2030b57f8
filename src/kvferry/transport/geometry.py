"""Where blocks lie: checked descriptions of regions, and lists of blocks as runs of bytes.

Knows addresses and counts only, not how bytes move.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from kvferry.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from kvferry.transport.base import MemoryKind, MemoryRegion

MAX_REGIONS = 2048
MAX_BLOCKS = 2**24
_END_OF_ADDRESSES = 2**62

Indices = npt.NDArray[np.int64]
_Size = Annotated[int, Meta(ge=1, lt=2**48)]


class RegionGeometry(msgspec.Struct, frozen=True, array_like=True):
    """A ``MemoryRegion`` as it crosses the wire. ``start`` is an address or an offset."""

    start: Annotated[int, Meta(ge=0, le=_END_OF_ADDRESSES - 1)]
    block_bytes: _Size
    stride_bytes: _Size
    num_blocks: Annotated[int, Meta(ge=1, le=MAX_BLOCKS)]
    kind: MemoryKind = MemoryKind.DRAM
    device_index: Annotated[int, Meta(ge=0, le=65_535)] = 0

    @property
    def span_bytes(self) -> int:
        """Bytes from the first block's first to the last block's last."""
        return self.stride_bytes * (self.num_blocks - 1) + self.block_bytes


Geometry = tuple[RegionGeometry, ...]


def describe(regions: Sequence[MemoryRegion]) -> Geometry:
    """Return the geometry of local ``regions``. Raises ``ConfigError`` if it makes no sense."""
    described = tuple(
        RegionGeometry(
            region.address,
            region.block_bytes,
            region.stride_bytes,
            region.num_blocks,
            region.kind,
            region.device_index,
        )
        for region in regions
    )
    problem = _problem_of(described)
    if problem:
        raise ConfigError(f"memory regions: {problem}")
    return described


def require_matching(ours: Geometry, theirs: Geometry) -> None:
    """Raise ``RemoteProtocolError`` unless every block of ``theirs`` fits one of ``ours``.

    Strides, counts of blocks and kinds of memory may differ; sizes of blocks may not.
    """
    problem = _problem_of(theirs)
    if problem:
        raise RemoteProtocolError(f"the peer's regions: {problem}")
    sizes = [region.block_bytes for region in ours]
    their_sizes = [region.block_bytes for region in theirs]
    if sizes != their_sizes:
        raise RemoteProtocolError(
            f"the peer's blocks are {len(their_sizes)} runs of {_shown(their_sizes)} bytes, "
            f"ours {len(sizes)} of {_shown(sizes)}"
        )


def pair_blocks(
    local_blocks: Sequence[int], remote_blocks: Sequence[int], num_local: int, num_remote: int
) -> tuple[Indices, Indices]:
    """Return both lists as arrays, ordered by local number so that neighbours stand together.

    Raises ``LocalProtocolError`` for unequal lengths or numbers out of range.
    """
    if len(local_blocks) != len(remote_blocks):
        raise LocalProtocolError(
            f"{len(local_blocks)} local blocks for {len(remote_blocks)} remote ones"
        )
    local = _checked(local_blocks, num_local, "local")
    remote = _checked(remote_blocks, num_remote, "remote")
    order = np.argsort(local, kind="stable")
    return local[order], remote[order]


def runs(
    local: Indices, remote: Indices, ours: RegionGeometry, theirs: RegionGeometry
) -> Iterator[tuple[int, int, int]]:
    """Yield (local start, remote start, bytes) of each run in one region, neighbours coalesced."""
    if not len(local):
        return
    is_dense = ours.stride_bytes == ours.block_bytes and theirs.stride_bytes == theirs.block_bytes
    if is_dense:
        follows = (np.diff(local) == 1) & (np.diff(remote) == 1)
        first = np.concatenate(([0], np.flatnonzero(~follows) + 1))
    else:
        first = np.arange(len(local))
    counts = np.diff(np.concatenate((first, [len(local)])))
    local_starts = ours.start + local[first] * ours.stride_bytes
    remote_starts = theirs.start + remote[first] * theirs.stride_bytes
    sizes = counts * ours.block_bytes
    yield from zip(local_starts.tolist(), remote_starts.tolist(), sizes.tolist(), strict=True)


def block_bytes_of(geometry: Geometry) -> int:
    """Bytes of one block over all regions."""
    return sum(region.block_bytes for region in geometry)


def _checked(blocks: Sequence[int], num_blocks: int, side: str) -> Indices:
    try:
        numbers = np.asarray(blocks, dtype=np.int64).reshape(-1)
    except (OverflowError, TypeError, ValueError) as error:
        raise LocalProtocolError(f"{side} block numbers: {error}") from error
    if len(numbers) and not (numbers.min() >= 0 and numbers.max() < num_blocks):
        raise LocalProtocolError(
            f"{side} block numbers {numbers.min()} to {numbers.max()} of a pool of {num_blocks}"
        )
    return numbers


def _problem_of(geometry: Geometry) -> str:
    if not 1 <= len(geometry) <= MAX_REGIONS:
        return f"{len(geometry)} of them, not 1 to {MAX_REGIONS}"
    if len({region.num_blocks for region in geometry}) != 1:
        return "they differ in their number of blocks"
    if len({(region.kind, region.device_index) for region in geometry}) != 1:
        return "they lie on more than one device"
    for index, region in enumerate(geometry):
        problem = _problem_of_region(region)
        if problem:
            return f"number {index} {problem}"
    return ""


def _problem_of_region(region: RegionGeometry) -> str:
    if not 1 <= region.num_blocks <= MAX_BLOCKS:
        return f"has {region.num_blocks} blocks"
    if region.block_bytes < 1 or region.start < 0:
        return f"starts at {region.start} with blocks of {region.block_bytes} bytes"
    if region.stride_bytes < region.block_bytes:
        return f"has a stride of {region.stride_bytes} for blocks of {region.block_bytes} bytes"
    if region.start + region.span_bytes > _END_OF_ADDRESSES:
        return "reaches beyond the end of memory"
    return ""


def _shown(sizes: list[int]) -> str:
    return ", ".join(str(size) for size in sorted(set(sizes))[:4])
