"""A prefill leg's stream: progress as it comes, then the answer."""

from __future__ import annotations

import pytest

from kvferry.router.request.legs import PrefillEvents

_HALF = b'data: {"kv_progress": {"num_computed_tokens": 50, "num_prompt_tokens": 100}}\n\n'
_ANSWER = b'{"choices": [{"text": "a"}], "kv_transfer_params": {"x": 1}}'


@pytest.mark.parametrize("chunk_bytes", [1, 7, 1000])
def test_any_cut_of_the_bytes_tells_the_same(chunk_bytes: int) -> None:
    stream = _HALF + b": note\n\n" + b"data: " + _ANSWER + b"\n\ndata: [DONE]\n\n"
    events = PrefillEvents(1_000_000)
    told: list[float] = []
    for start in range(0, len(stream), chunk_bytes):
        told += events.feed(stream[start : start + chunk_bytes])
    assert told == [0.5]
    assert (events.answer, events.is_error) == (_ANSWER, False)


@pytest.mark.parametrize(
    ("computed", "total", "share"), [(0, 0, 0.0), (0, 9, 0.0), (9, 9, 1.0), (12, 9, 1.0)]
)
def test_progress_is_a_share(computed: int, total: int, share: float) -> None:
    told = f'{{"num_computed_tokens": {computed}, "num_prompt_tokens": {total}}}'
    event = f'data: {{"kv_progress": {told}}}\n\n'.encode()
    assert PrefillEvents(1_000_000).feed(event) == [share]


@pytest.mark.parametrize(
    ("data", "is_error"),
    [
        (b'{"error": {"message": "died"}}', True),
        (b'{"error": null, "choices": []}', False),
        (b'{"kv_progress": {"num_computed_tokens": -1}}', False),
        (b"not json", False),
    ],
)
def test_what_is_no_progress_is_the_answer(data: bytes, is_error: bool) -> None:
    events = PrefillEvents(1_000_000)
    assert events.feed(_HALF + b"data: " + data + b"\n\n") == [0.5]
    assert (events.answer, events.is_error) == (data, is_error)


def test_nothing_is_no_answer() -> None:
    events = PrefillEvents(1_000_000)
    assert events.feed(_HALF + b'data: {"choi') == [0.5]
    assert events.answer is None
