"""Geometry as NIXL's descriptor arrays, lists of blocks as indices into them, and link metadata.

Knows these forms, not NIXL itself. Descriptors of a peer are made from the geometry in its
metadata, never from objects that it serialised.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from kvferry.transport.geometry import MAX_REGIONS, Geometry, Indices, RegionGeometry
from kvferry.transport.host import ProcessIdentity
from kvferry.transport.peer_watch import FarewellReference

MAX_DESCRIPTORS = 2**24

DescriptorIndices = npt.NDArray[np.int32]


class NixlMetadata(msgspec.Struct, frozen=True):
    """One link's end, as the peer sees it."""

    backend: Annotated[str, Meta(max_length=32)]
    agent_name: Annotated[str, Meta(min_length=1, max_length=128)]
    agent_metadata: Annotated[bytes, Meta(min_length=1, max_length=200_000)]
    regions: Annotated[tuple[RegionGeometry, ...], Meta(min_length=1, max_length=MAX_REGIONS)]
    process: ProcessIdentity
    farewell: FarewellReference


def registration_rows(geometry: Geometry) -> list[tuple[int, int, int, str]]:
    """Return one (address, bytes, device, "") per region, from its first byte to its last."""
    return [(region.start, region.span_bytes, region.device_index, "") for region in geometry]


def strided_rows(geometry: Geometry) -> npt.NDArray[np.uint64]:
    """Return rows of (address, block bytes, device, stride, count): all blocks, region by region.

    Block ``i`` of region ``r`` has index ``r * num_blocks + i`` in the list that NIXL makes of it.
    """
    return np.array(
        [
            (
                region.start,
                region.block_bytes,
                region.device_index,
                region.stride_bytes,
                region.num_blocks,
            )
            for region in geometry
        ],
        dtype=np.uint64,
    )


def num_descriptors(geometry: Geometry) -> int:
    """Return how many descriptors NIXL makes of ``strided_rows``."""
    return sum(region.num_blocks for region in geometry)


def descriptor_indices(blocks: Indices, geometry: Geometry) -> DescriptorIndices:
    """Return the indices of ``blocks`` in every region, region by region.

    Within a region the order of ``blocks`` is kept, so that runs of neighbours stay together.
    """
    first = np.arange(len(geometry), dtype=np.int64) * geometry[0].num_blocks
    return (first[:, None] + blocks[None, :]).reshape(-1).astype(np.int32)
