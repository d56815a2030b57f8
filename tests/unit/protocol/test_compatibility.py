"""What peers compare beyond the layout, and that a release without it is accepted."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvferry.errors import IncompatiblePeerError
from kvferry.protocol.codec import decode, encode
from kvferry.protocol.compatibility import REMEDIES, Compatibility, KVLayout, require_compatible
from kvferry.protocol.ids import PROTOCOL_VERSION, Epoch, InstanceId
from kvferry.protocol.messages import Hello, InstanceInfo
from tests.unit.protocol.test_compatibility_layout import LAYOUT

OURS = Compatibility(
    attention_backend="CPU_ATTN",
    instruction_set="vec",
    kv_cache_layout="LBHNC",
    kv_cache_dtype="fp8_e4m3",
    rope_max_model_len=4096,
    kv_tensors_digest="1" * 32,
    tokenizer_digest="2" * 32,
    chat_template_digest="3" * 32,
    max_model_len=4096,
)
OTHER_VALUES: dict[str, Any] = {
    "attention_backend": "FLASH_ATTN",
    "instruction_set": "amx",
    "kv_cache_layout": "LBNHC",
    "kv_cache_dtype": "fp8_e5m2",
    "rope_max_model_len": 8192,
    "kv_tensors_digest": "a" * 32,
    "tokenizer_digest": "b" * 32,
    "chat_template_digest": "c" * 32,
}
OPTIONS = {
    "attention_backend": "--attention-backend",
    "kv_cache_layout": "VLLM_KV_CACHE_LAYOUT",
    "kv_cache_dtype": "--kv-cache-dtype",
    "rope_max_model_len": "--max-model-len",
    "tokenizer_digest": "--tokenizer",
    "chat_template_digest": "--chat-template",
    "instruction_set": "processors",
    "kv_tensors_digest": "--attention-backend",
}


def changed(**fields: object) -> Compatibility:
    return msgspec.structs.replace(OURS, **fields)


def hello(layout: KVLayout, compatibility: Compatibility | None) -> Hello:
    return Hello(InstanceId("i"), Epoch(1), layout, "shm", b"", compatibility)


def test_every_field_but_the_longest_sequence_is_compared() -> None:
    assert set(OTHER_VALUES) == set(Compatibility.__struct_fields__) - {"max_model_len"}
    require_compatible(OURS, changed(max_model_len=1))


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_a_difference_is_refused_by_name_with_both_values_and_the_option(name: str) -> None:
    theirs = changed(**{name: OTHER_VALUES[name]})
    with pytest.raises(IncompatiblePeerError) as caught:
        require_compatible(OURS, theirs)
    error = caught.value
    assert error.field == name
    for value, said in ((getattr(OURS, name), error.ours), (OTHER_VALUES[name], error.theirs)):
        is_digest = name.endswith("digest")
        assert said == (f"{value[:12]}…" if is_digest else value)
        assert repr(said) in str(error)
    assert OPTIONS[name] in str(error)


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_what_one_side_does_not_know_is_not_compared(name: str) -> None:
    unknown = changed(**{name: 0 if isinstance(OTHER_VALUES[name], int) else ""})
    require_compatible(OURS, unknown)
    require_compatible(unknown, OURS)


@pytest.mark.parametrize(
    ("name", "option"),
    [("kv_dtype", "--dtype"), ("block_size_tokens", "--block-size"), ("config_digest", "hf-over")],
)
def test_a_layouts_refusal_names_the_option_too(name: str, option: str) -> None:
    value = 32 if name == "block_size_tokens" else "other"
    theirs = msgspec.structs.replace(LAYOUT, **{name: value})
    with pytest.raises(IncompatiblePeerError, match=option):
        LAYOUT.require_equal(theirs)


def test_remedies_are_for_fields_that_are_there() -> None:
    fields = {*KVLayout.__struct_fields__, *Compatibility.__struct_fields__, "transport"}
    assert set(REMEDIES) <= fields


class _EarlierHello(msgspec.Struct, tag_field="type", tag="hello"):
    """The greeting of the release before ``compatibility``, which ignores unknown fields."""

    instance_id: str
    epoch: int
    layout: KVLayout
    transport: str
    transport_metadata: bytes


class _EarlierEnvelope(msgspec.Struct):
    version: int
    sequence: int
    message: _EarlierHello


def test_the_release_before_reads_this_ones_greeting_and_the_other_way_round() -> None:
    ours = hello(LAYOUT, OURS)
    read = msgspec.msgpack.decode(encode(1, ours), type=_EarlierEnvelope)
    assert (read.version, read.message.layout) == (PROTOCOL_VERSION, LAYOUT)
    theirs = decode(msgspec.msgpack.encode(_EarlierEnvelope(PROTOCOL_VERSION, 1, read.message)))
    assert isinstance(theirs.message, Hello)
    assert theirs.message.compatibility is None
    require_compatible(OURS, theirs.message.compatibility)
    require_compatible(theirs.message.compatibility, OURS)


@pytest.mark.parametrize("known", [OURS, changed(tokenizer_digest="", kv_cache_layout="")])
def test_the_next_release_may_compare_more(known: Compatibility) -> None:
    sent = msgspec.to_builtins(hello(LAYOUT, known), builtin_types=(bytes,))
    sent["compatibility"]["twist"] = {"left": 1}
    encoded = msgspec.msgpack.encode(
        {"version": PROTOCOL_VERSION + 1, "sequence": 1, "message": sent}
    )
    read = decode(encoded).message
    assert isinstance(read, Hello)
    assert read.compatibility == known


def test_who_is_there_tells_it_as_json_too() -> None:
    info = InstanceInfo(
        InstanceId("i"), Epoch(1), "tcp://a:1", LAYOUT.fingerprint(), LAYOUT, "shm", (), 1, 1,
        compatibility=OURS, receives={"mismatch": 2},
    )  # fmt: skip
    shown = msgspec.to_builtins(info, builtin_types=(bytes,))
    assert shown["compatibility"]["chat_template_digest"] == "3" * 32
    assert shown["receives"] == {"mismatch": 2}
