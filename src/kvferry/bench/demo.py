"""What the demo shows: chats by each mode beside one plain instance, a conversation with reuse.

Owns what is asked and what counts as right; prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.bench.client import CompletionClient, StreamedAnswer
from kvferry.bench.turns import Script, TurnArm, TurnSample
from kvferry.errors import MeasurementError

CHAT_PATH = "/v1/chat/completions"
REUSE_ARMS = (TurnArm.RECOMPUTE, TurnArm.READ_BACK_PUSH)
"""The conversation with reuse off, and on."""
_LEAST_READ_BACK_SHARE = 0.5
"""Of the history: answers may be split into other tokens when they are sent back."""
_SYSTEM = {"role": "system", "content": "You are a helpful assistant. Answer briefly."}
_SHIPS = ("Aurora", "Borealis", "Calypso", "Dorado", "Electra")
_TOWNS = ("Bergen", "Cork", "Dover", "Esbjerg", "Gdansk", "Hull", "Izmir")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPlan:
    """Which chats: ``notes[i]`` lines of logbook before the question of chat i."""

    notes: tuple[int, ...] = (3, 20, 80)
    modes: tuple[str, ...] = ("pull", "push")
    max_tokens: int = 24
    least_longest_tokens: int = 2001
    """The longest prompt must have this many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRow:
    """One chat through the router. Durations in seconds."""

    mode: str
    num_prompt_tokens: int
    ttft_s: float
    second_gap_s: float
    num_received_bytes: int
    transport: str
    moved_by: str
    """The mode that the decode instance reports."""
    outcome: str
    is_same: bool
    """Whether one plain instance gave the same tokens."""
    text: str

    def complaint(self) -> str | None:
        """What is wrong with this chat, if anything."""
        chat = f"{self.num_prompt_tokens} prompt tokens by {self.mode}"
        if not self.is_same:
            return f"{chat}: one plain instance gave other tokens"
        if self.num_received_bytes == 0:
            return f"{chat}: no KV was moved: {self.outcome or '-'}"
        if self.moved_by != self.mode:
            return f"{chat}: KV was moved by {self.moved_by or 'no mode'}"
        return None


def logbook(entries: range) -> list[str]:
    """Return lines of a ferry's logbook."""
    return [
        f"Entry {number}: the {_SHIPS[number % 5]} left {_TOWNS[number % 7]} "
        f"at {number % 24:02d}:{number * 7 % 60:02d} with {100 + number * 37 % 400} passengers."
        for number in entries
    ]


def chat_messages(num_notes: int) -> list[dict[str, str]]:
    """Return a chat whose prompt has ``num_notes`` lines of a ferry's logbook."""
    lines = logbook(range(num_notes))
    question = "In one sentence, what is a ferry for?"
    if lines:
        question = "Which ship is named in the first entry, and where did it leave from?"
    return [_SYSTEM, {"role": "user", "content": "\n".join([*lines, question])}]


def logbook_chat(notes: Sequence[int], max_tokens: int) -> Script:
    """Return a chat in which the user shows another page of a logbook every turn.

    The page of turn i has ``notes[i]`` lines.
    """
    pages = []
    for number, count in enumerate(notes):
        begin = sum(notes[:number])
        title = f"Page {number + 1} of the logbook:"
        question = f"Which ship is named first on page {number + 1}?"
        pages.append("\n".join([title, *logbook(range(begin, begin + count)), question]))

    def fields(answers: Sequence[StreamedAnswer]) -> dict[str, object]:
        messages = [_SYSTEM]
        for page, answer in zip(pages, answers, strict=False):
            messages.append({"role": "user", "content": page})
            messages.append({"role": "assistant", "content": answer.text})
        messages.append({"role": "user", "content": pages[len(answers)]})
        return {"messages": messages, "max_tokens": max_tokens}

    return Script(CHAT_PATH, len(pages), fields)


async def run_chats(
    client: CompletionClient,
    router_url: str,
    plain_url: str,
    plan: ChatPlan,
    *,
    on_row: Callable[[ChatRow], None] = lambda row: None,
) -> list[ChatRow]:
    """Chat through ``router_url``, repeat each chat on the instance at ``plain_url``, compare.

    Every answer to one chat is under a cache salt of its own, so that each computes everything
    anew. Raises ``MeasurementError`` if an answer is broken.
    """
    rows = []
    for number, num_notes in enumerate(plan.notes):
        body: dict[str, object] = {
            "messages": chat_messages(num_notes),
            "max_tokens": plan.max_tokens,
            "temperature": 0,
        }
        salted = {**body, "cache_salt": f"plain-{number}"}
        plain = await client.stream(f"{plain_url}{CHAT_PATH}", salted)
        for mode in plan.modes:
            salted = {**body, "cache_salt": f"{mode}-{number}"}
            moved = await client.stream(f"{router_url}{CHAT_PATH}", salted, mode=mode)
            rows.append(_row(mode, moved, plain))
            on_row(rows[-1])
    return rows


def _row(mode: str, moved: StreamedAnswer, plain: StreamedAnswer) -> ChatRow:
    if moved.report is None or plain.report is None:
        raise MeasurementError("an answer has no kv_report")
    if plain.report.num_cached_tokens or plain.report.num_received_bytes:
        raise MeasurementError("the plain instance did not compute the whole prompt by itself")
    has_second = len(moved.token_ids) > 1
    return ChatRow(
        mode=mode,
        num_prompt_tokens=moved.report.num_prompt_tokens,
        ttft_s=moved.ttft_s,
        second_gap_s=moved.second_gap_s if has_second else 0.0,
        num_received_bytes=moved.report.num_received_bytes,
        transport=moved.report.transport,
        moved_by=moved.report.mode,
        outcome=moved.report.receive_outcome,
        is_same=moved.token_ids == plain.token_ids,
        text=moved.text,
    )


def complaints(rows: list[ChatRow], plan: ChatPlan) -> list[str]:
    """Return in words everything that is wrong with the chats; empty if all is well."""
    wrong = [complaint for row in rows if (complaint := row.complaint())]
    longest = max((row.num_prompt_tokens for row in rows), default=0)
    if longest < plan.least_longest_tokens:
        wrong.append(
            f"the longest prompt has {longest} tokens, fewer than {plan.least_longest_tokens}"
        )
    return wrong


@dataclass(frozen=True, slots=True)
class ReuseRow:
    """One turn of the conversation under both arms."""

    off: TurnSample
    on: TurnSample

    @property
    def is_same(self) -> bool:
        """Whether both answered the same tokens."""
        return self.off.answer == self.on.answer

    @property
    def times_faster(self) -> float:
        """How much sooner the first token came with reuse on."""
        return self.off.ttft_s / self.on.ttft_s

    def complaint(self) -> str | None:
        """What is wrong with this turn, if anything."""
        turn = f"turn {self.on.turn} of the conversation"
        if not self.is_same:
            return f"{turn}: reuse on and off gave other tokens"
        wanted = _LEAST_READ_BACK_SHARE * self.on.num_history_tokens
        if self.on.num_read_back_tokens < wanted:
            return (
                f"{turn}: {self.on.num_read_back_tokens} of {self.on.num_history_tokens} tokens "
                f"of history were read back: {self.on.outcome or 'it was not tried'}"
            )
        return None


def reuse_rows(samples: Sequence[TurnSample]) -> list[ReuseRow]:
    """Return the turns of one conversation that was held under both arms, in order."""
    off, on = (
        sorted((s for s in samples if s.arm is arm), key=lambda sample: sample.turn)
        for arm in REUSE_ARMS
    )
    return [ReuseRow(*pair) for pair in zip(off, on, strict=True)]
