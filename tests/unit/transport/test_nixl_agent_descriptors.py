"""Geometry as NIXL's arrays."""

from __future__ import annotations

import numpy as np

from kvferry.transport.geometry import RegionGeometry
from kvferry.transport.nixl_agent import (
    descriptor_indices,
    num_descriptors,
    registration_rows,
    strided_rows,
)

GEOMETRY = (RegionGeometry(1000, 10, 16, 4), RegionGeometry(2000, 20, 32, 4))


def test_rows_describe_every_region() -> None:
    assert strided_rows(GEOMETRY).tolist() == [[1000, 10, 0, 16, 4], [2000, 20, 0, 32, 4]]
    assert strided_rows(GEOMETRY).dtype == np.uint64
    assert registration_rows(GEOMETRY) == [(1000, 58, 0, ""), (2000, 116, 0, "")]
    assert num_descriptors(GEOMETRY) == 8


def test_indices_go_region_by_region() -> None:
    indices = descriptor_indices(np.array([3, 0]), GEOMETRY)
    assert indices.tolist() == [3, 0, 7, 4]
    assert indices.dtype == np.int32
