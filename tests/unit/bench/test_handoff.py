"""Arms alternate over fresh prompts; a sample is what it says or the measurement fails."""

from __future__ import annotations

import collections
import itertools
import random
import time
from typing import Any

import pytest

from kvferry.bench.client import CompletionClient
from kvferry.bench.handoff import (
    Arm,
    HandoffPlan,
    HandoffSample,
    Targets,
    measure_handoffs,
)
from kvferry.bench.plan import arm_orders
from kvferry.errors import ConfigError, MeasurementError
from tests.unit.bench.conftest import Answer, ServeAnswer, with_mode

_PULLED = {
    "num_received_bytes": 64,
    "num_received_tokens": 3,
    "transport": "shm",
    "mode": "pull",
}
_PLAN = HandoffPlan(
    arms=(Arm.COLOCATED, Arm.PULL), lengths_tokens=(3, 5), repeats=2, warmups=1, max_tokens=4
)


class _Instance:
    """Answers with four tokens and a report, and remembers the prompts."""

    def __init__(
        self, name: str, seen: list[tuple[str, list[int]]], report: dict[str, Any]
    ) -> None:
        self._name = name
        self._seen = seen
        self._report = report

    def __call__(self, body: dict[str, Any]) -> list[dict[str, Any] | bytes]:
        self._seen.append((self._name, body["prompt"]))
        tokens: list[dict[str, Any] | bytes] = [
            {"choices": [{"token_ids": [token_id]}]} for token_id in range(4)
        ]
        report = {"prefill_end_s": time.monotonic(), **self._report}
        return [*tokens, {"choices": [], "kv_report": report}, b"data: [DONE]\n\n"]


async def _measure(
    serve_answer: ServeAnswer,
    client: CompletionClient,
    *,
    pull: dict[str, Any],
    plain: dict[str, Any],
    seen: list[tuple[str, list[int]]] | None = None,
) -> list[HandoffSample]:
    seen = [] if seen is None else seen
    targets = Targets(
        router_url=await serve_answer(_Instance("router", seen, pull)),
        plain_url=await serve_answer(_Instance("plain", seen, plain)),
    )
    return await measure_handoffs(client, targets, _PLAN, random.Random(1))


async def test_arms_alternate_over_prompts_of_their_own(
    serve_answer: ServeAnswer, client: CompletionClient
) -> None:
    seen: list[tuple[str, list[int]]] = []
    samples = await _measure(serve_answer, client, pull=_PULLED, plain={}, seen=seen)
    assert len(seen) == _PLAN.num_requests == 12
    assert len({tuple(prompt) for _, prompt in seen}) == 12
    assert [len(prompt) for _, prompt in seen] == [3, 3, 5, 5] * 3
    names = [name for name, _ in seen]
    assert names[0:4] == ["router", "plain"] * 2 or names[0:4] == ["plain", "router"] * 2
    assert names[4:8] == list(reversed(names[0:4]))
    assert len(samples) == 8
    assert {sample.repeat for sample in samples} == {0, 1}
    assert {(s.arm, s.num_received_bytes) for s in samples} == {(Arm.COLOCATED, 0), (Arm.PULL, 64)}


async def test_durations_are_not_negative_and_add_up(
    serve_answer: ServeAnswer, client: CompletionClient
) -> None:
    for sample in await _measure(serve_answer, client, pull=_PULLED, plain={}):
        assert 0 <= sample.after_prefill_s <= sample.ttft_s
        assert sample.until_prefill_end_s + sample.after_prefill_s == pytest.approx(sample.ttft_s)
        assert sample.extra_gap_s == sample.second_gap_s - sample.decode_step_s


@pytest.mark.parametrize(
    ("pull", "plain", "words"),
    [
        ({"receive_outcome": "gone"}, {}, "nothing was moved for [35] tokens: gone"),
        (_PULLED, _PULLED, "colocated: blocks were moved"),
        ({**_PULLED, "prefill_end_s": None}, {}, "no kv_report with the end of prefill"),
        ({**_PULLED, "prefill_end_s": 0.0}, {}, "outside the request's time"),
        ({**_PULLED, "num_cached_tokens": 16}, {}, "16 prompt tokens were cached"),
        ({**_PULLED, "mode": "push"}, {}, "pull: the blocks moved by push"),
        ({**_PULLED, "mode": ""}, {}, "pull: the blocks moved by no mode"),
    ],
)
async def test_answers_that_are_not_their_arm_s_are_refused(
    serve_answer: ServeAnswer,
    client: CompletionClient,
    pull: dict[str, Any],
    plain: dict[str, Any],
    words: str,
) -> None:
    with pytest.raises(MeasurementError, match=words):
        await _measure(serve_answer, client, pull=pull, plain=plain)


@pytest.mark.parametrize(
    "wrong",
    [
        {"arms": ()},
        {"arms": (Arm.PULL, Arm.PULL)},
        {"lengths_tokens": ()},
        {"lengths_tokens": (0,)},
        {"repeats": 0},
        {"warmups": -1},
        {"max_tokens": 3},
        {"last_token_id": 1},
    ],
)
def test_plans_that_measure_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        HandoffPlan(**wrong)


async def test_the_router_is_asked_for_each_arm_s_mode(
    serve_answer: ServeAnswer, client: CompletionClient
) -> None:
    asked: list[tuple[str, str | None]] = []

    def router(name: str) -> Answer:
        def answer(body: dict[str, Any], mode: str | None) -> list[dict[str, Any] | bytes]:
            asked.append((name, mode))
            return _Instance(name, [], {**_PULLED, "mode": mode})(body)

        return with_mode(answer)

    targets = Targets(
        router_url=await serve_answer(router("early")),
        plain_url="http://127.0.0.1:1",
        late_router_url=await serve_answer(router("late")),
    )
    arms = (Arm.PULL, Arm.PUSH, Arm.PUSH_LATE)
    plan = HandoffPlan(arms=arms, lengths_tokens=(3,), repeats=1, warmups=0, max_tokens=4)
    samples = await measure_handoffs(client, targets, plan, random.Random(1))
    assert sorted(asked) == [("early", "pull"), ("early", "push"), ("late", "push")]
    assert {sample.arm for sample in samples} == set(arms)


def test_late_choice_needs_a_router_for_it() -> None:
    targets = Targets(router_url="http://a", plain_url="http://b")
    with pytest.raises(ConfigError, match="push-late needs a router"):
        targets.url(Arm.PUSH_LATE)


def test_every_arm_has_every_place_equally_often() -> None:
    orders = itertools.islice(arm_orders(tuple(Arm), random.Random(1)), 24)
    places = collections.Counter((place, arm) for o in orders for place, arm in enumerate(o))
    assert len(places) == 16
    assert set(places.values()) == {6}
