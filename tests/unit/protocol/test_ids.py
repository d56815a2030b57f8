from __future__ import annotations

import re

import pytest

from kvferry.protocol.ids import (
    MAX_TRANSFER_ID_CHARS,
    TRANSFER_ID_PATTERN,
    new_epoch,
    new_transfer_id,
)


def test_transfer_ids_are_fresh_and_fit_everywhere() -> None:
    made = {new_transfer_id() for _ in range(1000)}
    assert len(made) == 1000
    assert all(re.match(TRANSFER_ID_PATTERN, name) for name in made)
    assert all(len(name) <= MAX_TRANSFER_ID_CHARS for name in made)


def test_epochs_are_fresh_and_fit_the_wire() -> None:
    made = {new_epoch() for _ in range(1000)}
    assert len(made) == 1000
    assert all(0 <= epoch < 2**62 for epoch in made)


@pytest.mark.parametrize("text", ["", " ", "a b", "a,b", "a\n", "\x7f", "é", "a\x00"])
def test_ids_that_would_break_a_header_or_a_log_line_do_not_match(text: str) -> None:
    assert re.match(TRANSFER_ID_PATTERN, text) is None
