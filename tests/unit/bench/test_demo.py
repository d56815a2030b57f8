"""Chats are compared token by token; whatever is not right is said."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.bench.client import CompletionClient, StreamedAnswer
from kvferry.bench.demo import (
    ChatPlan,
    ChatRow,
    chat_messages,
    complaints,
    logbook_chat,
    run_chats,
)
from kvferry.errors import MeasurementError
from tests.unit.bench.conftest import ServeAnswer, with_mode

_PLAN = ChatPlan(notes=(0, 3), least_longest_tokens=50)


def _answer(tokens: list[int], report: dict[str, Any] | None) -> list[dict[str, Any] | bytes]:
    events: list[dict[str, Any] | bytes] = [
        {"choices": [{"delta": {"content": "x"}, "token_ids": [token]}]} for token in tokens
    ]
    return [*events, {"choices": [], "kv_report": report}, b"data: [DONE]\n\n"]


async def _run(
    serve_answer: ServeAnswer,
    client: CompletionClient,
    *,
    moved: dict[str, Any] | None,
    plain: dict[str, Any] | None,
    plain_tokens: list[int],
) -> tuple[list[ChatRow], list[dict[str, Any]]]:
    bodies: list[dict[str, Any]] = []

    @with_mode
    def routed(body: dict[str, Any], mode: str | None) -> list[dict[str, Any] | bytes]:
        bodies.append(body)
        return _answer([1, 2], None if moved is None else {"mode": mode, **moved})

    def direct(body: dict[str, Any]) -> list[dict[str, Any] | bytes]:
        bodies.append(body)
        return _answer(plain_tokens, plain)

    rows = await run_chats(client, await serve_answer(routed), await serve_answer(direct), _PLAN)
    return rows, bodies


_MOVED = {"num_prompt_tokens": 60, "num_received_bytes": 8, "transport": "shm"}


async def test_equal_tokens_are_fine(serve_answer: ServeAnswer, client: CompletionClient) -> None:
    rows, bodies = await _run(serve_answer, client, moved=_MOVED, plain={}, plain_tokens=[1, 2])
    assert [row.mode for row in rows] == ["pull", "push"] * 2
    assert all(row.is_same for row in rows)
    assert complaints(rows, _PLAN) == []
    assert [body["cache_salt"] for body in bodies] == [
        f"{who}-{chat}" for chat in range(2) for who in ("plain", "pull", "push")
    ]
    assert bodies[0]["messages"] == bodies[1]["messages"] == bodies[2]["messages"]
    assert all(body["temperature"] == 0 for body in bodies)


@pytest.mark.parametrize(
    ("moved", "plain_tokens", "words"),
    [
        (_MOVED, [1, 3], "gave other tokens"),
        (_MOVED, [1, 2, 3], "gave other tokens"),
        ({**_MOVED, "num_received_bytes": 0, "receive_outcome": "gone"}, [1, 2], "moved: gone"),
        ({**_MOVED, "mode": "pull"}, [1, 2], "tokens by push: KV was moved by pull"),
        ({**_MOVED, "num_prompt_tokens": 49}, [1, 2], "longest prompt has 49 tokens"),
    ],
)
async def test_what_is_wrong_is_said(
    serve_answer: ServeAnswer,
    client: CompletionClient,
    moved: dict[str, Any],
    plain_tokens: list[int],
    words: str,
) -> None:
    rows, _ = await _run(serve_answer, client, moved=moved, plain={}, plain_tokens=plain_tokens)
    assert any(words in complaint for complaint in complaints(rows, _PLAN))


@pytest.mark.parametrize(
    ("moved", "plain", "words"),
    [
        (None, {}, "no kv_report"),
        (_MOVED, {"num_cached_tokens": 16}, "did not compute the whole prompt"),
        (_MOVED, {"num_received_bytes": 16}, "did not compute the whole prompt"),
    ],
)
async def test_answers_that_prove_nothing_are_refused(
    serve_answer: ServeAnswer,
    client: CompletionClient,
    moved: dict[str, Any] | None,
    plain: dict[str, Any],
    words: str,
) -> None:
    with pytest.raises(MeasurementError, match=words):
        await _run(serve_answer, client, moved=moved, plain=plain, plain_tokens=[1, 2])


def test_no_rows_are_a_complaint() -> None:
    assert complaints([], _PLAN)


def test_notes_lengthen_the_prompt_and_come_first() -> None:
    short, long = chat_messages(0)[1]["content"], chat_messages(5)[1]["content"]
    assert "Entry" not in short
    assert long.count("Entry ") == 5
    assert long.splitlines()[0].startswith("Entry 0: the Aurora left Bergen")
    assert long.splitlines()[-1].endswith("?")


def _said(text: str) -> StreamedAnswer:
    return StreamedAnswer(
        sent_s=0.0,
        first_byte_s=1.0,
        token_ids=(1,),
        token_times_s=(1.0,),
        text=text,
        finish_reason="stop",
        ended_s=1.0,
        report=None,
    )


def test_a_chat_of_several_turns_repeats_what_was_said_and_goes_on() -> None:
    script = logbook_chat((2, 3, 1), max_tokens=5)
    assert (script.num_turns, script.path) == (3, "/v1/chat/completions")
    first: Any = script.fields([])
    assert first["max_tokens"] == 5
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    third: Any = script.fields([_said("one"), _said("two")])
    assert [message["role"] for message in third["messages"]] == [
        "system",
        *("user", "assistant") * 2,
        "user",
    ]
    assert third["messages"][:2] == first["messages"]
    assert [third["messages"][place]["content"] for place in (2, 4)] == ["one", "two"]
    pages = [message["content"] for message in third["messages"][1::2]]
    assert ["Entry 0:" in pages[0], "Entry 2:" in pages[1], "Entry 5:" in pages[2]] == [True] * 3
