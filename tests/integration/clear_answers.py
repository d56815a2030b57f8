"""Requests whose right answer is clear-cut: no rounding turns it into another.

In a random model two tokens may be so near each other that another batch, or another division into
chunks, of the same computation rightly picks the other one. What is asked of several instances and
compared token by token is planned here without such ties. Knows the model, and no deployment.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.engine.request import SamplingParams
from kvferry.engine.sampler import SamplingPoint, Scores, sample_token
from kvferry.server.bodies import CompletionRequest, sampling_params
from tests.integration.deployment_client import Json, prompt_of

MARGIN = 2e-4
"""What a logit may be off by, either way; batches and chunks move those of a tiny model by 3e-5."""
MAX_ATTEMPTS = 8
_ATTEMPT_STRIDE = 1_000_003
"""Between the starts of two prompts that are tried for one request: more than a plan has."""


@dataclass(frozen=True, slots=True)
class Known:
    """A request and its right tokens."""

    body: Json
    right: list[int]


def clear_token(logits: Scores, params: SamplingParams, point: SamplingPoint) -> int | None:
    """Return the token that the engine's sampler chooses however ``logits`` are rounded.

    None: there is no one such. ``params`` may not have penalties.
    """
    chosen = {sample_token(scores, params, point) for scores in _disturbed(logits, params)}
    return chosen.pop() if len(chosen) == 1 else None


def _disturbed(logits: Scores, params: SamplingParams) -> Iterator[Scores]:
    """Yield ``logits`` with the best raised and the others lowered, and the other way round.

    Over all numbers of best tokens that are candidates this takes each border that a draw may fall
    on as far as it goes, and swaps those beside each other that are near enough to change places.
    """
    best_first = np.argsort(-logits, kind="stable")
    num_candidates = logits.size if params.temperature else 1
    for count in range(1, min(params.top_k or logits.size, num_candidates) + 1):
        shift = np.full(logits.size, -MARGIN, np.float32)
        shift[best_first[:count]] = MARGIN
        yield logits + shift
        yield logits - shift


class Judge:
    """The unmodified model, in float32: it reads an answer and finds the first tie in it."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        from kvferry.engine.model import quiet_library

        with quiet_library():
            self._model = AutoModelForCausalLM.from_pretrained(
                folder, attn_implementation="sdpa", dtype="float32"
            ).eval()

    def num_clear(self, body: Json, right: Sequence[int]) -> int:
        """Return how many of ``right``, the tokens that answer ``body``, come before the first tie.

        Raises ``AssertionError`` where one of them is clearly not the model's.
        """
        request = msgspec.convert(body, CompletionRequest)
        params = sampling_params(request, 0)
        prompt = body["prompt"]
        for index, logits in enumerate(self._logits(prompt, right)):
            point = SamplingPoint(params.seed or 0, prompt, right[:index])
            token = clear_token(logits, params, point)
            if token is None:
                return index
            assert token == right[index], (
                f"{token} is right where {right[index]} is token {index} of an answer to "
                f"{len(prompt)} tokens, {params}"
            )
        return len(right)

    def largest_gap(self, prompt: Sequence[int], answer: Sequence[int]) -> float:
        """Return how far a token of a greedy ``answer`` is below the best logit, at most.

        It may go on from a tie in another way than others do: each token is judged by those before
        it.
        """
        logits = self._logits(prompt, answer)
        chosen = logits[np.arange(len(answer)), list(answer)]
        return float(np.max(logits.max(axis=1) - chosen))

    def _logits(self, prompt: Sequence[int], answer: Sequence[int]) -> npt.NDArray[np.float32]:
        """Return what each token of ``answer`` was chosen from, ``[tokens, vocabulary]``."""
        import torch

        token_ids = torch.tensor([[*prompt, *answer[:-1]]])
        with torch.inference_mode():
            output = self._model(token_ids, use_cache=False, logits_to_keep=len(answer))
        logits: npt.NDArray[np.float32] = output.logits[0].numpy()
        return logits


@dataclass(frozen=True, slots=True)
class ClearAnswers:
    """Makes the requests of a plan, the same for the same arguments."""

    judge: Judge
    ask: Callable[[Json], Awaitable[list[int]]]
    """Returns the tokens of one instance that does it all and shares nothing."""

    async def known(self, body: Json, num_new: int, start: int) -> Known:
        """Return ``body`` with ``num_new`` tokens from ``start`` on added to its prompt.

        Its answer ends before the first tie; at a tie in the first token the new tokens are others.
        Raises ``AssertionError`` if that does not help.
        """
        for attempt in range(MAX_ATTEMPTS):
            new = prompt_of(num_new, start + attempt * _ATTEMPT_STRIDE)
            asked = body | {"prompt": [*body["prompt"], *new]}
            right = await self.ask(asked)
            num_clear = self.judge.num_clear(asked, right)
            if num_clear:
                return Known(asked | {"max_tokens": num_clear}, right[:num_clear])
        raise AssertionError(f"{MAX_ATTEMPTS} prompts of {num_new} new tokens begin with a tie")
