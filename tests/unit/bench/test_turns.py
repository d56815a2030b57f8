"""Caches are emptied where the arm says so; a sample is what its arm says or the run fails."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from kvferry.bench.turns import (
    TurnArm,
    TurnSample,
    TurnsBench,
    TurnsPlan,
    plan_conversations,
)
from kvferry.errors import MeasurementError
from tests.unit.bench.turns_deployment import Json, ScriptedDeployment, serving

_PLAN = TurnsPlan(shapes=((200, 70, 80),), answer_tokens=4)


def _copy_s(num_bytes: int) -> float:
    return num_bytes / 1e6


async def _run(
    deployment: ScriptedDeployment,
    *,
    arms: tuple[TurnArm, ...] = tuple(TurnArm),
    repeats: range = range(1),
    on_turn: Callable[[TurnSample], None] = lambda sample: None,
) -> list[TurnSample]:
    rng = random.Random(1)
    conversations = plan_conversations(arms, repeats, lambda: _PLAN.draw_scripts(rng), rng, "run")
    async with serving(deployment) as client:
        bench = TurnsBench(client, deployment.targets, _copy_s)
        return await bench.run(conversations, on_turn=on_turn)


@pytest.mark.parametrize(
    ("arm", "cached", "read_back", "computed"),
    [
        (TurnArm.RECOMPUTE, [0, 0, 0], [0, 0, 0], [200, 274, 358]),
        (TurnArm.WARM, [0, 200, 274], [0, 0, 0], [200, 74, 84]),
        (TurnArm.READ_BACK, [0, 0, 0], [0, 204, 278], [200, 70, 80]),
        (TurnArm.READ_BACK_PUSH, [0, 0, 0], [0, 204, 278], [200, 70, 80]),
    ],
)
async def test_each_arm_has_its_history_from_where_it_says(
    arm: TurnArm, cached: list[int], read_back: list[int], computed: list[int]
) -> None:
    samples = await _run(ScriptedDeployment(), arms=(arm,))
    assert [sample.num_history_tokens for sample in samples] == [0, 204, 278]
    assert [sample.num_new_tokens for sample in samples] == [200, 70, 80]
    assert [sample.num_prompt_tokens for sample in samples] == [200, 274, 358]
    assert [sample.num_cached_tokens for sample in samples] == cached
    assert [sample.num_read_back_tokens for sample in samples] == read_back
    assert [sample.num_computed_tokens for sample in samples] == computed
    assert [sample.plain_copy_s for sample in samples] == [
        10 * count / 1e6 if count else None for count in read_back
    ]
    assert [sample.outcome for sample in samples] == ["received" if c else "" for c in read_back]
    assert [sample.turn for sample in samples] == [1, 2, 3]
    assert {sample.num_usage_cached_tokens for sample in samples} == {7}
    assert all(sample.ttft_s > 0 for sample in samples)


@pytest.mark.parametrize(
    ("arm", "events"),
    [
        (TurnArm.WARM, ["reset", *["run-warm-0-0"] * 3]),
        (TurnArm.RECOMPUTE, ["reset", "run-recompute-0-0"] * 3),
        (TurnArm.READ_BACK, ["reset", "run-read-back-0-0"] * 3),
    ],
)
async def test_caches_are_emptied_at_the_beginning_and_where_the_arm_loses_them(
    arm: TurnArm, events: list[str]
) -> None:
    deployment = ScriptedDeployment()
    await _run(deployment, arms=(arm,))
    assert deployment.events == events


async def test_conversations_follow_one_another_and_warm_ups_do_not_count() -> None:
    deployment = ScriptedDeployment()
    samples = await _run(deployment, repeats=range(-1, 1))
    sessions = [event for event in deployment.events if event != "reset"]
    held = [session for session, _ in itertools.groupby(sessions)]
    assert len(held) == len(set(held)) == 8
    assert all("--1-" in session for session in held[:4])
    assert {sample.repeat for sample in samples} == {0}
    assert len(samples) == 12


async def test_every_turn_is_told_those_of_warm_ups_too() -> None:
    told: list[TurnSample] = []
    await _run(
        ScriptedDeployment(),
        arms=(TurnArm.READ_BACK,),
        repeats=range(-1, 1),
        on_turn=told.append,
    )
    assert [(sample.repeat, sample.turn) for sample in told] == [
        (repeat, turn) for repeat in (-1, 0) for turn in (1, 2, 3)
    ]


async def test_the_router_is_asked_for_the_arm_s_mode() -> None:
    deployment = ScriptedDeployment()
    await _run(deployment)
    modes = {headers["X-Session-ID"]: headers["X-KVFerry-Mode"] for headers in deployment.headers}
    assert modes == {
        "run-recompute-0-0": "pull",
        "run-warm-0-0": "pull",
        "run-read-back-0-0": "pull",
        "run-read-back+push-0-0": "push",
    }


async def test_a_failed_read_back_is_an_outcome() -> None:
    def fail(report: Json) -> Json:
        prefill = report["prefill"]
        if not prefill["read_back_outcome"]:
            return report
        moved = {"num_read_back_tokens": 0, "num_read_back_bytes": 0}
        return report | {"prefill": prefill | moved | {"read_back_outcome": "gone"}}

    samples = await _run(ScriptedDeployment(fail), arms=(TurnArm.READ_BACK,))
    assert [sample.outcome for sample in samples] == ["", "gone", "gone"]
    assert [sample.plain_copy_s for sample in samples] == [None, None, None]


def _with_prefill(**fields: object) -> Callable[[Json], Json]:
    return lambda report: report | {"prefill": report["prefill"] | fields}


@pytest.mark.parametrize(
    ("arm", "change", "words"),
    [
        (TurnArm.RECOMPUTE, _with_prefill(num_cached_tokens=16), "had 16 tokens in its cache"),
        (TurnArm.READ_BACK, _with_prefill(num_cached_tokens=16), "had 16 tokens in its cache"),
        (TurnArm.WARM, _with_prefill(num_cached_tokens=50), "had only 50 of the 200 tokens"),
        (TurnArm.WARM, _with_prefill(num_read_back_tokens=5), "although it was asked not to"),
        (TurnArm.RECOMPUTE, _with_prefill(read_back_outcome="gone"), "asked not to: gone"),
        (TurnArm.READ_BACK, lambda r: r | {"mode": "push"}, "read-back: the handoff was by push"),
        (TurnArm.READ_BACK_PUSH, lambda r: r | {"mode": ""}, "by no mode"),
        (TurnArm.READ_BACK, lambda r: r | {"prefill": None}, "has no word of prefill"),
        (TurnArm.READ_BACK, lambda r: None, "has no word of prefill"),
    ],
)
async def test_turns_that_are_not_their_arm_s_are_refused(
    arm: TurnArm, change: Callable[[Json], Any], words: str
) -> None:
    with pytest.raises(MeasurementError, match=words):
        await _run(ScriptedDeployment(change), arms=(arm,))


async def test_a_cache_that_may_not_be_emptied_is_refused_with_the_instance_s_words() -> None:
    with pytest.raises(MeasurementError, match="403: say --enable-it"):
        await _run(ScriptedDeployment(may_reset=False))
