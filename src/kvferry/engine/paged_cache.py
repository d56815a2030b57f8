"""The memory that holds KV: block numbers to tensors.

Blocks are laid out block-first, ``[block, layer, K or V, token, head, head_size]``, so one block is
one contiguous run over all layers. Owns the views on that memory; knows neither who uses a block
nor how the memory was allocated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvferry.errors import ConfigError

KEY_AND_VALUE = 2


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Geometry of a model's KV. ``block_bytes`` is of one block over all layers."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    block_size_tokens: int
    dtype: torch.dtype

    @property
    def token_width(self) -> int:
        """Elements of one token's keys in one layer."""
        return self.num_kv_heads * self.head_size

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        elements = self.num_layers * KEY_AND_VALUE * self.block_size_tokens * self.token_width
        return elements * self.dtype.itemsize

    @property
    def strides_bytes(self) -> tuple[int, ...]:
        """Byte strides of ``[block, layer, K or V, token, head, head_size]``."""
        element = self.dtype.itemsize
        head = self.head_size * element
        token = self.token_width * element
        half = self.block_size_tokens * token
        layer = KEY_AND_VALUE * half
        return (self.num_layers * layer, layer, half, token, head, element)


class PagedCache:
    """Views on KV memory that somebody else allocated and keeps alive.

    ``blocks``: ``[num_blocks, num_layers, 2, block_size, kv_heads, head_size]``.
    ``pages``: the same as rows of one layer's keys or values of one block; row
    ``(block * num_layers + layer) * 2 + (0 for keys, 1 for values)``.
    ``slots``: the same as rows of one token; row ``page * block_size + offset``.
    """

    def __init__(self, shape: CacheShape, memory: memoryview | torch.Tensor) -> None:
        """Use ``memory``: a writable memoryview of format B, or a uint8 tensor on the device.

        Whole blocks are used; a remainder is left alone. Raises ``ConfigError`` if there is no
        room for one block.
        """
        if isinstance(memory, torch.Tensor):
            raw = memory
        else:
            raw = torch.frombuffer(memory, dtype=torch.uint8)
        self.shape = shape
        self.num_blocks = raw.numel() // shape.block_bytes
        if self.num_blocks == 0:
            raise ConfigError(
                f"KV memory of {raw.numel()} bytes is less than one block of {shape.block_bytes}"
            )
        used = raw[: self.num_blocks * shape.block_bytes].view(shape.dtype)
        size = shape.block_size_tokens
        layers = (self.num_blocks, shape.num_layers, KEY_AND_VALUE)
        self.blocks = used.view(*layers, size, shape.num_kv_heads, shape.head_size)
        self.pages = used.view(-1, size * shape.token_width)
        self.slots = used.view(-1, shape.token_width)

    @property
    def address(self) -> int:
        """Address of block 0."""
        return self.blocks.data_ptr()

    def release(self) -> None:
        """Let go of the memory, so that its owner can give it back; the cache is of no use then."""
        self.blocks = self.pages = self.slots = torch.empty(0, dtype=self.shape.dtype)
        self.num_blocks = 0

    def block_as_bytes(self, block: int) -> bytes:
        """Return a copy of one block's bytes, for digests and tests."""
        return bytes(self.blocks[block].reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
