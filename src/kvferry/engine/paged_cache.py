"""The memory that holds KV: block numbers to tensors.

Blocks are laid out block-first, ``[block, layer, K or V, token, head, head_size]``, so one block is
one contiguous run over all layers. Owns the views on that memory, and its allocation where no
transport does that; does not know who uses a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvferry.errors import CapacityError, ConfigError

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


def allocate_device_memory(device: torch.device, num_bytes: int) -> torch.Tensor:
    """Return ``num_bytes`` zeroed bytes on an accelerator, which no transport allocates.

    Raises ``CapacityError``.
    """
    try:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"{num_bytes} bytes of KV cache do not fit on {device}: {error}; "
            "lower --kv-cache-gib or --num-blocks"
        ) from error
