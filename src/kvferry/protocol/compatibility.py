"""What two instances compare at the handshake, and what makes them alike.

Of ``KVLayout`` every field must be equal before blocks are moved. A field of ``Compatibility`` that
one side does not tell is not compared: an instance of an earlier release is accepted as before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvferry.errors import IncompatiblePeerError

_Text = Annotated[str, Meta(max_length=256)]
_SHOWN_DIGEST_CHARS = 12
_DIGEST_SUFFIX = "_digest"


class Compatibility(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How an instance's KV came to lie in its memory, and how it makes prompts of requests.

    Empty and 0 mean: not known. Fields unknown here are ignored, so a later version may add one.
    """

    attention_backend: _Text = ""
    instruction_set: _Text = ""
    """Where the backend packs keys by it, so that the same shapes hold other bytes."""
    kv_cache_layout: _Text = ""
    """The engine's name for the order of dimensions in memory."""
    kv_cache_dtype: _Text = ""
    """Finer than the layout's: all 8-bit kinds are the same bytes to a tensor library."""
    rope_max_model_len: Annotated[int, Meta(ge=0, le=2**40)] = 0
    """The longest sequence, where positions are rotated otherwise by it; else 0."""
    kv_tensors_digest: _Text = ""
    """Over names, shapes, strides and kinds of all KV tensors, their number of blocks left out."""
    tokenizer_digest: _Text = ""
    chat_template_digest: _Text = ""
    max_model_len: Annotated[int, Meta(ge=0, le=2**40)] = 0
    """Shown, not compared: KV of the same tokens is the same."""

    def difference_from(self, theirs: Compatibility | None) -> IncompatiblePeerError | None:
        """Return the first difference from a peer's, None if it is not known to differ."""
        for name in self.differing_fields(theirs):
            ours, other = shown(name, getattr(self, name)), shown(name, getattr(theirs, name))
            return IncompatiblePeerError(name, ours, other, remedy_for(name))
        return None

    def differing_fields(self, theirs: Compatibility | None) -> list[str]:
        """Return the compared fields in which a peer is known to differ."""
        if theirs is None:
            return []
        values = ((name, getattr(self, name), getattr(theirs, name)) for name in _COMPARED_FIELDS)
        return [name for name, ours, other in values if ours and other and ours != other]


_COMPARED_FIELDS = tuple(n for n in Compatibility.__struct_fields__ if n != "max_model_len")


def require_compatible(ours: Compatibility | None, theirs: Compatibility | None) -> None:
    """Raise ``IncompatiblePeerError`` naming the first difference that is known."""
    difference = None if ours is None else ours.difference_from(theirs)
    if difference is not None:
        raise difference


def shown(name: str, value: object) -> object:
    """Return a field's value for people: of a digest the beginning."""
    if name.endswith(_DIGEST_SUFFIX):
        return f"{str(value)[:_SHOWN_DIGEST_CHARS]}…"
    return value


def content_digest(*parts: bytes) -> str:
    """Return a digest of ``parts``, as fields here carry it."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.hexdigest()


REMEDIES: Mapping[str, str] = MappingProxyType(
    {
        "weights_digest": "serve the same weights on all instances",
        "config_digest": "serve the same model configuration on all instances (rope overrides by "
        "--hf-overrides, --quantization)",
        "kv_dtype": "start all instances with the same --dtype (and --kv-cache-dtype)",
        "kv_scales_digest": "use the same KV scales on all instances",
        "block_size_tokens": "start all instances with the same --block-size",
        "attention_backend": "use the same --attention-backend on all instances, and the same kind "
        "of processor where it shapes memory",
        "tensor_parallel_size": "start all instances with the same --tensor-parallel-size",
        "tensor_parallel_rank": "name the control port of rank 0, the first of an instance's ports",
        "transport": "start all instances with the same --transport",
        "instruction_set": "run all instances on processors of one kind: the attention backend "
        "orders memory by what they can",
        "kv_cache_layout": "set the same VLLM_KV_CACHE_LAYOUT for all instances",
        "kv_cache_dtype": "start all instances with the same --kv-cache-dtype",
        "rope_max_model_len": "start all instances with the same --max-model-len: this model "
        "rotates positions by it",
        "kv_tensors_digest": "run the same vLLM with the same options on all instances "
        "(--attention-backend, --kv-cache-dtype, VLLM_KV_CACHE_LAYOUT)",
        "tokenizer_digest": "give all instances the same --tokenizer, or model folders with the "
        "same tokenizer files",
        "chat_template_digest": "give all instances the same --chat-template, or model folders "
        "with the same one",
    }
)
"""What makes instances alike, by the field of layout or compatibility that differs."""


def remedy_for(name: str) -> str:
    """Return what makes a field alike, empty where it follows from another."""
    return REMEDIES.get(name, "")


class KVLayout(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a block is made of. All sizes are of one block over all layers unless said otherwise.

    A field that a later version adds needs a default that means what was true before it. A field
    at its default is not sent and not in the fingerprint, so both versions still agree.

    Fields unknown here are ignored, and neither compared nor in the fingerprint: who has added one
    is in every handshake, knows what its absence means, and refuses where that matters.
    """

    model_name: str
    """For messages only; not compared."""
    weights_digest: str
    """Digest of the weights or, where that is too slow, of their names, sizes and sample bytes."""
    config_digest: str
    """Digest of the effective config: rope overrides, quantisation, everything that changes KV."""
    kv_dtype: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    block_size_tokens: int
    block_bytes: int
    attention_backend: str
    """Backend and, where it shapes memory, its instruction set."""
    region_strides: tuple[int, ...]
    """Byte strides of the real tensors, from the outermost dimension in, per distinct region."""
    num_regions: int = 1
    """Contiguous regions that make up one block: 1 when blocks are laid out block-first."""
    kv_scales_digest: str = ""
    tensor_parallel_size: int = 1
    tensor_parallel_rank: int = 0
    """Whose shard it is: equal shards of different ranks hold different heads."""

    def compared_fields(self) -> dict[str, Any]:
        """Return the fields that a peer must share, by name."""
        return {
            name: getattr(self, name) for name in self.__struct_fields__ if name != "model_name"
        }

    def differing_fields(self, theirs: KVLayout) -> list[str]:
        """Return the fields in which a peer differs that it must share, in their order."""
        other = theirs.compared_fields()
        return [name for name, ours in self.compared_fields().items() if ours != other[name]]

    def fingerprint(self) -> bytes:
        """Return 32 bytes: BLAKE2b-256 over the compared fields that are not at their default.

        They are encoded as an array of [name, value] pairs in msgpack, sorted by name.
        """
        defaults = {field.name: field.default for field in msgspec.structs.fields(self)}
        encoded = msgspec.msgpack.encode(
            [
                (name, value)
                for name, value in sorted(self.compared_fields().items())
                if value != defaults[name]
            ]
        )
        return hashlib.blake2b(encoded, digest_size=32, person=b"kvferry-layout").digest()

    def require_equal(self, theirs: KVLayout) -> None:
        """Raise ``IncompatiblePeerError`` naming the first field in which ``theirs`` differs."""
        for name in self.differing_fields(theirs):
            ours, other = getattr(self, name), getattr(theirs, name)
            shown = (self.model_name, theirs.model_name)
            if name in ("weights_digest", "config_digest") and shown[0] != shown[1]:
                ours, other = f"{ours} ({shown[0]})", f"{other} ({shown[1]})"
            raise IncompatiblePeerError(name, ours, other, remedy_for(name))
