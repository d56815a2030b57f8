"""Cores are dealt in turn, shared when they run out, and never dealt twice to one instance."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cluster.cores import assign_cores


@pytest.mark.parametrize(
    ("wanted", "available", "dealt"),
    [
        ([1, 1], [0, 1], ((0,), (1,))),
        ([1, 1], [4, 7], ((4,), (7,))),
        ([1, 1], [3], ((), ())),
        ([1], [], ((),)),
        ([1, 1, 1, 1], [0, 1], ((0,), (1,), (0,), (1,))),
        ([2, 2], [0, 1, 2, 3], ((0, 1), (2, 3))),
        ([3, 1], [0, 1], ((0, 1), (0,))),
        ([2, 2], [0, 1, 2], ((0, 1), (0, 2))),
    ],
)
def test_assignment(
    wanted: list[int], available: list[int], dealt: tuple[tuple[int, ...], ...]
) -> None:
    assert assign_cores(wanted, available) == dealt


@given(
    wanted=st.lists(st.integers(1, 6), max_size=6),
    available=st.lists(st.integers(0, 63), min_size=2, max_size=8, unique=True),
)
def test_everyone_gets_what_there_is(wanted: list[int], available: list[int]) -> None:
    for count, cores in zip(wanted, assign_cores(wanted, available), strict=True):
        assert len(set(cores)) == len(cores) == min(count, len(available))
        assert set(cores) <= set(available)
