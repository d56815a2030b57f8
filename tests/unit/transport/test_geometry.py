"""Checked regions, and lists of blocks as runs of bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from kvferry.transport.base import MemoryKind, MemoryRegion
from kvferry.transport.geometry import (
    RegionGeometry,
    block_bytes_of,
    describe,
    pair_blocks,
    require_matching,
    runs,
)

OURS = RegionGeometry(1000, 10, 10, 100)
THEIRS = RegionGeometry(5000, 10, 10, 50)


def test_neighbours_become_one_run() -> None:
    local, remote = pair_blocks([3, 4, 5, 9], [0, 1, 2, 3], 100, 50)
    assert list(runs(local, remote, OURS, THEIRS)) == [(1030, 5000, 30), (1090, 5030, 10)]


def test_a_descending_list_becomes_one_run() -> None:
    local, remote = pair_blocks([5, 4, 3], [9, 8, 7], 100, 50)
    assert list(runs(local, remote, OURS, THEIRS)) == [(1030, 5070, 30)]


def test_a_gap_between_blocks_is_never_copied() -> None:
    gapped = RegionGeometry(1000, 10, 16, 100)
    local, remote = pair_blocks([0, 1], [0, 1], 100, 50)
    assert list(runs(local, remote, gapped, THEIRS)) == [(1000, 5000, 10), (1016, 5010, 10)]


def test_nothing_is_no_run() -> None:
    local, remote = pair_blocks([], [], 100, 50)
    assert list(runs(local, remote, OURS, THEIRS)) == []


@given(st.data())
def test_runs_cover_exactly_the_pairs(data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 20))
    local = data.draw(st.lists(st.integers(0, 99), min_size=count, max_size=count, unique=True))
    remote = data.draw(st.lists(st.integers(0, 49), min_size=count, max_size=count))
    moved = {}
    for here, there, num_bytes in runs(*pair_blocks(local, remote, 100, 50), OURS, THEIRS):
        for offset in range(num_bytes):
            moved[here + offset] = there + offset
    expected = {
        1000 + 10 * a + offset: 5000 + 10 * b + offset
        for a, b in zip(local, remote, strict=True)
        for offset in range(10)
    }
    assert moved == expected


@pytest.mark.parametrize(
    ("local", "remote"),
    [([1], []), ([100], [0]), ([0], [50]), ([-1], [0]), ([2**70], [0]), (["x"], [0])],
)
def test_wrong_lists_are_refused(local: list[int], remote: list[int]) -> None:
    with pytest.raises(LocalProtocolError):
        pair_blocks(local, remote, 100, 50)


def test_lists_may_be_arrays() -> None:
    local, _ = pair_blocks(np.arange(3), np.arange(3), 100, 50)  # type: ignore[arg-type]
    assert local.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "regions",
    [
        [],
        [MemoryRegion(0, 0, 0, 1)],
        [MemoryRegion(-1, 1, 1, 1)],
        [MemoryRegion(0, 8, 4, 1)],
        [MemoryRegion(0, 8, 8, 0)],
        [MemoryRegion(0, 8, 8, 2**25)],
        [MemoryRegion(2**63 - 8, 8, 8, 2)],
        [MemoryRegion(0, 8, 8, 1), MemoryRegion(64, 8, 8, 2)],
        [MemoryRegion(0, 8, 8, 1), MemoryRegion(64, 8, 8, 1, MemoryKind.VRAM)],
    ],
)
def test_senseless_regions_are_refused(regions: list[MemoryRegion]) -> None:
    with pytest.raises(ConfigError):
        describe(regions)


def test_a_description_keeps_every_field() -> None:
    (region,) = describe([MemoryRegion(1, 2, 3, 4, MemoryKind.VRAM, 5)])
    assert region == RegionGeometry(1, 2, 3, 4, MemoryKind.VRAM, 5)
    assert region.span_bytes == 11
    assert block_bytes_of((region, region)) == 4


def test_only_sizes_of_blocks_must_match() -> None:
    require_matching((OURS,), (RegionGeometry(0, 10, 99, 7, MemoryKind.VRAM, 1),))
    for other in ((), (OURS, OURS), (RegionGeometry(0, 11, 11, 7),)):
        with pytest.raises(RemoteProtocolError):
            require_matching((OURS,), other)
