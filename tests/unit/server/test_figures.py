"""What became of read-backs, in total."""

from __future__ import annotations

from kvferry.protocol.prefill_result import PrefillReport
from kvferry.server.figures import ReadBackTotals


def test_what_came_and_what_was_computed_instead_are_added_up() -> None:
    totals = ReadBackTotals()
    received = PrefillReport(
        num_read_back_tokens=100,
        num_read_back_bytes=7000,
        num_computed_tokens=20,
        read_back_outcome="received",
    )
    for report in (
        received,
        received,
        PrefillReport(num_computed_tokens=300, read_back_outcome="gone"),
        PrefillReport(num_computed_tokens=40, read_back_outcome="slow"),
    ):
        totals.add(report)
    assert (totals.num_tokens, totals.num_bytes) == (200, 14000)
    assert totals.outcomes == {"received": 2, "gone": 1, "slow": 1}
    assert totals.recomputed_tokens == {"gone": 300, "slow": 40}
