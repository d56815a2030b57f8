"""The demo's conversation is right where tokens are the same and most of a history was read."""

from __future__ import annotations

import pytest

from kvferry.bench.demo import ReuseRow, reuse_rows
from kvferry.bench.turns import TurnArm
from tests.unit.bench.turns_deployment import sample_of

_OFF, _ON = TurnArm.RECOMPUTE, TurnArm.READ_BACK_PUSH


def test_turns_are_paired_in_order() -> None:
    samples = [sample_of(arm, turn, 0.1 * turn) for turn in (2, 1) for arm in (_ON, _OFF)]
    rows = reuse_rows(samples)
    assert [(row.off.turn, row.on.turn) for row in rows] == [(1, 1), (2, 2)]
    assert all((row.off.arm, row.on.arm) == (_OFF, _ON) for row in rows)
    assert [row.complaint() for row in rows] == [None, None]
    assert [row.is_same for row in rows] == [True, True]


def test_times_faster_is_the_ratio_of_ttfts() -> None:
    assert ReuseRow(sample_of(_OFF, 2, 0.6), sample_of(_ON, 2, 0.2)).times_faster == pytest.approx(
        3
    )


@pytest.mark.parametrize(
    ("turn", "fields", "words"),
    [
        (2, {"answer": (9,)}, "turn 2 of the conversation: reuse on and off gave other tokens"),
        (2, {"num_read_back_tokens": 499, "outcome": "received"}, "499 of 1000 tokens"),
        (2, {"num_read_back_tokens": 0, "outcome": "gone"}, "read back: gone"),
        (2, {"num_read_back_tokens": 0, "outcome": ""}, "read back: it was not tried"),
        (2, {"num_read_back_tokens": 500}, None),
        (1, {}, None),
    ],
)
def test_what_is_wrong_is_said(turn: int, fields: dict[str, object], words: str | None) -> None:
    row = ReuseRow(sample_of(_OFF, turn, 0.1), sample_of(_ON, turn, 0.1, **fields))
    complaint = row.complaint()
    if words is None:
        assert complaint is None
    else:
        assert words in (complaint or "")
