"""Which bytes end an answer, and which only seem to."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.router.answer_end import StreamEnd, require_whole
from kvferry.router.upstream import LegFailedError, LegFailure

_EVENT = b'data: {"choices":[{"index":0,"text":"one","finish_reason":null}]}\n\n'
_ABORT = b'data: {"choices":[{"index":0,"text":"","finish_reason":"abort"}]}\n\n'
_DONE = b"data: [DONE]\n\n"


def see(*chunks: bytes) -> StreamEnd:
    end = StreamEnd()
    for chunk in chunks:
        end.see(chunk)
    return end


def pieces(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


@pytest.mark.parametrize("size", [1, 2, 7, 25, 1000])
def test_an_abort_is_seen_however_it_is_cut(size: int) -> None:
    with pytest.raises(LegFailedError, match="stopped") as caught:
        see(*pieces(_EVENT + _ABORT + _DONE, size))
    assert caught.value.cause is LegFailure.ABORTED


@pytest.mark.parametrize("size", [1, 2, 7, 25, 1000])
def test_the_last_event_is_seen_however_it_is_cut(size: int) -> None:
    chunks = pieces(_EVENT + _DONE, size)
    assert see(*chunks).is_done
    assert not see(*pieces(_EVENT, size)).is_done


def test_what_comes_after_the_last_event_is_not_the_end() -> None:
    assert not see(_DONE, _EVENT).is_done


@given(st.text())
def test_no_text_is_taken_for_an_abort(text: str) -> None:
    text = f'{text}"finish_reason":"abort"'
    event = json.dumps({"choices": [{"text": text, "finish_reason": "stop"}]}).encode()
    see(b"data: " + event + b"\n\n", _DONE)
    require_whole(event)


@pytest.mark.parametrize(
    ("reasons", "is_whole"), [(["stop"], True), (["length", "abort"], False), (["abort"], False)]
)
def test_a_whole_answer_has_no_aborted_choice(reasons: list[str], is_whole: bool) -> None:
    body = json.dumps({"choices": [{"finish_reason": reason} for reason in reasons]}).encode()
    if is_whole:
        require_whole(body)
        return
    with pytest.raises(LegFailedError):
        require_whole(body)


@pytest.mark.parametrize(
    "body", [b'"abort"', b'{"choices": "abort"}', b'["abort', b'{"a":"abort"}']
)
def test_other_answers_are_let_through(body: bytes) -> None:
    require_whole(body)
