"""Prompts as chains of digests: what a later prompt is found by, and what it is not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.router.history.prefix import (
    FINE_PIECE_BYTES,
    MAX_PIECES,
    PIECE_BYTES,
    PromptPrefix,
    prefix_of,
)
from kvferry.router.request.parsing import parse_body

_ROOT = b"root"
_SYSTEM = {"role": "system", "content": "be brief"}
_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
_messages = st.lists(st.dictionaries(st.text(max_size=4), _json, max_size=3), max_size=8)


def _of(body: dict[str, Any] | bytes, root: bytes = _ROOT) -> PromptPrefix:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return prefix_of(parse_body(raw), root)


def _chat(messages: Sequence[object], **fields: object) -> PromptPrefix:
    return _of({"messages": list(messages), **fields})


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _continues(later: PromptPrefix, earlier: PromptPrefix) -> bool:
    tip = earlier.tip
    return tip.length > 0 and later.digest_at(tip.length) == tip.digest


def _finds(later: PromptPrefix, earlier: PromptPrefix) -> bool:
    """Whether a search for ``later`` meets a key of ``earlier``."""
    keys = later.keys_beyond(0)
    met = next((key for key in keys if key in earlier.tip.keys), None)
    return met is not None or any(key in earlier.tip.keys for key in later.finer_keys(None))


# -- chats ------------------------------------------------------------------------------------
def test_next_turn_begins_with_the_one_before_whatever_was_answered() -> None:
    first = [_SYSTEM, _said("user", "hi")]
    tip = _chat(first).tip
    for answer in ("hello", "hel", ""):
        later = _chat([*first, _said("assistant", answer), _said("user", "more")])
        assert later.digest_at(tip.length) == tip.digest
        assert later.keys_beyond(0)[2] == tip.keys[0]
        assert later.keys_beyond(2) == later.keys_beyond(0)[:2]


def test_an_edited_message_parts_what_follows_it() -> None:
    chat = [_said("user", str(number)) for number in range(6)]
    digests = _chat(chat).keys_beyond(0)[::-1]
    for edited in range(6):
        other = [*chat[:edited], _said("user", "other"), *chat[edited + 1 :]]
        found = _chat(other).keys_beyond(0)[::-1]
        assert [a == b for a, b in zip(digests, found, strict=True)] == [
            number < edited for number in range(6)
        ]


def test_forks_meet_where_they_parted() -> None:
    trunk = [_SYSTEM, _said("user", "hi"), _said("assistant", "a")]
    forks = [_chat([*trunk, _said("user", name)]) for name in "abc"]
    assert len({fork.tip.digest for fork in forks}) == 3
    assert len({fork.digest_at(3) for fork in forks}) == 1


def test_a_shortened_history_continues_an_earlier_turn() -> None:
    turns = [_said("user", str(number)) for number in range(5)]
    shortened = _chat([*turns[:2], _said("user", "other")])
    assert _continues(shortened, _chat(turns[:2]))
    assert not _continues(shortened, _chat(turns[:4]))
    assert shortened.digest_at(4) is None


@pytest.mark.parametrize("field", ["tools", "functions", "chat_template_kwargs"])
def test_what_stands_before_the_messages_counts(field: str) -> None:
    tips = [
        _chat([_SYSTEM], **fields).tip.digest
        for fields in ({}, {field: [{"a": 1}]}, {field: [{"a": 2}]})
    ]
    assert len(set(tips)) == 3
    assert _chat([_SYSTEM], temperature=1).tip.digest == tips[0]


def test_spelling_of_json_does_not_count() -> None:
    one = _of(b'{"messages": [{"role": "user", "content": "\\u00e9"}], "tools": [{"a":1,"b":2}]}')
    two = _of('{"tools":[{"b" : 2,"a":1}],"messages":[{"content":"é","role":"user"}]}'.encode())
    assert one.tip == two.tip


def test_a_large_message_is_taken_as_it_is_written() -> None:
    content = "x" * 100_000
    tips = [
        _of(b'{"messages": [{"content":%s"%s"}]}' % (space, content.encode())).tip.digest
        for space in (b"", b" ")
    ]
    assert tips[0] != tips[1]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": "x"},
        {"messages": []},
        {"prompt": ["a", "b"]},
        {"prompt": ""},
        {"prompt": None, "messages": None},
        b'{"prompt": "not UTF-8: \xff, but long enough"}',
    ],
)
def test_other_bodies_have_no_prefix(body: dict[str, Any] | bytes) -> None:
    prefix = _of(body)
    assert prefix.tip.keys == ()
    assert prefix.tip.length == 0
    assert list(prefix.keys_beyond(0)) == list(prefix.finer_keys(None)) == []
    assert prefix.digest_at(0) is None
    assert prefix.digest_at(1) is None


def test_messages_beyond_the_limit_cost_nothing() -> None:
    chat = [_said("user", str(number)) for number in range(MAX_PIECES + 5)]
    assert _chat(chat).tip == _chat(chat[:MAX_PIECES]).tip
    assert _chat(chat).tip.length == MAX_PIECES


def test_roots_have_nothing_in_common() -> None:
    for body in ({"messages": [_SYSTEM]}, {"prompt": "x" * 600}):
        one, two = _of(body, b"one"), _of(body, b"two")
        assert not _finds(one, two)


@given(_messages, _messages, _messages)
def test_chats_have_in_common_what_they_begin_with(
    common: list[object], left: list[object], right: list[object]
) -> None:
    one, two = _chat([*common, *left]), _chat([*common, *right])
    num_same = 0
    for a, b in zip([*common, *left], [*common, *right], strict=False):
        # Not by Python's equality, to which True is 1.
        if msgspec.json.encode(a, order="sorted") != msgspec.json.encode(b, order="sorted"):
            break
        num_same += 1
    for length in range(1, max(len(common) + len(left), len(common) + len(right)) + 1):
        found = one.digest_at(length), two.digest_at(length)
        assert (found[0] == found[1] is not None) is (length <= num_same)


# -- prompts ----------------------------------------------------------------------------------
@pytest.mark.parametrize("length", [20, 255, 256, 257, 700, 5000])
@pytest.mark.parametrize("kind", ["text", "ids"])
def test_a_longer_prompt_continues_a_shorter_one(length: int, kind: str) -> None:
    text = "".join(chr(97 + number * 7 % 26) for number in range(length + 300))
    ids = list(range(1000, 1000 + length + 300))
    whole, part = (text, text[:length]) if kind == "text" else (ids, ids[:length])
    earlier, later = _of({"prompt": part}), _of({"prompt": whole})
    assert _continues(later, earlier)
    assert _finds(later, earlier)
    assert not _continues(earlier, later)


def test_prompts_that_part_in_the_last_bytes_share_a_beginning_only() -> None:
    few_shot = "y" * 1000
    one, two = _of({"prompt": few_shot + "2+3"}), _of({"prompt": few_shot + "2+4"})
    assert _finds(two, one)
    assert not _continues(two, one)


def test_text_is_told_from_token_ids_and_one_in_a_list_is_itself() -> None:
    text = "1,2,3,4,5,6,7,8,9,10,11,12,13"
    ids = [int(number) for number in text.split(",")]
    assert _of({"prompt": [text]}).tip == _of({"prompt": text}).tip
    assert _of({"prompt": [ids]}).tip == _of({"prompt": ids}).tip
    assert _of({"prompt": ids}).tip != _of({"prompt": text}).tip
    compact = json.dumps({"prompt": ids}, separators=(",", ":")).encode()
    assert _of(compact).tip == _of({"prompt": ids}).tip


def test_short_prompts_are_found_by_fine_pieces() -> None:
    earlier, later = _of({"prompt": "what is a ferry?"}), _of({"prompt": "what is a ferry? it is"})
    assert list(later.keys_beyond(0)) == []
    assert set(later.finer_keys(None)) & set(earlier.tip.keys)
    assert _of({"prompt": "hi"}).tip.keys == ()


def test_a_prompt_beyond_the_limit_is_known_by_its_beginning() -> None:
    limit = MAX_PIECES * PIECE_BYTES
    one, two = _of({"prompt": "a" * (limit + 10)}), _of({"prompt": "a" * (limit + 5000)})
    assert one.tip == two.tip
    assert one.tip.length == limit
    assert len(one.keys_beyond(0)) == MAX_PIECES


@given(
    st.text("ab", max_size=3 * PIECE_BYTES),
    st.text("ab", max_size=PIECE_BYTES),
    st.text("ab", max_size=PIECE_BYTES),
)
def test_texts_have_in_common_what_they_begin_with(common: str, left: str, right: str) -> None:
    one, two = _of({"prompt": common + left}), _of({"prompt": common + right})
    assert _continues(two, one) is (
        one.tip.length > 0 and (common + right).startswith(common + left)
    )
    if len(common) >= FINE_PIECE_BYTES:
        start = _of({"prompt": common})
        assert _continues(one, start)
        assert _continues(two, start)
        assert _finds(one, start)


@given(st.binary(max_size=40))
def test_any_body_has_a_prefix_or_none(raw: bytes) -> None:
    escaped = raw.replace(b'"', b"").replace(b"\\", b"")
    written = b'"' + bytes(byte for byte in escaped if byte >= 0x20) + b'"'
    for body in (b'{"messages":[{"a":%s}]}', b'{"prompt":%s}', b'{"prompt":[1, %s]}'):
        prefix = _of(body % written)
        tip = prefix.tip
        assert prefix.digest_at(tip.length) == (tip.digest or None)
