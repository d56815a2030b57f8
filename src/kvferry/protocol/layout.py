"""The geometry of one instance's KV memory, and the fingerprint that peers compare first.

Two instances may move blocks between each other only if every field here is equal.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from kvferry.errors import IncompatiblePeerError
from kvferry.protocol.compatibility import remedy_for


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
