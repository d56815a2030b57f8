from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from kvferry.engine.request import SamplingParams
from kvferry.engine.sampler import SamplingPoint, sample_token, token_logprob, uniform

Scores = npt.NDArray[np.float32]


def random_logits(seed: int, size: int = 5000) -> Scores:
    return (np.random.default_rng(seed).standard_normal(size) * 3).astype(np.float32)


def point(
    seed: int = 0, outputs: tuple[int, ...] = (), suppressed: tuple[int, ...] = ()
) -> SamplingPoint:
    return SamplingPoint(
        seed=seed,
        prompt_token_ids=(1, 2, 3),
        output_token_ids=outputs,
        suppressed_token_ids=suppressed,
    )


def allowed(logits: Scores, top_k: int, top_p: float, temperature: float) -> set[int]:
    """What top-k, then top-p leave, by sorting everything."""
    order = np.argsort(-logits, kind="stable")
    if top_k > 0:
        order = order[:top_k]
    weights = np.exp(logits[order].astype(np.float64) / temperature)
    weights /= weights.sum()
    kept = np.cumsum(weights) - weights < top_p
    return {int(index) for index in order[kept]}


def test_greedy_takes_the_first_of_the_best() -> None:
    logits = np.array([0.0, 2.0, 2.0, 1.0], dtype=np.float32)
    assert sample_token(logits, SamplingParams(temperature=0.0), point()) == 1


def test_a_seed_and_a_position_fix_the_token() -> None:
    logits = random_logits(1)
    params = SamplingParams(temperature=1.0)
    tokens = [sample_token(logits, params, point(seed)) for seed in range(50)]
    assert tokens == [sample_token(logits, params, point(seed)) for seed in range(50)]
    assert len(set(tokens)) > 10
    later = [sample_token(logits, params, point(seed, outputs=(9,))) for seed in range(50)]
    assert later != tokens


def test_draws_are_fixed_for_all_time() -> None:
    assert uniform(0, 0) == uniform(2**128, 0)
    assert uniform(42, 7) == pytest.approx(0.407413654, abs=1e-8)
    assert 0 <= uniform(-1, 3) < 1
    draws = [uniform(5, position) for position in range(4000)]
    assert np.mean(draws) == pytest.approx(0.5, abs=0.02)


def test_frequencies_follow_the_probabilities() -> None:
    logits = np.log(np.array([0.1, 0.2, 0.7], dtype=np.float32))
    params = SamplingParams(temperature=1.0)
    tokens = [sample_token(logits, params, point(seed)) for seed in range(3000)]
    shares = np.bincount(tokens, minlength=3) / len(tokens)
    assert shares == pytest.approx([0.1, 0.2, 0.7], abs=0.03)


@pytest.mark.parametrize(
    ("top_k", "top_p", "temperature"),
    [(1, 1.0, 1.0), (5, 1.0, 0.7), (0, 0.3, 1.0), (0, 0.95, 1.3), (40, 0.5, 1.0), (0, 0.9999, 9.0)],
)
def test_only_what_top_k_and_top_p_leave(top_k: int, top_p: float, temperature: float) -> None:
    logits = random_logits(2)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    tokens = {sample_token(logits, params, point(seed)) for seed in range(400)}
    expected = allowed(logits, top_k, top_p, temperature)
    assert tokens <= expected
    if len(expected) <= 5:
        assert tokens == expected


def test_top_k_of_one_and_a_tiny_top_p_are_greedy() -> None:
    logits = random_logits(3)
    best = int(logits.argmax())
    for params in (SamplingParams(top_k=1), SamplingParams(top_p=1e-6)):
        assert {sample_token(logits, params, point(seed)) for seed in range(20)} == {best}


def test_suppressed_tokens_are_not_chosen_and_logits_stay() -> None:
    logits = np.array([5.0, 4.0, 3.0], dtype=np.float32)
    before = logits.copy()
    chosen = sample_token(logits, SamplingParams(temperature=0.0), point(suppressed=(0, 1)))
    assert chosen == 2
    assert np.array_equal(logits, before)


def test_penalties() -> None:
    logits = np.array([3.0, 2.9, -1.0, 0.0], dtype=np.float32)

    def best(outputs: tuple[int, ...], **options: float) -> int:
        params = SamplingParams(temperature=0.0, **options)  # type: ignore[arg-type]
        where = SamplingPoint(seed=0, prompt_token_ids=(0,), output_token_ids=outputs)
        return sample_token(logits, params, where)

    assert best((), presence_penalty=1.0) == 0, "the prompt does not count"
    assert best((0,), presence_penalty=0.2) == 1
    assert best((0,), frequency_penalty=0.06) == 0
    assert best((0, 0), frequency_penalty=0.06) == 1
    assert best((), repetition_penalty=1.1) == 1, "the prompt counts"
    assert best((1,), repetition_penalty=1.1) == 0
    negative = np.array([-1.0, -1.05], dtype=np.float32)
    where = SamplingPoint(seed=0, prompt_token_ids=(0,), output_token_ids=())
    params = SamplingParams(temperature=0.0, repetition_penalty=1.2)
    assert sample_token(negative, params, where) == 1


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = random_logits(4, 100)
    logprobs = logits - np.log(np.exp(logits.astype(np.float64)).sum())
    found = token_logprob(logits, 17, 3)
    assert found.logprob == pytest.approx(logprobs[17], abs=1e-5)
    order = np.argsort(-logits)[:3]
    assert [token for token, _ in found.top] == order.tolist()
    assert [value for _, value in found.top] == pytest.approx(logprobs[order].tolist(), abs=1e-5)
    assert token_logprob(logits, 17, 0).top == ()
