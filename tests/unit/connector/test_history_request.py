"""Which of a holder's partial blocks are a reader's own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvferry.connector.ports import HistoryRequest
from kvferry.errors import LocalProtocolError
from kvferry.protocol.hashing import block_hashes, chain_root, next_block_hash
from kvferry.protocol.ids import BlockNumber
from kvferry.protocol.messages import PartialBlock

SIZE = 4
TOKENS = list(range(100, 114))
"""Three full blocks and two tokens."""
HASHES = tuple(block_hashes(chain_root(b"f" * 32), TOKENS, SIZE))


def history_request(num_tokens: int = len(TOKENS), num_blocks: int = 4) -> HistoryRequest:
    blocks = tuple(BlockNumber(number) for number in range(num_blocks))
    return HistoryRequest(HASHES, blocks, TOKENS[:num_tokens], SIZE, 1)


def partial(num_found: int, tokens: Sequence[int]) -> PartialBlock:
    block_hash = next_block_hash(HASHES[num_found - 1], tokens)
    return PartialBlock(BlockNumber(9), len(tokens), block_hash)


@pytest.mark.parametrize(("num_found", "count"), [(1, 1), (1, 3), (2, 2), (3, 1), (3, 2)])
def test_what_has_the_same_tokens_fits(num_found: int, count: int) -> None:
    own = partial(num_found, TOKENS[num_found * SIZE :][:count])
    assert history_request().fitting(num_found, [own]) == own


def test_of_several_that_fit_the_longest_is_taken() -> None:
    offered = [partial(1, TOKENS[4 : 4 + count]) for count in (1, 3, 2)]
    assert history_request().fitting(1, [*offered, partial(1, [7, 7, 7])]) == offered[1]


def test_other_tokens_do_not_fit() -> None:
    assert (
        history_request().fitting(1, [partial(1, [104, 105, 7]), partial(1, TOKENS[5:7])]) is None
    )


def test_what_follows_another_block_does_not_fit() -> None:
    assert history_request().fitting(1, [partial(2, TOKENS[4:6])]) is None


def test_a_length_that_the_hash_is_not_of_does_not_fit() -> None:
    own = partial(1, TOKENS[4:6])
    forged = PartialBlock(own.block, 3, own.block_hash)
    assert history_request().fitting(1, [forged]) is None


def test_more_tokens_than_are_of_use_do_not_fit() -> None:
    own = partial(3, TOKENS[12:14])
    assert history_request(num_tokens=14).fitting(3, [own]) == own
    assert history_request(num_tokens=13).fitting(3, [own]) is None


def test_a_whole_block_is_not_partial() -> None:
    assert history_request().fitting(1, [partial(1, TOKENS[4:8])]) is None


def test_without_a_block_for_it_nothing_fits() -> None:
    own = partial(3, TOKENS[12:13])
    assert history_request(num_blocks=3).fitting(3, [own]) is None
    assert history_request().fitting(0, [own]) is None


@pytest.mark.parametrize("num_blocks", [2, 5])
def test_there_is_a_block_for_each_hash_and_one_more_at_most(num_blocks: int) -> None:
    with pytest.raises(LocalProtocolError, match=f"3 hashes for {num_blocks} blocks"):
        history_request(num_blocks=num_blocks)


def test_a_wish_for_nothing_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="0 hashes"):
        HistoryRequest((), (BlockNumber(1),), [1], SIZE, 1)
