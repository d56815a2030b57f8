"""What a turn of a growing conversation costs, by where prefill has the history from.

Each prompt is the one before, its answer, and something new. One conversation at a time, and of it
one turn at a time, so that nothing but its own past helps or hinders a turn. Each begins with every
prefill cache empty.
"""

from __future__ import annotations

import enum
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.bench.client import Asker, SeenReport, StreamedAnswer
from kvferry.bench.plan import (
    arm_rotations,
    draw_tokens,
    last_token_id_option,
    require,
    require_sane,
)
from kvferry.clock import Clock
from kvferry.errors import MeasurementError
from kvferry.options import option
from kvferry.protocol.headers import READ_BACK_HEADER
from kvferry.protocol.prefill_result import PrefillReport

if TYPE_CHECKING:
    # Imported when bytes are copied: the command line starts without it.
    import numpy as np
    from numpy.typing import NDArray

SESSION_HEADER = "X-Session-ID"
"""Tells a router which conversation a request belongs to."""
_LAST_BLOCKS_TOKENS = 128
"""A prompt counts as cached if all but the last few blocks are; vLLM's have 128 tokens on a CPU."""
_COPIES = 3


class TurnArm(enum.StrEnum):
    """Where a later turn's prefill has the conversation from."""

    RECOMPUTE = "recompute"
    """From nowhere: prefill has lost its cache, and reads nothing back."""
    WARM = "warm"
    """From its own cache."""
    READ_BACK = "read-back"
    """From the instance that answered; prefill has lost its cache."""
    READ_BACK_PUSH = "read-back+push"
    """The same, and what is new is pushed."""

    @property
    def mode(self) -> str:
        """The mode that is asked of the router for the handoff."""
        return "push" if self is TurnArm.READ_BACK_PUSH else "pull"

    @property
    def reads_back(self) -> bool:
        """Whether prefill is to read the history back."""
        return self in (TurnArm.READ_BACK, TurnArm.READ_BACK_PUSH)

    @property
    def loses_cache(self) -> bool:
        """Whether prefill's cache is emptied before every turn."""
        return self is not TurnArm.WARM


@dataclass(frozen=True, slots=True)
class Script:
    """What one conversation asks, whatever is answered."""

    path: str
    """Where it is posted to."""
    num_turns: int
    fields: Callable[[Sequence[StreamedAnswer]], dict[str, object]]
    """Body fields of the turn that follows the given answers, all there have been."""


Shape = tuple[int, ...]
"""How many tokens each turn of a conversation adds, beside the answer before it."""


def with_histories(
    histories: Sequence[int], *, new_tokens: int, answer_tokens: int
) -> tuple[Shape, ...]:
    """Return two-turn shapes whose second turn has just so many tokens of history.

    Raises ``ConfigError`` for a history that is no longer than an answer.
    """
    for history in histories:
        refusal = f"a history of {history} tokens has no room for an answer of {answer_tokens}"
        require(history > answer_tokens, refusal)
    return tuple((history - answer_tokens, new_tokens) for history in histories)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnsPlan:
    """What is asked, and how often."""

    shapes: tuple[Shape, ...]
    arms: tuple[TurnArm, ...] = option(tuple(TurnArm), "Which of them to interleave.", is_list=True)
    answer_tokens: int = option(16, "Tokens of each answer.", minimum=1)
    repeats: int = option(5, "Conversations of each kind and arm.")
    warmups: int = option(1, "Further ones before that do not count.")
    last_token_id: int = last_token_id_option()

    def __post_init__(self) -> None:
        """Refuse a plan that measures nothing. Raises ``ConfigError``."""
        require_sane(self.arms, self.repeats, self.warmups, self.last_token_id)
        distinct = len(self.shapes) == len(set(self.shapes)) > 0
        require(distinct, "histories must be one or more, each of them once")
        require(min(map(len, self.shapes)) >= 2, "a conversation needs at least two turns")
        smallest = min(self.answer_tokens, *(min(shape) for shape in self.shapes))
        require(smallest >= 1, "every prompt, every later turn and every answer needs a token")

    @property
    def num_requests(self) -> int:
        """How many requests the plan sends."""
        return sum(map(len, self.shapes)) * len(self.arms) * (self.warmups + self.repeats)

    def draw_scripts(self, rng: random.Random) -> list[Script]:
        """Return one conversation of each shape, of random token ids."""
        return [
            token_script(
                [draw_tokens(rng, count, self.last_token_id) for count in shape],
                self.answer_tokens,
            )
            for shape in self.shapes
        ]


def token_script(user_tokens: Sequence[Sequence[int]], answer_tokens: int) -> Script:
    """Return a conversation of token ids, from the new ones of each turn.

    Every answer has the length that is asked for.
    """

    def fields(answers: Sequence[StreamedAnswer]) -> dict[str, object]:
        prompt = list(user_tokens[0])
        for answer, tokens in zip(answers, user_tokens[1:], strict=False):
            prompt += [*answer.token_ids, *tokens]
        return {"prompt": prompt, "max_tokens": answer_tokens, "ignore_eos": True}

    return Script("/v1/completions", len(user_tokens), fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One script under one arm."""

    name: str
    """Its session id and its cache salt: it shares no block with any other conversation."""
    arm: TurnArm
    repeat: int
    """Below 0 it does not count."""
    number: int
    """Of the script among those of its repeat."""
    script: Script

    def headers(self) -> dict[str, str]:
        """Return the headers of each of its requests, beside the mode's."""
        read_back = "auto" if self.arm.reads_back else "off"
        return {SESSION_HEADER: self.name, READ_BACK_HEADER: read_back}

    def body(self, answers: Sequence[StreamedAnswer]) -> dict[str, object]:
        """Return the body of the turn that follows ``answers``."""
        return {
            **self.script.fields(answers),
            "temperature": 0,
            "cache_salt": self.name,
            "stream_options": {"include_usage": True},
        }


def plan_conversations(
    arms: Sequence[TurnArm],
    repeats: range,
    draw: Callable[[], Sequence[Script]],
    rng: random.Random,
    run_id: str,
) -> list[Conversation]:
    """Return every conversation in the order in which they are held.

    Within a repeat all arms have the same scripts, so their turns are pairs. ``run_id`` must be
    another for every run against the same deployment: it keeps apart what they leave in caches.
    """
    return [
        Conversation(
            name=f"{run_id}-{arm}-{repeat}-{number}",
            arm=arm,
            repeat=repeat,
            number=number,
            script=script,
        )
        for repeat, order in zip(repeats, arm_rotations(arms, rng), strict=False)
        for number, script in enumerate(draw())
        for arm in order
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTargets:
    """Base URLs without a trailing slash."""

    router_url: str
    prefill_urls: tuple[str, ...]
    """Every prefill instance behind the router: their caches are emptied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSample:
    """One turn. Durations in seconds."""

    arm: TurnArm
    repeat: int
    conversation: int
    """Which of the conversations of a repeat."""
    turn: int
    """From 1."""
    num_history_tokens: int
    """The prompt before and its answer."""
    num_new_tokens: int
    ttft_s: float
    read_back_s: float
    """Of the prefill: from asking the holder until its blocks were there, or that failed."""
    compute_s: float
    """Of the prefill: from the first forward's start to the last one's end."""
    num_cached_tokens: int
    """Found in prefill's own cache."""
    num_read_back_tokens: int
    num_read_back_bytes: int
    num_computed_tokens: int
    """By prefill."""
    outcome: str
    """Of the read-back; empty: none was tried."""
    num_usage_cached_tokens: int | None
    """What the usage says."""
    plain_copy_s: float | None
    """One copy of as many bytes as were read back, in this process, right after the turn."""
    answer: tuple[int, ...]
    """Token ids."""

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the whole prompt."""
        return self.num_history_tokens + self.num_new_tokens


class TurnsBench:
    """Holds conversations. ``copy_s`` copies that many bytes and returns the seconds it took."""

    def __init__(self, client: Asker, targets: TurnTargets, copy_s: Callable[[int], float]) -> None:
        self._client = client
        self._targets = targets
        self._copy_s = copy_s

    async def run(
        self,
        conversations: Sequence[Conversation],
        *,
        on_turn: Callable[[TurnSample], None] = lambda sample: None,
    ) -> list[TurnSample]:
        """Hold ``conversations`` in order; return the turns of those that count.

        ``on_turn`` hears of every turn. Raises ``MeasurementError`` if an answer is broken or not
        its arm's. A read-back that failed is an outcome, not an error.
        """
        samples = []
        for conversation in conversations:
            taken = await self._hold(conversation, on_turn)
            if conversation.repeat >= 0:
                samples += taken
        return samples

    async def _hold(
        self, conversation: Conversation, on_turn: Callable[[TurnSample], None]
    ) -> list[TurnSample]:
        arm = conversation.arm
        url = f"{self._targets.router_url}{conversation.script.path}"
        answers: list[StreamedAnswer] = []
        samples = []
        for _ in range(conversation.script.num_turns):
            if arm.loses_cache or not answers:
                await self._empty_prefill_caches()
            body = conversation.body(answers)
            headers = conversation.headers()
            answer = await self._client.stream(url, body, mode=arm.mode, headers=headers)
            samples.append(self._sample(conversation, answers, answer))
            answers.append(answer)
            on_turn(samples[-1])
        return samples

    async def _empty_prefill_caches(self) -> None:
        for url in self._targets.prefill_urls:
            await self._client.post_nothing(f"{url}/reset_prefix_cache")

    def _sample(
        self, conversation: Conversation, earlier: Sequence[StreamedAnswer], answer: StreamedAnswer
    ) -> TurnSample:
        arm = conversation.arm
        report, prefill = _reports(arm, answer)
        previous = earlier[-1] if earlier else None
        num_previous_prompt = _reports(arm, previous)[0].num_prompt_tokens if previous else 0
        _require_as_said(arm, report, prefill, num_previous_prompt)
        num_history = num_previous_prompt + (len(previous.token_ids) if previous else 0)
        num_bytes = prefill.num_read_back_bytes
        return TurnSample(
            arm=arm,
            repeat=conversation.repeat,
            conversation=conversation.number,
            turn=len(earlier) + 1,
            num_history_tokens=num_history,
            num_new_tokens=report.num_prompt_tokens - num_history,
            ttft_s=answer.ttft_s,
            read_back_s=prefill.read_back_s,
            compute_s=prefill.compute_s,
            num_cached_tokens=prefill.num_cached_tokens,
            num_read_back_tokens=prefill.num_read_back_tokens,
            num_read_back_bytes=num_bytes,
            num_computed_tokens=prefill.num_computed_tokens,
            outcome=prefill.read_back_outcome,
            num_usage_cached_tokens=answer.num_usage_cached_tokens,
            plain_copy_s=self._copy_s(num_bytes) if num_bytes else None,
            answer=answer.token_ids,
        )


def _reports(arm: TurnArm, answer: StreamedAnswer) -> tuple[SeenReport, PrefillReport]:
    report = answer.report
    if report is None or report.prefill is None:
        raise MeasurementError(
            f"{arm}: the answer's kv_report has no word of prefill: either no prefill instance "
            "took part, or a turn adds so few tokens that the decode instance computed them"
        )
    return report, report.prefill


def _require_as_said(
    arm: TurnArm, report: SeenReport, prefill: PrefillReport, num_previous_prompt: int
) -> None:
    """Raise ``MeasurementError`` if a turn is not what ``arm`` says."""
    if report.mode != arm.mode:
        raise MeasurementError(f"{arm}: the handoff was by {report.mode or 'no mode'}")
    if not arm.reads_back and (prefill.num_read_back_tokens or prefill.read_back_outcome):
        raise MeasurementError(
            f"{arm}: prefill read {prefill.num_read_back_tokens} tokens back although it was "
            f"asked not to: {prefill.read_back_outcome}"
        )
    if arm.loses_cache and prefill.num_cached_tokens:
        raise MeasurementError(
            f"{arm}: prefill had {prefill.num_cached_tokens} tokens in its cache, which was to be "
            "empty; is the cache of every prefill instance emptied?"
        )
    if (
        not arm.loses_cache
        and prefill.num_cached_tokens < num_previous_prompt - _LAST_BLOCKS_TOKENS
    ):
        raise MeasurementError(
            f"{arm}: prefill's cache had only {prefill.num_cached_tokens} of the "
            f"{num_previous_prompt} tokens of the prompt before: its pool is too small, or "
            "another prefill instance was chosen"
        )


class PlainCopy:
    """Copies bytes, as the least that moving them can cost.

    Its two buffers grow as needed; their memory is touched before it is measured.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._buffers: tuple[NDArray[np.uint8], NDArray[np.uint8]] | None = None

    def time_s(self, num_bytes: int) -> float:
        """Return the median seconds of a few copies of ``num_bytes``, at least 1."""
        source, target = self._sized(num_bytes)
        return statistics.median(
            self._copy_s(source[:num_bytes], target[:num_bytes]) for _ in range(_COPIES)
        )

    def _sized(self, num_bytes: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        import numpy as np

        if self._buffers is None or self._buffers[0].size < num_bytes:
            source, target = (np.full(num_bytes, value, dtype=np.uint8) for value in (1, 2))
            self._buffers = source, target
        return self._buffers

    def _copy_s(self, source: NDArray[np.uint8], target: NDArray[np.uint8]) -> float:
        begun_s = self._clock.monotonic_s()
        target[:] = source
        return self._clock.monotonic_s() - begun_s
