"""Choose a token from logits, keyed by seed and position.

The same logits, parameters, seed and position give the same token in every process and in every
batch: randomness comes from a counter-based generator, never from a stream that others advance.
Knows no tensor library and no request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.engine.request import SamplingParams
from kvferry.protocol.params import TokenLogprob

Scores = npt.NDArray[np.float32]

# Below this a temperature is greedy: dividing by it would overflow.
_MIN_TEMPERATURE = 1e-5
_FIRST_CANDIDATES = 1024
_KEY_MASK = (1 << 128) - 1


@dataclass(frozen=True, slots=True)
class SamplingPoint:
    """Where in a sequence a token is chosen."""

    seed: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    suppressed_token_ids: Iterable[int] = ()
    """Tokens that must not be chosen here."""

    @property
    def position(self) -> int:
        """Index of the token to be chosen."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)


def sample_token(logits: Scores, params: SamplingParams, point: SamplingPoint) -> int:
    """Return the token to put at ``point.position``; ``logits`` are not changed."""
    scores = _penalised(logits, params, point)
    for token_id in point.suppressed_token_ids:
        if scores is logits:
            scores = logits.copy()
        scores[token_id] = -np.inf
    if params.temperature < _MIN_TEMPERATURE:
        return int(np.argmax(scores))
    scores = scores / np.float32(params.temperature)
    draw = uniform(point.seed, point.position)
    if params.top_k > 0 or params.top_p < 1.0:
        candidates = _candidates(scores, params.top_k, params.top_p)
        return int(candidates[_pick(scores[candidates], draw)])
    return _pick(scores, draw)


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) that belongs to ``seed`` and ``position``."""
    generator = np.random.Philox(key=seed & _KEY_MASK, counter=position)
    return float(int(generator.random_raw()) >> 11) * 2.0**-53


def token_logprob(logits: Scores, token_id: int, num_top: int) -> TokenLogprob:
    """Return the raw log probabilities of ``token_id`` and of the ``num_top`` best."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max()
    logprobs = shifted - np.log(np.exp(shifted).sum())
    top = _best(logits, num_top) if num_top > 0 else np.empty(0, dtype=np.int64)
    return TokenLogprob(
        logprob=float(logprobs[token_id]),
        top=tuple((int(index), float(logprobs[index])) for index in top),
    )


def _penalised(logits: Scores, params: SamplingParams, point: SamplingPoint) -> Scores:
    repetition = params.repetition_penalty
    additive = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    if repetition == 1.0 and not additive:
        return logits
    scores = logits.copy()
    if repetition != 1.0:
        seen = np.unique(np.array([*point.prompt_token_ids, *point.output_token_ids], np.int64))
        values = scores[seen]
        scores[seen] = np.where(values > 0, values / repetition, values * repetition)
    if additive and point.output_token_ids:
        used, counts = np.unique(np.array(point.output_token_ids, np.int64), return_counts=True)
        penalty = params.presence_penalty + params.frequency_penalty * counts
        scores[used] -= penalty.astype(np.float32)
    return scores


def _best(scores: Scores, count: int) -> npt.NDArray[np.int64]:
    """Return the ``count`` best indices, best first, lower index first among equals."""
    count = min(count, scores.size)
    found = np.arange(scores.size)
    if count < scores.size:
        threshold = np.partition(scores, scores.size - count)[scores.size - count]
        found = np.flatnonzero(scores >= threshold)
    order = np.lexsort((found, -scores[found]))
    best: npt.NDArray[np.int64] = found[order][:count]
    return best


def _candidates(scores: Scores, top_k: int, top_p: float) -> npt.NDArray[np.int64]:
    """Return what top-k, then top-p leave, best first; at least one."""
    if 0 < top_k < scores.size:
        best = _best(scores, top_k)
        return best[: _nucleus_size(scores[best], None, top_p)]
    weights = np.exp((scores - scores.max()).astype(np.float64))
    # The nucleus is nearly always small, and sorting the whole vocabulary is slow.
    limit = _FIRST_CANDIDATES
    while True:
        best = _best(scores, limit)
        size = _nucleus_size(scores[best], float(weights.sum()), top_p)
        if size < best.size or best.size == scores.size:
            return best[:size]
        limit *= 8


def _nucleus_size(best: Scores, total: float | None, top_p: float) -> int:
    """Return how many of ``best`` (best first) make up ``top_p`` of ``total`` (None: of them)."""
    weights = np.exp((best - best[0]).astype(np.float64))
    mass_before = np.cumsum(weights) - weights
    wanted = top_p * (weights.sum() if total is None else total)
    return max(1, int(np.count_nonzero(mass_before < wanted)))


def _pick(scores: Scores, draw: float) -> int:
    """Return the index at which the cumulative probability passes ``draw``."""
    cumulative = np.cumsum(np.exp((scores - scores.max()).astype(np.float64)))
    index = int(np.searchsorted(cumulative, draw * cumulative[-1], side="right"))
    return index if index < scores.size else int(np.argmax(scores))
