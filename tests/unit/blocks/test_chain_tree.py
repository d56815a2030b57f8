from __future__ import annotations

import pytest

from kvferry.blocks.chain_tree import ChainTree
from kvferry.errors import LocalProtocolError
from kvferry.protocol.ids import BlockHash
from tests.unit.blocks.retaining_instance import chain


def tree_of(*texts: str) -> ChainTree:
    """Chains numbered from 0."""
    tree = ChainTree()
    for number, text in enumerate(texts):
        tree.add(number, chain(text))
    return tree


@pytest.mark.parametrize(
    ("texts", "removed", "uncovered"),
    [
        (("abc",), 0, chain("abc")),
        (("abc", "abcd"), 0, []),
        (("abc", "abcd"), 1, chain("abcd")[3:]),
        (("abcd", "abxy"), 0, chain("abcd")[2:]),
        (("abc", "abc"), 0, []),
        (("abc", "x"), 1, chain("x")),
    ],
)
def test_removing_a_chain_uncovers_what_no_other_covers(
    texts: tuple[str, ...], removed: int, uncovered: list[BlockHash]
) -> None:
    tree = tree_of(*texts)
    num_hashes = tree.num_hashes
    assert tree.remove(removed) == uncovered
    assert removed not in tree
    assert tree.num_hashes == num_hashes - len(uncovered)


def test_a_tree_without_chains_covers_nothing() -> None:
    tree = tree_of("abcd", "abxy", "ab", "ab", "q")
    assert tree.num_hashes == 7
    for number in (2, 0, 3, 1, 4):
        tree.remove(number)
    assert tree.num_hashes == 0


@pytest.mark.parametrize(
    ("texts", "count", "cut", "stays"),
    [
        (("abcd",), 1, chain("abcd")[3:], True),
        (("abcd",), 3, chain("abcd")[1:], True),
        (("abcd",), 4, chain("abcd"), False),
        (("abcd",), 9, chain("abcd"), False),
        (("abcd",), 0, [], True),
        (("abcd", "ab"), 1, chain("abcd")[3:], True),
        (("abcd", "ab"), 2, chain("abcd")[2:], False),
        (("abcd", "abx"), 9, chain("abcd")[2:], False),
        (("ab", "abcd"), 1, [], False),
        (("ab", "ab"), 1, [], False),
    ],
)
def test_a_chain_gives_up_its_own_tail_and_ends_with_the_last_of_it(
    texts: tuple[str, ...], count: int, cut: list[BlockHash], stays: bool
) -> None:
    tree = tree_of(*texts)
    assert tree.shorten(0, count) == cut
    assert (0 in tree) is stays
    for number in range(1, len(texts)):
        assert number in tree


@pytest.mark.parametrize(
    ("texts", "lost", "left"),
    [
        (("abc",), ["abc"], []),
        (("abc",), ["abc", "ab", "a"], [0]),
        (("abc",), ["ab", "a"], []),
        (("abc",), ["ab", "a", "abc"], [0]),
        (("abc",), ["x"], []),
        (("abc", "abx"), ["abc"], [0]),
        (("abcd", "abx"), ["abc", "abcd"], [0]),
        (("abc", "abc"), ["abc"], [0]),
        (("abc", "abc"), ["abc", "ab", "a"], [0, 1]),
        (("ab", "abcd"), ["abcd"], []),
        (("ab", "abc"), ["abc"], [1]),
        (("ab", "abc"), ["ab"], [0]),
        (("ab", "abc"), ["ab", "abc"], [0]),
        (("ab", "abc"), ["a", "ab", "abc"], [0, 1]),
    ],
)
def test_a_chain_leaves_with_the_last_block_of_its_own(
    texts: tuple[str, ...], lost: list[str], left: list[int]
) -> None:
    tree = tree_of(*texts)
    gone = [number for text in lost for number in tree.lose(chain(text)[-1])]
    assert gone == left
    assert all((number in tree) is (number not in left) for number in range(len(texts)))


def test_a_hash_before_others_that_is_lost_is_neither_cut_nor_counted() -> None:
    tree = tree_of("abcd")
    tree.lose(chain("abc")[-1])
    assert tree.shorten(0, 2) == [chain("ab")[-1], chain("abcd")[-1]]
    assert tree.remove(0) == chain("a")


def test_a_lost_hash_that_is_added_again_counts_again() -> None:
    tree = tree_of("abc")
    tree.lose(chain("ab")[-1])
    tree.add(1, chain("abc"))
    tree.remove(0)
    assert tree.remove(1) == chain("abc")


@pytest.mark.parametrize(
    ("texts", "use", "used"),
    [
        (("abc",), "abc", {0}),
        (("abc",), "a", {0}),
        (("abc",), "abcxyz", {0}),
        (("abc", "abcd"), "abc", {0}),
        (("abc", "abcd"), "abcd", {0, 1}),
        (("abc", "abcd"), "ab", set()),
        (("abcx", "abcy"), "abc", set()),
        (("abcx", "abcy"), "abcx", {0}),
        (("abc", "xyz"), "xq", set()),
        (("abc", "xyz"), "xy", {1}),
        (("abc",), "", set()),
    ],
)
def test_a_use_is_for_chains_within_it_or_the_only_one_that_goes_on(
    texts: tuple[str, ...], use: str, used: set[int]
) -> None:
    assert tree_of(*texts).used_by(chain(use)) == used


def test_what_makes_no_tree_is_refused_and_changes_nothing() -> None:
    tree = tree_of("ab")
    a, b = chain("ab")
    (x,) = chain("x")
    for number, hashes in ((1, [x, b]), (1, [b]), (1, [x, a]), (1, []), (0, [x])):
        with pytest.raises(LocalProtocolError):
            tree.add(number, hashes)
    assert (tree.num_hashes, 1 in tree) == (2, False)
