"""Events of a stream, however its bytes are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.client.sse import EventReader, data_of

_STREAM = b"data: one\n\n: note\n\ndata: two\ndata:2\nid: 3\n\ndata: [DONE]\n\n"
_DATA = [b"one", b"", b"two\n2", b"[DONE]"]


def _pieces(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


def _told(reader: EventReader, *chunks: bytes) -> list[bytes]:
    return [data_of(event) for chunk in chunks for event in reader.feed(chunk)]


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_any_cut_of_the_bytes_tells_the_same(size: int, line_end: bytes) -> None:
    reader = EventReader()
    assert _told(reader, *_pieces(_STREAM.replace(b"\n", line_end), size)) == _DATA
    assert reader.is_between_events


def test_an_event_is_told_once_it_is_whole() -> None:
    reader = EventReader()
    assert reader.is_between_events
    assert _told(reader, b"data: on") == []
    assert not reader.is_between_events
    assert _told(reader, b"e\n\ndata: t") == [b"one"]
    assert _told(reader, b"wo\n", b"\n") == [b"two"]
    assert reader.is_between_events


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_event_that_is_too_long_is_passed_over(size: int) -> None:
    reader = EventReader(max_event_bytes=20)
    stream = b"data: one\n\ndata: " + b"x" * 50 + b"\n\ndata: two\n\n"
    told = _told(reader, *_pieces(stream, size))
    # One that comes whole was never kept.
    assert told == ([b"one", b"x" * 50, b"two"] if size == 1000 else [b"one", b"two"])
    assert reader.is_between_events


def test_what_is_kept_of_it_has_a_bound() -> None:
    reader = EventReader(max_event_bytes=20)
    for _ in range(100):
        assert reader.feed(b"x" * 1000) == []
    assert not reader.is_between_events
    assert reader.feed(b"\n\ndata: two\n\n") == [b"data: two"]


@given(st.lists(st.text(), max_size=5), st.integers(1, 30))
def test_every_text_comes_out_as_it_went_in(texts: list[str], size: int) -> None:
    encoded = [text.replace("\r", "").replace("\n", "").strip().encode() for text in texts]
    stream = b"".join(b"data: " + data + b"\n\n" for data in encoded)
    assert _told(EventReader(), *_pieces(stream, size)) == encoded
