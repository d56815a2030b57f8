from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import LocalProtocolError
from kvferry.protocol.hashing import block_hashes, chain_root, next_block_hash, prompt_digest

FINGERPRINT = bytes(range(32))
ROOT = chain_root(FINGERPRINT)
token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def blake(person: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32, person=person).digest()


@given(st.binary(max_size=40), st.text(st.characters(codec="utf-8")), st.text(max_size=3))
def test_the_root_is_as_documented(fingerprint: bytes, salt: str, lora: str) -> None:
    encoded_lora = lora.encode("utf-8", "surrogatepass")
    data = b"".join(
        struct.pack("<Q", len(part)) + part for part in (fingerprint, salt.encode(), encoded_lora)
    )
    assert chain_root(fingerprint, salt=salt, lora=lora) == blake(b"kvferry-root", data)


@given(token_lists, st.integers(1, 9))
def test_the_chain_is_as_documented(tokens: list[int], block_size_tokens: int) -> None:
    parent: bytes = ROOT
    expected = []
    for block in range(len(tokens) // block_size_tokens):
        chosen = tokens[block * block_size_tokens : (block + 1) * block_size_tokens]
        parent = blake(b"kvferry-block", parent + struct.pack(f"<{len(chosen)}I", *chosen))
        expected.append(parent)
    assert block_hashes(ROOT, tokens, block_size_tokens) == expected


@given(token_lists)
def test_the_prompt_digest_is_as_documented(tokens: list[int]) -> None:
    data = ROOT + struct.pack(f"<Q{len(tokens)}I", len(tokens), *tokens)
    assert prompt_digest(ROOT, tokens) == blake(b"kvferry-prompt", data)


@given(token_lists, st.integers(1, 9))
def test_block_by_block_gives_the_same_chain(tokens: list[int], block_size_tokens: int) -> None:
    parent = ROOT
    for index, block_hash in enumerate(block_hashes(ROOT, tokens, block_size_tokens)):
        start = index * block_size_tokens
        parent = next_block_hash(parent, tokens[start : start + block_size_tokens])
        assert parent == block_hash


@given(token_lists, token_lists)
def test_a_shared_head_shares_hashes_and_nothing_after_a_difference(
    one: list[int], two: list[int]
) -> None:
    head = 0
    while head < min(len(one), len(two)) and one[head] == two[head]:
        head += 1
    first, second = block_hashes(ROOT, one, 2), block_hashes(ROOT, two, 2)
    shared = head // 2
    assert first[:shared] == second[:shared]
    assert not set(first[shared:]) & set(second[shared:])


@pytest.mark.parametrize(("length", "full"), [(0, 0), (1, 0), (15, 0), (16, 1), (17, 1), (32, 2)])
def test_a_partial_tail_has_no_hash(length: int, full: int) -> None:
    assert len(block_hashes(ROOT, list(range(length)), 16)) == full


def test_the_prompt_digest_covers_the_partial_tail() -> None:
    assert block_hashes(ROOT, [1, 2, 3, 4, 5], 4) == block_hashes(ROOT, [1, 2, 3, 4, 6], 4)
    assert prompt_digest(ROOT, [1, 2, 3, 4, 5]) != prompt_digest(ROOT, [1, 2, 3, 4, 6])
    assert prompt_digest(ROOT, [1, 2, 3, 4]) != prompt_digest(ROOT, [1, 2, 3, 4, 0])


def test_models_tenants_and_adapters_never_share_a_block() -> None:
    roots = {
        chain_root(FINGERPRINT),
        chain_root(b"\xff" * 32),
        chain_root(FINGERPRINT, salt="a"),
        chain_root(FINGERPRINT, salt="b"),
        chain_root(FINGERPRINT, lora="a"),
        chain_root(FINGERPRINT, salt="a", lora="a"),
        chain_root(FINGERPRINT, salt="aa"),
        chain_root(FINGERPRINT + b"a"),
    }
    assert len(roots) == 8
    assert len({block_hashes(root, [1, 2], 2)[0] for root in roots}) == 8
    assert len({prompt_digest(root, [1]) for root in roots}) == 8


def test_a_block_in_another_place_has_another_hash() -> None:
    first, second = block_hashes(ROOT, [7, 7, 7, 7], 2)
    assert first != second


@pytest.mark.parametrize("token", [-1, 2**32, 2**70])
def test_a_token_id_that_does_not_fit_is_refused(token: int) -> None:
    with pytest.raises(LocalProtocolError, match="4294967295"):
        prompt_digest(ROOT, [1, token])
    with pytest.raises(LocalProtocolError):
        block_hashes(ROOT, [1, token], 2)


@pytest.mark.parametrize("size", [0, -1])
def test_a_block_size_below_one_is_refused(size: int) -> None:
    with pytest.raises(LocalProtocolError, match=f"{size} tokens"):
        block_hashes(ROOT, [1, 2, 3], size)
