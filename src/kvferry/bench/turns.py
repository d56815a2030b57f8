"""What a turn of a growing conversation costs, by where prefill has the history from.

One conversation at a time, and of it one turn at a time, so that nothing but its own past helps or
hinders a turn. Each begins with every prefill cache empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.bench.client import Asker, KvReport, StreamedAnswer
from kvferry.bench.turns_plan import Conversation, TurnArm
from kvferry.errors import MeasurementError
from kvferry.protocol.prefill_report import PrefillReport

_LAST_BLOCKS_TOKENS = 128
"""A prompt counts as cached if all but the last few blocks are; vLLM's have 128 tokens on a CPU."""


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


def _reports(arm: TurnArm, answer: StreamedAnswer) -> tuple[KvReport, PrefillReport]:
    report = answer.report
    if report is None or report.prefill is None:
        raise MeasurementError(
            f"{arm}: the answer's kv_report has no word of prefill: either no prefill instance "
            "took part, or a turn adds so few tokens that the decode instance computed them"
        )
    return report, report.prefill


def _require_as_said(
    arm: TurnArm, report: KvReport, prefill: PrefillReport, num_previous_prompt: int
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
