"""The measurement of moving blocks, in a small form: that it runs, not how fast."""

from __future__ import annotations

import pytest

from kvferry.bench.transfer import CopyPlan, measure_copy
from kvferry.errors import ConfigError
from tests.support.transports import available_transports


@pytest.mark.slow
@pytest.mark.parametrize("transport", available_transports())
@pytest.mark.parametrize("operation", ["READ", "WRITE"])
def test_scattered_blocks_are_measured_beside_a_plain_copy(transport: str, operation: str) -> None:
    plan = CopyPlan(
        transport,
        operation="READ" if operation == "READ" else "WRITE",
        num_bytes=2 * 1024 * 1024,
        block_bytes=64 * 1024,
        is_scattered=True,
        num_repeats=3,
    )
    measured = measure_copy(plan)
    assert (measured.transport, measured.num_repeats) == (transport, 3)
    assert measured.num_bytes == 2 * 1024 * 1024
    assert measured.blocks_bytes_per_s > 0
    assert measured.plain_bytes_per_s > 0
    assert 0.01 < measured.ratio < 100


def test_a_plan_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError):
        measure_copy(CopyPlan(num_bytes=1, block_bytes=2))
