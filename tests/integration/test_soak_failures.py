"""Mixed requests for a while, as instances are killed, stopped, started again, and clients leave.

Every answer is right or a named error, in time; at the end every block, descriptor and thread of
those that survived is back. ``test_soak_deployment`` is the same without faults.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import pytest

from tests.integration.clear_answers import ClearAnswers, Judge, Known
from tests.integration.deployment_client import (
    Answer,
    Client,
    Json,
    body_of,
    open_client,
    prompt_of,
    salted,
    wait_healthy,
)
from tests.integration.deployment_setup import Deployment, Program, open_deployment
from tests.integration.history_legs import Turn, read_back
from tests.integration.open_files import Resources
from tests.integration.push_legs import peer_of
from tests.support.process_forks import ProcessForks

pytestmark = pytest.mark.soak

NUM_CLIENTS = 6
REQUEST_BOUND_S = 40.0
SETTLE_S = 60.0
IDLE_S = 3.0
MAX_HTTP_SOCKETS = 24
"""Of an instance, and of a router for each. A burst, and stories that fork, leave many connections
behind; probes three times a second that go round among them keep a dozen from growing old."""
NUM_IDLE_LOOKS = 3
MAX_IDLE_SHARE = 0.05
"""Of a core, health probes three times a second included. A mover that turns by itself every
millisecond uses 7 % or more."""
LENGTHS = (1, 15, 17, 63, 64, 65, 128, 255, 257, 511, 513, 700, 1025, 1500)
FEW_CANDIDATES = 4
"""Between many candidates a draw too often falls on a border, where rounding decides."""
NAMED_ERRORS = {
    "prefill_failed", "decode_failed", "no_instance", "timeout", "engine_error", "shutting_down",
}  # fmt: skip


@dataclass(slots=True)
class Tally:
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def note(self, known: Known, answer: Answer) -> None:
        error, tokens = answer.error, answer.token_ids
        if error is not None:
            self.counts[f"error {error['code']}"] += 1
            is_right = tokens == known.right[: len(tokens)] and error["code"] in NAMED_ERRORS
        else:
            self.counts[answer.outcome or "plain"] += 1
            is_right = answer.status == 200 and tokens == known.right
        if not is_right:
            shown = {key: value for key, value in known.body.items() if key != "prompt"}
            self.wrong.append(
                f"{shown} with {len(known.body['prompt'])} tokens: {answer.status} {error} "
                f"{tokens} {answer.report} where {known.right} is right"
            )


async def known_requests(answers: ClearAnswers, rng: random.Random) -> list[Known]:
    """Requests of mixed lengths, some of which continue others, computed by one instance."""
    requests: list[Known] = []
    first_start = rng.randrange(2**20)
    for number, length in enumerate(LENGTHS):
        parts = ((length, first_start + number), (rng.randint(1, 200), first_start + 100 + number))
        told: list[int] = []
        for num_new, start in parts:
            body = drawn_body(told, 24, rng)
            requests.append(await answers.known(body, num_new, start))
            told = requests[-1].body["prompt"]
    return requests


def drawn_body(prompt: list[int], max_tokens: int, rng: random.Random) -> Json:
    """A request for up to ``max_tokens`` tokens, greedy or drawn from few."""
    return body_of(
        prompt,
        rng.randint(1, max_tokens),
        temperature=rng.choice([0.0, 0.8]),
        top_k=FEW_CANDIDATES,
        seed=rng.randrange(2**31),
    )


async def one_client(
    client: Client,
    router: Program,
    requests: list[Known],
    tally: Tally,
    rng: random.Random,
    end_s: float,
    modes: Sequence[str],
) -> None:
    while time.monotonic() < end_s and not tally.wrong:
        known = rng.choice(requests)
        body = salted(known.body) if rng.random() < 0.6 else known.body
        body = body | {"stream": rng.random() < 0.5}
        mode = rng.choice(modes)
        sending = client.post(router, body, bound_s=REQUEST_BOUND_S, mode=mode)
        if rng.random() < 0.15:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(sending, rng.uniform(0.001, 0.3))
            tally.counts["left"] += 1
            continue
        answer = await sending
        tally.note(known, answer)
        tally.counts[f"{mode}: {answer.outcome or 'plain'}"] += 1


async def break_things(
    deployment: Deployment, client: Client, tally: Tally, rng: random.Random, end_s: float
) -> None:
    """One fault at a time; the next comes when the router finds all well again."""
    while time.monotonic() < end_s - 5 and not tally.wrong:
        await asyncio.sleep(rng.uniform(0.1, 1.5))
        victim = rng.choice(deployment.instances)
        if rng.random() < 0.6:
            tally.counts["killed"] += 1
            victim.kill()
            await asyncio.sleep(rng.uniform(0.0, 1.0))
            victim.begin()
            await asyncio.to_thread(victim.wait_ready)
        else:
            tally.counts["stopped"] += 1
            victim.pause()
            await asyncio.sleep(rng.uniform(0.2, 6.0))
            victim.resume()
        await wait_healthy(client, deployment["router"], len(deployment.instances))


async def connect_all_pairs(client: Client, prefill: list[Program], decode: list[Program]) -> None:
    """A handoff and a read-back between each two, so that every connection there can be is there.

    The router has histories read back in any soak, since some requests continue others.
    """
    for one, other in itertools.product(prefill, decode):
        for attempt in range(20):
            body = body_of(prompt_of(100, attempt), 2)
            if await hands_over(client, one, other, salted(body)) and await reads_back(
                client, one, other, salted(body)
            ):
                break
            await asyncio.sleep(0.2)
        else:
            pytest.fail(f"{one.name} and {other.name} do not find each other")


async def hands_over(client: Client, prefill: Program, decode: Program, body: Json) -> bool:
    first = await client.prefill(prefill, body)
    answer = await client.decode(decode, body, first.offered)
    return answer.outcome == "received"


async def reads_back(client: Client, prefill: Program, holder: Program, body: Json) -> bool:
    assert (await client.post(holder, body)).status == 200
    turn = Turn(client, prefill, holder, body, await peer_of(client, holder))
    first = await turn.begin_prefill()
    await client.withdraw(prefill, first.offered)
    return read_back(first)[0] == "received"


def resources_of(deployment: Deployment) -> dict[str, Resources]:
    """What each process has open, by name."""
    programs = deployment.programs
    ports = {int(program.url.rpartition(":")[2]) for program in programs.values()}
    return {name: Resources.of(program.pid, ports) for name, program in programs.items()}


async def assert_resources(deployment: Deployment, before: dict[str, Resources]) -> None:
    """Survivors have no more open than before."""
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        grown = []
        for name, now in resources_of(deployment).items():
            num_peers = len(deployment.instances) if name == "router" else 1
            if now.has_grown(before[name], MAX_HTTP_SOCKETS * num_peers):
                grown.append(f"{name}: {before[name]} became {now}")
        if not grown:
            return
        assert time.monotonic() < deadline_s, grown
        await asyncio.sleep(0.5)


async def assert_idle(deployment: Deployment) -> None:
    """Nothing that a fault has left behind keeps a core busy; housework once in a while may."""
    busy: list[str] = []
    for _ in range(NUM_IDLE_LOOKS):
        busy = await busy_programs(deployment)
        if not busy:
            return
    pytest.fail(", ".join(busy))


async def busy_programs(deployment: Deployment) -> list[str]:
    def used_s(program: Program) -> float:
        fields = Path(f"/proc/{program.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    before = {name: used_s(program) for name, program in deployment.programs.items()}
    await asyncio.sleep(IDLE_S)
    shares = {
        name: (used_s(program) - before[name]) / IDLE_S
        for name, program in deployment.programs.items()
    }
    return [
        f"{n} uses {share:.0%} of a core" for n, share in shares.items() if share > MAX_IDLE_SHARE
    ]


MOVES = {
    "nixl": ("--transport", "nixl"),
    "shm": ("--transport", "shm"),
    "tcp": ("--transport", "nixl", "--ucx-tls", "tcp"),
}


Plan = TypeVar("Plan")
Prepare = Callable[[ClearAnswers, random.Random], Awaitable[Plan]]
Drive = Callable[
    [Client, Program, Plan, Tally, random.Random, float, Sequence[str]], Coroutine[None, None, None]
]


@dataclass(frozen=True, slots=True)
class Workload(Generic[Plan]):
    """What is asked of a deployment."""

    prepare: Prepare[Plan]
    drive: Drive[Plan]
    """One of several clients at once, until a time on the clock."""


REQUESTS = Workload(known_requests, one_client)


async def soak(
    deployment: Deployment,
    judge: Judge,
    tally: Tally,
    rng: random.Random,
    soak_s: float,
    modes: Sequence[str],
    workload: Workload[Plan],
) -> None:
    """Run clients and faults on ``deployment``; in the end survivors are as they were."""
    router = deployment["router"]
    prefill, decode = (
        [program for program in deployment.instances if program.name.startswith(role)]
        for role in ("prefill", "decode")
    )
    async with open_client() as client:
        answers = ClearAnswers(judge, partial(client.plain, prefill[0]))
        plan = await workload.prepare(answers, rng)
        await connect_all_pairs(client, prefill, decode)
        await client.wait_whole(*deployment.instances)
        before = resources_of(deployment)
        end_s = time.monotonic() + soak_s
        seeds = [random.Random(rng.random()) for _ in range(NUM_CLIENTS + 1)]
        await asyncio.gather(
            break_things(deployment, client, tally, seeds[0], end_s),
            *(workload.drive(client, router, plan, tally, r, end_s, modes) for r in seeds[1:]),
        )
        print(dict(tally.counts))  # noqa: T201 - shown by pytest when the test fails
        assert not tally.wrong, tally.wrong[0]
        deployment.restore()
        await client.wait_whole(*deployment.instances, timeout_s=SETTLE_S)
        await connect_all_pairs(client, prefill, decode)
        await client.wait_whole(*deployment.instances)
        await assert_resources(deployment, before)
        await assert_idle(deployment)


def start(deployment: Deployment, model: Path, transport: str) -> None:
    """Two prefill and two decode instances and a router."""
    options = (*MOVES[transport], "--num-blocks", "400")
    prefill = [deployment.add_engine(f"prefill-{n}", model, *options) for n in range(2)]
    decode = [deployment.add_engine(f"decode-{n}", model, *options) for n in range(2)]
    deployment.wait_ready()
    deployment.add_router(prefill, decode, "--prefill-timeout-s", "5", "--request-timeout-s", "30")


@pytest.mark.parametrize("transport", list(MOVES))
async def test_every_answer_is_right_or_a_named_error(
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
        await soak(deployment, judge, tally, soak_random, soak_s, ("pull",), REQUESTS)
    assert tally.counts["received"] > 0
    assert tally.counts["killed"] + tally.counts["stopped"] > 0
