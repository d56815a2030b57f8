"""The note of how a receive has ended, in the end of a stream."""

from __future__ import annotations

import pytest

from kvferry.protocol.headers import (
    noted_outcome,
    stream_note,
    without_note,
)

_EVENT, _DONE = b'data: {"text": "\\n: kv_receive=gone\\n\\n"}\n\n', b"data: [DONE]\n\n"


def test_a_note_is_found_between_events_and_nothing_in_a_text_is_taken_for_one() -> None:
    assert noted_outcome(_EVENT + stream_note("mismatch") + _DONE) == "mismatch"
    assert noted_outcome(_EVENT + _DONE) == ""
    assert len(stream_note("incompatible")) <= 64


def test_clients_get_the_stream_without_it() -> None:
    stream = _EVENT + stream_note("received") + _DONE
    assert without_note(stream) == _EVENT + _DONE
    assert without_note(stream_note("received") + _DONE) == _DONE
    assert without_note(_EVENT + _DONE) == _EVENT + _DONE


@pytest.mark.parametrize("outcome", ["", "Mismatch", "a" * 33, "a b"])
def test_what_is_no_metric_label_is_no_outcome(outcome: str) -> None:
    assert noted_outcome(_EVENT + f": kv_receive={outcome}\n\n".encode() + _DONE) == ""
