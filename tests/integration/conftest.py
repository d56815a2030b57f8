"""What integration tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.exchange_pair import Side, make_side


@pytest.fixture(scope="module")
def shared_side() -> Iterator[Side]:
    """One exchange for a module's tests that only knock at its door."""
    side = make_side("door")
    yield side
    side.close()
