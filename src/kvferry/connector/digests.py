"""Digests of blocks as they are in memory, for transfers that are verified."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence

from kvferry.errors import ConfigError
from kvferry.protocol.ids import BlockNumber
from kvferry.transport.base import MemoryKind, MemoryRegion


class BlockDigester:
    """Reads blocks where this process can: in the host's memory.

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
