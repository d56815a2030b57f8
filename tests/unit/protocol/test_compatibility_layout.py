from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given

from kvferry.errors import IncompatiblePeerError
from kvferry.protocol.compatibility import KVLayout
from tests.unit.protocol.message_strategies import layouts

LAYOUT = KVLayout(
    model_name="example",
    weights_digest="w1",
    config_digest="c1",
    kv_dtype="bfloat16",
    num_layers=30,
    num_kv_heads=3,
    head_size=64,
    block_size_tokens=16,
    block_bytes=368_640,
    attention_backend="paged-cpu",
    region_strides=(368_640, 12_288, 128, 2),
)
OTHER_VALUES: dict[str, Any] = {
    "weights_digest": "w2",
    "config_digest": "c2",
    "kv_dtype": "float32",
    "num_layers": 31,
    "num_kv_heads": 4,
    "head_size": 128,
    "block_size_tokens": 32,
    "block_bytes": 1,
    "attention_backend": "another",
    "region_strides": (1, 2),
    "num_regions": 2,
    "kv_scales_digest": "s",
    "tensor_parallel_size": 2,
    "tensor_parallel_rank": 1,
}


def changed(**fields: object) -> KVLayout:
    return msgspec.structs.replace(LAYOUT, **fields)


def test_every_field_but_the_name_is_compared() -> None:
    assert set(OTHER_VALUES) == set(KVLayout.__struct_fields__) - {"model_name"}


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_a_difference_is_refused_by_name_with_both_values(name: str) -> None:
    theirs = changed(**{name: OTHER_VALUES[name]})
    with pytest.raises(IncompatiblePeerError) as caught:
        LAYOUT.require_equal(theirs)
    assert caught.value.field == name
    assert caught.value.ours == getattr(LAYOUT, name)
    assert caught.value.theirs == OTHER_VALUES[name]
    assert name in str(caught.value)


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_every_compared_field_is_in_the_fingerprint(name: str) -> None:
    assert changed(**{name: OTHER_VALUES[name]}).fingerprint() != LAYOUT.fingerprint()


def test_another_name_for_the_same_weights_is_no_difference() -> None:
    renamed = changed(model_name="alias")
    LAYOUT.require_equal(renamed)
    assert renamed.fingerprint() == LAYOUT.fingerprint()


@pytest.mark.parametrize("name", ["weights_digest", "config_digest"])
def test_another_model_is_named_in_the_error(name: str) -> None:
    theirs = changed(model_name="other", **{name: "x"})
    with pytest.raises(IncompatiblePeerError, match=r"\(example\).*'x \(other\)'"):
        LAYOUT.require_equal(theirs)


def test_the_first_differing_field_is_the_one_named() -> None:
    with pytest.raises(IncompatiblePeerError) as caught:
        LAYOUT.require_equal(changed(head_size=1, kv_dtype="float32"))
    assert caught.value.field == "kv_dtype"


@given(layouts)
def test_a_layout_keeps_its_fingerprint_over_json_and_msgpack(layout: KVLayout) -> None:
    assert len(layout.fingerprint()) == 32
    for module in (msgspec.json, msgspec.msgpack):
        again = module.decode(module.encode(layout), type=KVLayout)
        layout.require_equal(again)
        assert again.fingerprint() == layout.fingerprint()


def test_a_field_at_its_default_is_not_sent_so_that_older_peers_understand() -> None:
    assert "num_regions" not in msgspec.to_builtins(LAYOUT)
    assert msgspec.to_builtins(changed(num_regions=2))["num_regions"] == 2
