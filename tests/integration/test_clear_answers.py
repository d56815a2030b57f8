"""Ties are recognised and clear tokens pass: in logits, in a model's answers, and in a plan."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from kvferry.engine.request import SamplingParams
from kvferry.engine.sampler import SamplingPoint, Scores, sample_token, uniform
from tests.integration.clear_answers import (
    MARGIN,
    MAX_ATTEMPTS,
    ClearAnswers,
    Judge,
    clear_token,
)
from tests.integration.deployment_client import Json, body_of, prompt_of
from tests.unit.engine.rig import Rig

GREEDY = SamplingParams(temperature=0.0, top_k=4)
DRAWN = SamplingParams(temperature=0.8, top_k=4)
NEAR, FAR = MARGIN / 2, MARGIN * 4
POINT = SamplingPoint(8, [5, 6, 7], [])
"""It draws 0.71: of two candidates the worse one, unless the better is by far."""
NUM_TOKENS = 12


def logits_of(*values: float) -> Scores:
    """The best logits; the others are far below."""
    return np.array([*values, *[-9.0] * 20], dtype=np.float32)


def logits_with_border(distance: float) -> Scores:
    """Two candidates; at ``POINT`` the draw is that far, in logits, from the border of them."""
    draw = uniform(POINT.seed, POINT.position)
    gap = 0.8 * math.log(draw / (1 - draw)) + distance
    return np.array([gap, 0.0, *[-40.0] * 20], dtype=np.float32)


def test_a_greedy_token_is_clear_unless_the_next_is_near() -> None:
    assert clear_token(logits_of(1.0, 2.0, 2.0 - FAR), GREEDY, POINT) == 1
    assert clear_token(logits_of(1.0, 2.0, 2.0 - NEAR), GREEDY, POINT) is None
    assert clear_token(logits_of(2.0, 1.0, 1.0), GREEDY, POINT) == 0


@pytest.mark.parametrize("sign", [-1, 1])
def test_a_drawn_token_is_clear_unless_its_draw_is_near_a_border(sign: int) -> None:
    near, far = (logits_with_border(sign * distance) for distance in (NEAR, 2 * FAR))
    assert clear_token(near, DRAWN, POINT) is None
    assert clear_token(far, DRAWN, POINT) == sample_token(far, DRAWN, POINT)


def point_where(logits: Scores, token: int) -> SamplingPoint:
    """A point at which ``token`` is drawn from ``logits``, amid its share."""
    for seed in itertools.count():
        point = dataclasses.replace(POINT, seed=seed)
        if clear_token(logits, DRAWN, point) == token:
            return point
    raise AssertionError


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_candidates_that_may_change_places_are_a_tie_where_one_of_them_is_drawn(rank: int) -> None:
    """Beyond the last one, the other is no candidate at all."""
    apart = [4.0, 3.5, 3.0, 2.5, 2.0]
    near = apart.copy()
    near[rank + 1] = near[rank] - NEAR
    point = point_where(logits_of(*apart), rank)
    for other in range(rank):
        elsewhere = point_where(logits_of(*near), other)
        assert clear_token(logits_of(*near), DRAWN, elsewhere) == other
    assert clear_token(logits_of(*apart), DRAWN, point) == rank
    assert sample_token(logits_of(*near), DRAWN, point) == rank
    assert clear_token(logits_of(*near), DRAWN, point) is None


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_no_noise_within_the_margin_changes_a_clear_token(params: SamplingParams) -> None:
    """Logits are so near each other that about half of the tokens are ties."""
    source = np.random.default_rng(3)
    num_clear, num_changed = 0, 0
    for seed in range(300):
        point = dataclasses.replace(POINT, seed=seed)
        logits = (source.standard_normal(40) * 10 * MARGIN).astype(np.float32)
        token = clear_token(logits, params, point)
        noise = source.uniform(-MARGIN, MARGIN, (30, 40)).astype(np.float32)
        found = {sample_token(logits + row, params, point) for row in noise}
        if token is None:
            num_changed += len(found) > 1
            continue
        num_clear += 1
        assert found == {token}
    assert num_clear > 20
    assert num_changed > 20


def model_with_twin(folder: Path, token: int, twin: int, copy: Path) -> Path:
    """The model with a token as likely as another, but for a last bit."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    weights = model.lm_head.weight.data
    weights[twin] = weights[token] * (1 + 1e-6)
    model.save_pretrained(copy)
    return copy


def engine_answer(folder: Path, body: Json) -> list[int]:
    names = ("max_tokens", "temperature", "top_k", "seed")
    with Rig(folder) as rig:
        answer = rig.submit(body["prompt"], **{name: body[name] for name in names if name in body})
        return answer.wait().tokens


def test_what_the_engine_draws_is_clear(tiny_model: Path, judge: Judge) -> None:
    body = body_of(prompt_of(351, 4), NUM_TOKENS, temperature=0.8, top_k=4, seed=11)
    assert judge.num_clear(body, engine_answer(tiny_model, body)) == NUM_TOKENS


def test_the_engines_answer_is_clear_up_to_a_tie(
    tiny_model: Path, judge: Judge, tmp_path: Path
) -> None:
    body = body_of(prompt_of(351, 4), NUM_TOKENS)
    right = engine_answer(tiny_model, body)
    assert judge.num_clear(body, right) == NUM_TOKENS
    tied_at = next(i for i in range(3, NUM_TOKENS) if right[i] not in right[:i])
    twin = next(t for t in range(3, 250) if t not in right)
    tied = Judge(model_with_twin(tiny_model, right[tied_at], twin, tmp_path / "tied"))
    assert tied.num_clear(body, right) == tied_at


def test_a_wrong_token_is_no_tie(judge: Judge) -> None:
    body = body_of(prompt_of(40, 1), 2)
    with pytest.raises(AssertionError, match=r"is right where 299 is token 0 .* 40 tokens"):
        judge.num_clear(body, [299, 299])


class FakeJudge(Judge):
    """Finds so many tokens clear, call by call."""

    def __init__(self, *counts: int) -> None:
        self.counts = list(counts)

    def num_clear(self, body: Json, right: object) -> int:
        return self.counts.pop(0)


async def answer_by_prompt(body: Json) -> list[int]:
    return [sum(body["prompt"]) % 97, 1, 2, 3]


async def test_a_plan_cuts_an_answer_before_a_tie() -> None:
    answers = ClearAnswers(FakeJudge(2), answer_by_prompt)
    known = await answers.known(body_of([8, 9], 4), 5, 3)
    assert known.body == body_of([8, 9, *prompt_of(5, 3)], 2)
    assert known.right == (await answer_by_prompt(known.body))[:2]


async def test_a_plan_takes_the_same_other_prompt_where_an_answer_begins_with_a_tie() -> None:
    first, second = [
        await ClearAnswers(FakeJudge(0, 0, 4), answer_by_prompt).known(body_of([8, 9], 4), 5, 3)
        for _ in range(2)
    ]
    assert first == second
    assert first.body["prompt"][:2] == [8, 9]
    assert len(first.body["prompt"]) == 7
    assert first.body["prompt"][2:] != prompt_of(5, 3)
    assert first.right == await answer_by_prompt(first.body)


async def test_a_plan_gives_up_on_a_model_of_ties() -> None:
    answers = ClearAnswers(FakeJudge(*[0] * MAX_ATTEMPTS), answer_by_prompt)
    with pytest.raises(AssertionError, match="5 new tokens begin with a tie"):
        await answers.known(body_of([8, 9], 4), 5, 3)
