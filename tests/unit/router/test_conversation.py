"""Keys of a request's conversation: which id counts, and what scopes it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from kvferry.router.conversation import (
    MAX_ID_CHARS,
    ConversationKeys,
    Recogniser,
    conversation_id,
)
from kvferry.router.parsing import ParsedBody, parse_body

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


@pytest.mark.parametrize("wrong", ["", " ", "x" * (MAX_ID_CHARS + 1)])
def test_an_id_without_use_is_passed_over(wrong: str) -> None:
    assert _id({"X-Session-ID": wrong}, session_id=wrong, conversation_id="c") == "c"


@pytest.mark.parametrize("wrong", [5, None, ["a"], {"a": "b"}, True, "x" * 100_000])
def test_a_field_that_is_no_short_text_is_passed_over(wrong: object) -> None:
    assert _id({}, session_id=wrong) is None


def test_the_longest_id_counts_however_it_is_written() -> None:
    longest = "é" * MAX_ID_CHARS
    assert _id({}, session_id=longest) == longest


def test_a_header_that_is_no_text_is_passed_over() -> None:
    assert _id({"X-Session-ID": "a\udcff"}) is None


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
