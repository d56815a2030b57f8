"""Keys of a request's conversation: which id counts, and what scopes it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from kvferry.errors import RequestError
from kvferry.router.history.keys import (
    ID_FIELDS,
    MAX_ID_CHARS,
    ConversationKeys,
    Recogniser,
    conversation_id,
)
from kvferry.router.request.parsing import ParsedBody, parse_body

_HEADERS = ("X-Session-ID", "X-Conversation-ID")
_CHAT = "/v1/chat/completions"
_MESSAGES = [{"role": "user", "content": "hi"}]


def _body(**fields: Any) -> ParsedBody:  # noqa: ANN401
    return parse_body(json.dumps(fields).encode())


def _id(headers: dict[str, str], **fields: object) -> str | None:
    return conversation_id(CIMultiDict(headers), _body(**fields), _HEADERS)


def _keys(
    tenant: bytes = b"t", path: str = _CHAT, secret: bytes = b"s" * 32, **fields: object
) -> ConversationKeys:
    recogniser = Recogniser(secret, _HEADERS)
    return recogniser.keys_of(tenant, path, CIMultiDict({"x-session-id": "c"}), _body(**fields))


def test_headers_go_before_fields_in_their_order() -> None:
    fields = {"prompt_cache_key": "p", "conversation_id": "c", "session_id": "s"}
    assert _id({"x-conversation-id": "hc", "X-SESSION-ID": " hs "}, **fields) == "hs"
    assert _id({"x-conversation-id": "hc"}, **fields) == "hc"
    assert _id({}, **fields) == "s"
    assert _id({}, prompt_cache_key="p", conversation_id="c") == "c"
    assert _id({}, prompt_cache_key="p") == "p"
    assert _id({}) is None


@pytest.mark.parametrize("nothing", ["", " ", None])
def test_an_id_that_names_nothing_is_passed_over(nothing: str | None) -> None:
    assert _id({"X-Session-ID": nothing or ""}, session_id=nothing, conversation_id="c") == "c"
    assert _id({}, session_id=nothing) is None


@pytest.mark.parametrize("wrong", [5, 1.5, ["a"], ["a"] * 5000, {"a": "b"}, True, False])
@pytest.mark.parametrize("headers", [{}, {"X-Session-ID": "s"}], ids=["alone", "beside another"])
def test_a_field_of_another_type_is_refused(wrong: object, headers: dict[str, str]) -> None:
    for name in ID_FIELDS:
        with pytest.raises(RequestError, match=f"^{name} must be a text$") as caught:
            _id(headers, **{name: wrong})
        assert (caught.value.status, caught.value.param) == (400, name)
        assert caught.value.code == "invalid_type"


def test_text_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="session_id must be a text"):
        conversation_id(CIMultiDict(), parse_body(b'{"session_id": "\xff"}'), _HEADERS)
    with pytest.raises(RequestError, match="X-Session-ID must be a text in UTF-8"):
        _id({"X-Session-ID": "a\udcff"})


@pytest.mark.parametrize("char", ["x", "\u00e9", "\U0001f600", "\n"])
def test_the_longest_id_counts_however_it_is_written(char: str) -> None:
    longest = char.join("a" * (MAX_ID_CHARS // 2 + 1))[:MAX_ID_CHARS]
    for name in ID_FIELDS:
        assert _id({}, **{name: longest}) == longest.strip()


@pytest.mark.parametrize("num_more", [1, 5_000, 5_000_000])
def test_a_longer_id_is_refused(num_more: int) -> None:
    longer = "x" * (MAX_ID_CHARS + num_more)
    with pytest.raises(RequestError, match="X-Session-ID must have at most 256 characters") as c:
        _id({"X-Session-ID": longer})
    assert (c.value.status, c.value.param) == (400, "X-Session-ID")
    for name in ID_FIELDS:
        with pytest.raises(RequestError, match=f"^{name} must have at most 256 characters$") as c:
            _id({"X-Session-ID": "s"}, **{name: longer})
        assert (c.value.param, c.value.code) == (name, "invalid_value")


def test_id_is_one_wherever_it_stands() -> None:
    recogniser = Recogniser(b"s" * 32, _HEADERS)
    by_header = recogniser.keys_of(b"", _CHAT, CIMultiDict({"X-Session-ID": "c"}), _body())
    by_field = recogniser.keys_of(b"", _CHAT, CIMultiDict(), _body(session_id="c"))
    assert by_header.by_id == by_field.by_id is not None


@pytest.mark.parametrize(
    "other",
    [
        {"tenant": b"u"},
        {"path": "/v1/completions"},
        {"secret": b"z" * 32},
        {"model": "b"},
        {"model": None},
        {"cache_salt": "b"},
    ],
)
def test_nothing_meets_across_scopes(other: dict[str, Any]) -> None:
    given: dict[str, Any] = {"model": "a", "cache_salt": "a", "messages": _MESSAGES}
    one, two = _keys(**given), _keys(**(given | other))
    assert one.to_remember() == _keys(**given).to_remember()
    assert not set(one.to_forget()) & set(two.to_forget())


def test_keys_to_forget_are_those_of_all_turns() -> None:
    turns = [_MESSAGES, _MESSAGES * 3, _MESSAGES * 5]
    last = set(_keys(messages=turns[-1]).to_forget())
    for messages in turns:
        assert set(_keys(messages=messages).to_remember()) <= last


@given(st.text(max_size=30), st.text(max_size=30))
def test_keys_hold_no_text(id_text: str, content: str) -> None:
    recogniser = Recogniser(b"s" * 32, ())
    messages = [{"content": content}]
    keys = recogniser.keys_of(
        b"tenant", _CHAT, CIMultiDict(), _body(session_id=id_text, messages=messages)
    )
    assert all(len(key) == 16 for key in keys.to_forget())
    assert (keys.by_id is None) is (not id_text.strip())
