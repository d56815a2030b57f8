"""Regions from shapes and strides, and what identifies a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.errors import ConfigError
from kvferry.vllm_plugin.layout import TensorShape, config_digest, regions_of, weights_digest


def _dense(address: int, *shape: int) -> TensorShape:
    strides: list[int] = []
    size = 1
    for count in reversed(shape):
        strides.insert(0, size)
        size *= count
    return TensorShape(address, tuple(shape), tuple(strides), 2)


def test_a_tensor_by_blocks_is_one_region() -> None:
    (region,) = regions_of({"a": _dense(64, 10, 3, 128, 16)}, 10)
    assert (region.address, region.num_blocks) == (64, 10)
    assert region.block_bytes == region.stride_bytes == 3 * 128 * 16 * 2


def test_keys_and_values_apart_are_two_regions() -> None:
    first, second = regions_of({"a": _dense(0, 2, 10, 16, 4, 8)}, 10)
    assert first.block_bytes == second.block_bytes == 16 * 4 * 8 * 2
    assert second.address == 10 * first.block_bytes


def test_each_layer_has_a_region_but_a_shared_tensor_counts_once() -> None:
    tensors = {"a": _dense(0, 10, 4), "b": _dense(4096, 10, 4), "c": _dense(0, 10, 4)}
    assert [region.address for region in regions_of(tensors, 10)] == [0, 4096]


def test_dimensions_in_another_order_in_memory_are_still_one_run() -> None:
    permuted = TensorShape(0, (10, 16, 4, 8), (512, 8, 128, 1), 2)
    (region,) = regions_of({"a": permuted}, 10)
    assert region.block_bytes == 1024


def test_several_kernel_blocks_make_one_block() -> None:
    (region,) = regions_of({"a": _dense(0, 40, 16, 8)}, 10)
    assert (region.num_blocks, region.block_bytes) == (10, 4 * 16 * 8 * 2)


def test_blocks_with_room_between_them_have_a_longer_stride() -> None:
    (region,) = regions_of({"a": TensorShape(0, (10, 4), (6, 1), 2)}, 10)
    assert (region.block_bytes, region.stride_bytes) == (8, 12)


@pytest.mark.parametrize(
    "tensor",
    [
        TensorShape(0, (10, 4, 4), (32, 8, 1), 2),
        TensorShape(0, (20, 4), (6, 1), 2),
        _dense(0, 7, 4),
        _dense(0, 3),
    ],
)
def test_a_block_that_is_not_one_run_is_refused(tensor: TensorShape) -> None:
    with pytest.raises(ConfigError, match="layer a"):
        regions_of({"a": tensor}, 10)


def test_no_tensors_are_refused() -> None:
    with pytest.raises(ConfigError, match="no KV caches"):
        regions_of({}, 10)


def test_a_configs_digest_is_of_what_changes_its_kv() -> None:
    config = {"rope_theta": 1, "_name_or_path": "/here"}
    assert config_digest(config, ()) == config_digest({**config, "_name_or_path": "/there"}, ())
    assert config_digest(config, ()) != config_digest({**config, "rope_theta": 2}, ())
    assert config_digest(config, ()) != config_digest(config, ("fp8",))


def test_weights_are_known_by_content_or_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"x" * 100)
    first = weights_digest(str(tmp_path), None)
    (tmp_path / "a.safetensors").write_bytes(b"x" * 99 + b"y")
    assert weights_digest(str(tmp_path), None) != first
    assert weights_digest("name/model", "main") == "name/model@main"
