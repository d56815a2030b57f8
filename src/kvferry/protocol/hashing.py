"""Chained block hashes and prompt digests: how KV is found and checked by content.

``h_i = H(h_{i-1} || tokens of block i)`` over full blocks, ``h_{-1} = H(fingerprint, salt, lora)``.
H is BLAKE2b with a 256-bit digest; tokens are little-endian unsigned 32-bit integers. The exact
bytes and test vectors are in ``docs/protocol.md``.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from sys import byteorder

from kvferry.errors import LocalProtocolError
from kvferry.protocol.ids import BlockHash

DIGEST_BYTES = 32
MAX_TOKEN_ID = 2**32 - 1


def _hash(person: bytes, *parts: bytes) -> bytes:
    state = hashlib.blake2b(digest_size=DIGEST_BYTES, person=person)
    for part in parts:
        state.update(part)
    return state.digest()


def _sized(part: bytes) -> bytes:
    """Length-prefix a part, so that no two lists of parts give the same bytes."""
    return len(part).to_bytes(8, "little") + part


def _token_bytes(tokens: Sequence[int]) -> bytes:
    try:
        values = array("I", tokens)
    except OverflowError as error:
        raise LocalProtocolError(f"a token id is not in 0 to {MAX_TOKEN_ID}: {error}") from error
    if values.itemsize != 4:  # pragma: no cover - no supported platform has another size
        values = array("L", tokens)
    if byteorder == "big":  # pragma: no cover
        values.byteswap()
    return values.tobytes()


def chain_root(fingerprint: bytes, *, salt: str = "", lora: str = "") -> BlockHash:
    """Return ``h_{-1}``: 32 bytes that separate models, layouts, tenants (salt) and adapters."""
    return BlockHash(
        _hash(
            b"kvferry-root",
            _sized(fingerprint),
            _sized(salt.encode("utf-8", "surrogatepass")),
            _sized(lora.encode("utf-8", "surrogatepass")),
        )
    )


def next_block_hash(parent: BlockHash, tokens: Sequence[int]) -> BlockHash:
    """Return the hash of one full block of ``tokens`` that follows ``parent``."""
    return BlockHash(_hash(b"kvferry-block", parent, _token_bytes(tokens)))


def block_hashes(root: BlockHash, tokens: Sequence[int], block_size_tokens: int) -> list[BlockHash]:
    """Return the hashes of all *full* blocks of ``tokens``; a partial tail has none."""
    if block_size_tokens < 1:
        raise LocalProtocolError(f"a block cannot have {block_size_tokens} tokens")
    encoded = _token_bytes(tokens)
    block_bytes = 4 * block_size_tokens
    hashes: list[BlockHash] = []
    parent = root
    for start in range(0, len(encoded) - block_bytes + 1, block_bytes):
        parent = BlockHash(_hash(b"kvferry-block", parent, encoded[start : start + block_bytes]))
        hashes.append(parent)
    return hashes


def prompt_digest(root: BlockHash, tokens: Sequence[int]) -> bytes:
    """Return 32 bytes over the whole prompt, partial tail, salt and adapter included."""
    return _hash(b"kvferry-prompt", root, len(tokens).to_bytes(8, "little"), _token_bytes(tokens))


@dataclass(frozen=True, slots=True)
class PartialContent:
    """What the last block of a sequence holds: its first tokens, and nothing that is of use after.

    ``block_hash`` is ``next_block_hash(parent, tokens)``, which differs from any full block's.
    """

    parent: BlockHash
    """Of the full block before it."""
    num_tokens: int
    block_hash: BlockHash


def partial_content(parent: BlockHash, tokens: Sequence[int]) -> PartialContent:
    """Return the name of ``tokens``, fewer than a block holds, after the block ``parent``."""
    return PartialContent(parent, len(tokens), next_block_hash(parent, tokens))
