"""Which bytes end an answer, and which only seem to."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.headers import stream_note
from kvferry.router.request.legs import DecodeEvents, require_whole
from kvferry.router.upstream import LegFailedError, LegFailure

_EVENT = b'data: {"choices":[{"index":0,"text":"one","finish_reason":null}]}\n\n'
_ABORT = b'data: {"choices":[{"index":0,"text":"","finish_reason":"abort"}]}\n\n'
_LAST = b'data: {"choices":[{"index":0,"text":"two","finish_reason":"stop"}]}\n\n'
_DONE = b"data: [DONE]\n\n"


def see(*chunks: bytes) -> DecodeEvents:
    events = DecodeEvents()
    for chunk in chunks:
        events.feed(chunk)
    return events


def pieces(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


@pytest.mark.parametrize("size", [1, 2, 7, 25, 1000])
def test_an_abort_is_seen_however_it_is_cut(size: int) -> None:
    with pytest.raises(LegFailedError, match="stopped") as caught:
        see(*pieces(_EVENT + _ABORT + _DONE, size))
    assert caught.value.cause is LegFailure.ABORTED


@pytest.mark.parametrize("size", [1, 2, 7, 25, 1000])
def test_the_last_event_is_seen_however_it_is_cut(size: int) -> None:
    chunks = pieces(_EVENT + _LAST + _DONE, size)
    assert see(*chunks).is_done
    assert not see(*pieces(_EVENT + _LAST, size)).is_done


@pytest.mark.parametrize("size", [1, 2, 7, 25, 1000])
def test_how_a_receive_has_ended_is_seen_however_it_is_cut(size: int) -> None:
    chunks = pieces(_EVENT + _LAST + stream_note("incompatible") + _DONE, size)
    assert see(*chunks).receive_outcome == "incompatible"
    assert see(*pieces(_EVENT + _LAST + _DONE, size)).receive_outcome == ""


def test_what_comes_after_the_last_event_is_not_the_end() -> None:
    assert not see(_LAST, _DONE, _EVENT).is_done


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("before", [b"", _EVENT])
def test_a_stream_that_ends_for_no_reason_was_aborted(before: bytes, size: int) -> None:
    """vLLM drops the event that says so where there is no token yet."""
    with pytest.raises(LegFailedError) as caught:
        see(*pieces(before + _DONE, size))
    assert caught.value.cause is LegFailure.ABORTED


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_stream_that_ends_for_an_error_was_not_aborted(size: int) -> None:
    error = b'data: {"error": {"message": "no"}}\n\n'
    assert see(*pieces(_EVENT + error + _DONE, size)).is_done


def test_a_text_of_the_end_is_not_the_end() -> None:
    assert not see(b'data: {"choices":[{"text":"so it ends: data: [DONE]').is_done


def _chat(delta: object, **fields: object) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": None, **fields}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


_ROLE = _chat({"role": "assistant", "content": ""})
_USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3}}\n\n'


@pytest.mark.parametrize(
    ("first", "is_it"),
    [
        (_ROLE, True),
        (_ROLE + _ROLE, True),
        (_chat({"role": "assistant", "content": "one"}), False),
        (_chat({"role": "assistant", "content": "", "tool_calls": [{"index": 0}]}), False),
        (_chat({"role": "assistant", "content": ""}, token_ids=[5]), False),
        (_chat({"role": "assistant", "content": ""}, finish_reason="stop"), False),
        (_ROLE + _chat({"content": "one"}), False),
        (_ROLE + _LAST + _DONE, False),
        (_ROLE + _USAGE, True),
        (_USAGE, False),
        (_ROLE[:-2], False),
        (_EVENT, False),
        (b"", False),
        (b'data: {"role": [\n\n', False),
    ],
)
def test_the_role_alone_is_no_answer_yet(first: bytes, is_it: bool) -> None:
    assert see(first).is_opening is is_it
    assert see(*pieces(first, 7)).is_opening is is_it


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_error_that_an_answer_begins_with_is_told_also_after_the_role(size: int) -> None:
    error = b'{"error": {"message": "no"}}'
    for before in (b"", _ROLE):
        events = see(*pieces(before + b"data: " + error + b"\n\n", size))
        assert (events.error, events.is_opening) == (error, False)
    assert see(_EVENT, b"data: " + error + b"\n\n").error is None


def test_bytes_pass_as_they_come_less_the_note_before_the_end() -> None:
    events = DecodeEvents()
    stream = _EVENT + _LAST
    assert b"".join(events.feed(piece) for piece in pieces(stream, 7)) == stream
    assert events.feed(stream_note("received") + _DONE) == _DONE
    assert events.feed(b"\n") == b"\n"
    assert (events.is_done, events.receive_outcome) == (True, "received")


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
