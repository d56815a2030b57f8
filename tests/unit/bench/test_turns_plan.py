"""Arms share scripts and nothing else; shapes have the lengths that are asked for."""

from __future__ import annotations

import collections
import itertools
import random
from typing import Any

import pytest

from kvferry.bench.client import StreamedAnswer
from kvferry.bench.plan import arm_rotations
from kvferry.bench.turns import (
    Conversation,
    TurnArm,
    TurnsPlan,
    plan_conversations,
    token_script,
    with_histories,
)
from kvferry.errors import ConfigError

_SHAPE = (5, 2, 3)
_PLAN = TurnsPlan(
    shapes=(_SHAPE, *with_histories([9], new_tokens=1, answer_tokens=4)), answer_tokens=4
)


def _answer(*token_ids: int) -> StreamedAnswer:
    return StreamedAnswer(
        sent_s=0.0,
        first_byte_s=1.0,
        token_ids=token_ids,
        token_times_s=(1.0,) * len(token_ids),
        text="",
        finish_reason="length",
        ended_s=2.0,
        report=None,
    )


def _planned(seed: int = 1, run_id: str = "run") -> list[Conversation]:
    rng = random.Random(seed)
    return plan_conversations(
        tuple(TurnArm), range(-1, 4), lambda: _PLAN.draw_scripts(rng), rng, run_id
    )


def test_prompts_grow_by_the_answer_and_what_is_new() -> None:
    drawn, _ = _PLAN.draw_scripts(random.Random(1))
    assert drawn.num_turns == 3
    prompt: Any = drawn.fields([])["prompt"]
    assert len(prompt) == 5
    script = token_script([[1, 2, 3], [4], [5, 6]], 4)
    assert script.fields([]) == {"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
    answers = [_answer(90, 91), _answer(92)]
    assert script.fields(answers)["prompt"] == [1, 2, 3, *(90, 91), 4, 92, 5, 6]
    grown: Any = drawn.fields(answers)["prompt"]
    assert (len(grown), grown[:5], grown[5:7]) == (5 + 2 + 2 + 1 + 3, prompt, [90, 91])


def test_histories_have_the_lengths_that_are_asked_for() -> None:
    short, long = with_histories([100, 200], new_tokens=9, answer_tokens=16)
    assert (short, long) == ((84, 9), (184, 9))


def test_every_arm_has_the_same_scripts_under_a_name_of_its_own() -> None:
    planned = _planned()
    assert len({item.name for item in planned}) == len(planned) == 4 * 5 * 2
    by_script = collections.defaultdict(list)
    for item in planned:
        by_script[item.repeat, item.number].append(item)
    assert len(by_script) == 10
    for same in by_script.values():
        assert {item.arm for item in same} == set(TurnArm)
        assert len({item.script for item in same}) == 1
    assert len({str(item.script.fields([])) for item in planned}) == 10
    assert [item.repeat for item in planned] == sorted(item.repeat for item in planned)


def _prompts(conversations: list[Conversation]) -> list[object]:
    return [item.script.fields([])["prompt"] for item in conversations]


def test_another_run_shares_no_name_but_has_the_same_prompts() -> None:
    ours, theirs = _planned(run_id="a"), _planned(run_id="b")
    assert {item.name for item in ours}.isdisjoint(item.name for item in theirs)
    assert _prompts(ours) == _prompts(theirs)
    assert _prompts(ours) != _prompts(_planned(seed=2))


def test_requests_name_their_conversation_and_say_what_they_want() -> None:
    by_arm = {item.arm: item for item in _planned() if item.number == 0}
    for arm, item in by_arm.items():
        read_back = "off" if arm in (TurnArm.RECOMPUTE, TurnArm.WARM) else "auto"
        assert item.headers() == {"X-Session-ID": item.name, "X-KVFerry-Read-Back": read_back}
        body = item.body([])
        assert (body["cache_salt"], body["temperature"]) == (item.name, 0)
        assert body["stream_options"] == {"include_usage": True}
    assert [arm for arm in TurnArm if arm.mode == "push"] == [TurnArm.READ_BACK_PUSH]
    assert [arm for arm in TurnArm if not arm.loses_cache] == [TurnArm.WARM]


def test_every_arm_has_every_place_once_in_as_many_orders_as_arms() -> None:
    orders = itertools.islice(arm_rotations(tuple(TurnArm), random.Random(1)), 8)
    for _ in range(2):
        cycle = list(itertools.islice(orders, 4))
        places = collections.Counter((place, arm) for o in cycle for place, arm in enumerate(o))
        assert set(places.values()) == {1}
        assert len(places) == 16


def test_the_number_of_requests_is_that_of_the_planned_turns() -> None:
    assert sum(item.script.num_turns for item in _planned()) == 100
    assert TurnsPlan(shapes=_PLAN.shapes, repeats=4).num_requests == 100


@pytest.mark.parametrize(
    "wrong",
    [
        {"arms": ()},
        {"arms": (TurnArm.WARM, TurnArm.WARM)},
        {"shapes": ()},
        {"shapes": (_SHAPE, _SHAPE)},
        {"repeats": 0},
        {"warmups": -1},
        {"last_token_id": 1},
    ],
)
def test_plans_that_measure_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        TurnsPlan(**{"shapes": (_SHAPE,), **wrong})


@pytest.mark.parametrize(
    ("shape", "answer"), [((5,), 4), ((), 4), ((0, 2), 4), ((5, 2, 0), 4), ((5, 2), 0)]
)
def test_shapes_with_nothing_to_reuse_are_refused(shape: tuple[int, ...], answer: int) -> None:
    with pytest.raises(ConfigError):
        TurnsPlan(shapes=(shape,), answer_tokens=answer)


def test_a_history_must_be_longer_than_its_answer() -> None:
    with pytest.raises(ConfigError, match="16 tokens has no room for an answer of 16"):
        with_histories([100, 16], new_tokens=1, answer_tokens=16)
