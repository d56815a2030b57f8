"""Regions from shapes and strides, and what is compared of two vLLMs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.errors import ConfigError
from kvferry.vllm_plugin.likeness import (
    LayerKind,
    TensorShape,
    cache_compatibility,
    cache_dtype_name,
    chat_template_digest,
    config_digest,
    regions_of,
    rope_max_model_len,
    tokenizer_digest,
    weights_digest,
)

KIND = LayerKind("CPU_ATTN", "vec", "bfloat16")
BLOCKS = 10


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


def tensor(num_blocks: int = BLOCKS, *, inner: tuple[int, int, int] = (64, 8, 1)) -> TensorShape:
    """Blocks of two heads, eight tokens and eight elements."""
    return TensorShape(4096, (num_blocks, 2, 8, 8), (128, *inner), 2)


def digest(
    shape: TensorShape, kind: LayerKind = KIND, num_blocks: int = BLOCKS, layout: str = "LBHNC"
) -> str:
    names = ("layers.0", "layers.1")
    tensors, kinds = dict.fromkeys(names, shape), dict.fromkeys(names, kind)
    return cache_compatibility(tensors, kinds, num_blocks, layout).kv_tensors_digest


def test_the_number_of_blocks_and_the_address_are_left_out() -> None:
    more = replace(tensor(30), address=1 << 20)
    assert digest(tensor()) == digest(more, num_blocks=30)
    # Keys and values apart: the outermost stride is over all blocks.
    few = TensorShape(0, (2, 10, 8, 8), (640, 64, 8, 1), 2)
    many = TensorShape(0, (2, 30, 8, 8), (1920, 64, 8, 1), 2)
    assert digest(few) == digest(many, num_blocks=30)


def test_all_else_is_in_the_digest() -> None:
    digests = [
        digest(tensor()),
        digest(tensor(inner=(8, 16, 1))),  # the same shape, heads within tokens
        digest(TensorShape(4096, (BLOCKS, 4, 4, 8), (128, 32, 8, 1), 2)),
        digest(replace(tensor(), element_bytes=1)),
        digest(replace(tensor(20))),  # two kernel blocks to a block
        digest(tensor(), replace(KIND, backend="FLASH_ATTN")),
        digest(tensor(), replace(KIND, instruction_set="amx")),
        digest(tensor(), replace(KIND, cache_dtype="fp8_e4m3")),
        digest(tensor(), layout="LBNHC"),
    ]
    assert len(set(digests)) == len(digests)


def test_every_layer_counts_and_their_order() -> None:
    kinds = {"a": KIND, "b": KIND}
    one, other = tensor(), tensor(inner=(8, 16, 1))
    seen = {
        cache_compatibility(tensors, kinds, BLOCKS, "").kv_tensors_digest
        for tensors in ({"a": one, "b": one}, {"a": one, "b": other}, {"b": one, "a": other})
    }
    assert len(seen) == 3


def test_names_are_told_beside_the_digest() -> None:
    kinds = {"a": KIND, "b": replace(KIND, cache_dtype="fp8_e4m3")}
    told = cache_compatibility(dict.fromkeys(kinds, tensor()), kinds, BLOCKS, "LBHNC")
    assert (told.attention_backend, told.instruction_set) == ("CPU_ATTN", "vec")
    assert (told.kv_cache_layout, told.kv_cache_dtype) == ("LBHNC", "bfloat16,fp8_e4m3")


def test_one_kind_of_cache_has_one_name() -> None:
    assert cache_dtype_name("auto", "bfloat16") == cache_dtype_name("bfloat16", "bfloat16")
    assert cache_dtype_name("fp8", "uint8") == "fp8_e4m3"
    assert cache_dtype_name("fp8_e5m2", "uint8") == "fp8_e5m2"


@pytest.mark.parametrize(
    ("rope", "is_told"),
    [
        (None, False),
        ({"rope_type": "default", "rope_theta": 1e4}, False),
        ({"rope_type": "llama3"}, False),
        ({"type": "yarn"}, False),
        ({"rope_type": "longrope"}, True),
        ({"full_attention": {"rope_type": "default"}, "other": {"rope_type": "longrope"}}, True),
        ({"rope_type": "not known yet"}, True),
    ],
)
def test_the_longest_sequence_is_told_where_positions_depend_on_it(
    rope: object, is_told: bool
) -> None:
    assert rope_max_model_len({"rope_parameters": rope}, 4096) == (4096 if is_told else 0)


def write_tokenizer(folder: Path, **changes: object) -> str:
    folder.mkdir()
    content: dict[str, object] = {"model": {"vocab": {"a": 0}}, "truncation": None, "padding": None}
    config: dict[str, object] = {
        "add_bos_token": True,
        "chat_template": "x",
        "name_or_path": folder.name,
    }
    content |= {name: value for name, value in changes.items() if name in content}
    config |= {name: value for name, value in changes.items() if name not in content}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_tokenizer_is_known_by_its_content(tmp_path: Path) -> None:
    ours = write_tokenizer(tmp_path / "ours")
    same = write_tokenizer(tmp_path / "same", padding={"length": 8})
    assert tokenizer_digest(ours, None) == tokenizer_digest(same, "main")
    assert chat_template_digest(ours) == chat_template_digest(same) != ""
    others = [
        write_tokenizer(tmp_path / "vocabulary", model={"vocab": {"b": 0}}),
        write_tokenizer(tmp_path / "bos", add_bos_token=False),
    ]
    assert tokenizer_digest(ours, None) not in [tokenizer_digest(other, None) for other in others]
    template = write_tokenizer(tmp_path / "template", chat_template="y")
    assert tokenizer_digest(template, None) == tokenizer_digest(ours, None)
    assert chat_template_digest(template) != chat_template_digest(ours)


def test_a_template_in_a_file_of_its_own_goes_first(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "ours")
    before = chat_template_digest(folder)
    (tmp_path / "ours" / "chat_template.jinja").write_text("z")
    assert chat_template_digest(folder) not in ("", before)


def test_a_tokenizer_that_is_no_folder_is_known_by_name_and_revision(tmp_path: Path) -> None:
    names = [("org/model", None), ("org/model", "v2"), ("org/other", None), (str(tmp_path), None)]
    assert len({tokenizer_digest(*name) for name in names}) == len(names)
    assert chat_template_digest("org/model") == ""
