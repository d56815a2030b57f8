"""As ``test_soak_failures``, with conversations of several turns that are forked and read back.

The router knows a conversation by its id or by its prompt alone, and has one prefill instance that
keeps no cache and one that does. Decode's pools are small, and one of them retains for a moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.integration.clear_answers import ClearAnswers, Judge, Known
from tests.integration.deployment_client import Answer, Client
from tests.integration.deployment_setup import Deployment, Program, open_deployment
from tests.integration.history_legs import read_back
from tests.integration.test_soak_failures import (
    MOVES,
    REQUEST_BOUND_S,
    Tally,
    Workload,
    drawn_body,
    soak,
)
from tests.support.process_forks import ProcessForks

pytestmark = pytest.mark.soak

NUM_STORIES = 5
NUM_TURNS = 4
FIRST_LENGTHS = (1, 40, 63, 64, 65, 100, 255, 300, 513)
MAX_NEW_TOKENS = 150
_names = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Story:
    """A turn with its right answer, and the two ways in which it goes on."""

    turn: Known
    sequels: list[Story] = field(default_factory=list)


async def known_stories(answers: ClearAnswers, rng: random.Random) -> list[Story]:
    """Conversations that fork at each turn, computed by one instance from nothing."""
    starts = itertools.count(rng.randrange(2**20))

    async def tell(told: list[int], num_new: int, start: int, num_turns: int) -> Story:
        story = Story(await answers.known(drawn_body(told, 30, rng), num_new, start))
        now_told = [*story.turn.body["prompt"], *story.turn.right]
        for _ in range(2 if num_turns > 1 else 0):
            num_more = rng.randint(1, MAX_NEW_TOKENS)
            story.sequels.append(await tell(now_told, num_more, next(starts), num_turns - 1))
        return story

    firsts = [(rng.choice(FIRST_LENGTHS), next(starts)) for _ in range(NUM_STORIES)]
    return [await tell([], length, start, NUM_TURNS) for length, start in firsts]


@dataclass(slots=True)
class Talker:
    """One client: goes through stories, turn by turn, and sometimes both ways at once."""

    client: Client
    router: Program
    tally: Tally
    rng: random.Random
    end_s: float
    modes: Sequence[str]

    async def tell(self, story: Story, scope: dict[str, object]) -> None:
        """Send the turns of ``story`` under one salt and, maybe, one conversation id."""
        while time.monotonic() < self.end_s and not self.tally.wrong:
            await self._send(story.turn, scope, is_last=not story.sequels)
            if not story.sequels:
                return
            if self.rng.random() < 0.2:
                await asyncio.gather(*(self.tell(sequel, scope) for sequel in story.sequels))
                return
            if self.rng.random() > 0.1:  # Else the same turn once more.
                story = self.rng.choice(story.sequels)
            await asyncio.sleep(self.rng.choice([0.0, 0.0, 0.05, 0.5]))

    async def _send(self, turn: Known, scope: dict[str, object], *, is_last: bool) -> None:
        body = turn.body | scope | {"stream": self.rng.random() < 0.5}
        mode = self.rng.choice(self.modes)
        retention_s = 0.0 if is_last and self.rng.random() < 0.5 else None
        sending = self.client.post(
            self.router, body, bound_s=REQUEST_BOUND_S, mode=mode, retention_s=retention_s
        )
        if self.rng.random() < 0.1:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(sending, self.rng.uniform(0.001, 0.2))
            self.tally.counts["left"] += 1
            return
        answer = await sending
        self.tally.note(Known(body, turn.right), answer)
        self._count(answer, mode)

    def _count(self, answer: Answer, mode: str) -> None:
        if answer.report:
            self.tally.counts[f"{mode}: history {read_back(answer)[0] or 'none'}"] += 1


async def one_talker(
    client: Client,
    router: Program,
    stories: list[Story],
    tally: Tally,
    rng: random.Random,
    end_s: float,
    modes: Sequence[str],
) -> None:
    talker = Talker(client, router, tally, rng, end_s, modes)
    while time.monotonic() < end_s and not tally.wrong:
        number = rng.randrange(len(stories))
        scope: dict[str, object] = {"cache_salt": f"story-{number}"}
        if rng.random() < 0.7:
            scope = {"cache_salt": f"talk-{next(_names)}"}
        if rng.random() < 0.5:
            scope["session_id"] = f"session-{next(_names)}"
        await talker.tell(stories[number], scope)


CONVERSATIONS = Workload(known_stories, one_talker)


def start(deployment: Deployment, model: Path, transport: str) -> None:
    """Two prefill and two decode instances and a router."""
    options = (*MOVES[transport], "--read-back-timeout-s", "3")
    prefill = [
        deployment.add_engine("prefill-0", model, *options, "--num-blocks", "300"),
        deployment.add_engine(
            "prefill-1", model, *options, "--num-blocks", "300", "--no-prefix-caching"
        ),
    ]
    decode = [
        deployment.add_engine("decode-0", model, *options, "--num-blocks", "200"),
        deployment.add_engine(
            "decode-1", model, *options, "--num-blocks", "200", "--retention-s", "2"
        ),
    ]
    deployment.wait_ready()
    deployment.add_router(prefill, decode, "--prefill-timeout-s", "8", "--request-timeout-s", "30")


@pytest.mark.parametrize("transport", list(MOVES))
async def test_every_turn_is_right_or_a_named_error(
    forks: ProcessForks,
    tiny_model: Path,
    judge: Judge,
    tmp_path: Path,
    transport: str,
    soak_s: float,
    soak_random: random.Random,
) -> None:
    tally = Tally()
    with open_deployment(tmp_path, forks) as deployment:
        start(deployment, tiny_model, transport)
        modes = ("pull", "push", "auto")
        await soak(deployment, judge, tally, soak_random, soak_s, modes, CONVERSATIONS)
    for mode in ("pull", "push"):
        assert tally.counts[f"{mode}: history received"] > 0
    assert tally.counts["killed"] + tally.counts["stopped"] > 0
