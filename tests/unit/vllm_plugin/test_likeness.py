"""What is compared of two vLLMs beyond the layout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.vllm_plugin.layout import TensorShape
from kvferry.vllm_plugin.likeness import (
    LayerKind,
    cache_compatibility,
    cache_dtype_name,
    chat_template_digest,
    rope_max_model_len,
    tokenizer_digest,
)

KIND = LayerKind("CPU_ATTN", "vec", "bfloat16")
BLOCKS = 10


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
