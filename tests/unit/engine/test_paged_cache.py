from __future__ import annotations

import pytest
import torch

from kvferry.engine.paged_cache import CacheShape, PagedCache
from kvferry.errors import ConfigError

SHAPE = CacheShape(
    num_layers=3, num_kv_heads=2, head_size=4, block_size_tokens=8, dtype=torch.bfloat16
)


def test_a_block_is_one_run_over_all_layers() -> None:
    memory = bytearray(5 * SHAPE.block_bytes)
    cache = PagedCache(SHAPE, memoryview(memory))
    cache.blocks[2].fill_(1.0)
    filled = [index for index, byte in enumerate(memory) if byte]
    assert filled[0] // SHAPE.block_bytes == filled[-1] // SHAPE.block_bytes == 2
    assert len(filled) == SHAPE.block_bytes  # both bytes of a bfloat16 1.0 (0x3f80) are set
    block = cache.blocks[2].reshape(-1).view(torch.uint8)
    assert bytes(block.numpy()) == bytes(memory[2 * SHAPE.block_bytes : 3 * SHAPE.block_bytes])


def test_strides_are_those_of_the_tensor() -> None:
    cache = PagedCache(SHAPE, memoryview(bytearray(2 * SHAPE.block_bytes)))
    assert tuple(2 * stride for stride in cache.blocks.stride()) == SHAPE.strides_bytes
    assert SHAPE.strides_bytes[0] == SHAPE.block_bytes


def test_pages_and_slots_are_rows_of_the_same_memory() -> None:
    cache = PagedCache(SHAPE, memoryview(bytearray(4 * SHAPE.block_bytes)))
    block, layer, value, offset = 3, 1, 1, 5
    cache.blocks[block, layer, value, offset] = torch.arange(8).view(2, 4)
    page = (block * SHAPE.num_layers + layer) * 2 + value
    slot = page * SHAPE.block_size_tokens + offset
    assert cache.slots[slot].tolist() == list(range(8))
    assert cache.pages[page].view(8, 8)[offset].tolist() == list(range(8))


def test_a_remainder_is_left_alone() -> None:
    cache = PagedCache(SHAPE, memoryview(bytearray(2 * SHAPE.block_bytes + 7)))
    assert cache.num_blocks == 2
    assert cache.address == cache.blocks.data_ptr()


def test_memory_for_no_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="less than one block"):
        PagedCache(SHAPE, memoryview(bytearray(SHAPE.block_bytes - 1)))
