"""A deployment under mixed load for a while: every answer right, every block back at the end."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from kvferry.bench.client import CompletionClient
from kvferry.clock import SystemClock
from kvferry.cluster.supervisor import Deployment, Supervisor
from kvferry.cluster.topology import InstanceGroup, Topology
from tests.integration.clear_answers import Judge
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.soak

_NUM_CLIENTS = 8
_SETTLE_S = 60.0
_MAX_TIED_OTHERWISE = 0.01
_TOKEN_IDS = range(3, 250)
_BORDERS = (1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 511, 512, 513, 1025, 2048)


@dataclass(slots=True)
class _Tally:
    num_right: int = 0
    num_tied_otherwise: int = 0
    """Answers that differ from a tie on, where rounding decides."""
    num_left: int = 0
    num_moved: int = 0
    wrong: list[str] = field(default_factory=list)


def _prompt(rng: random.Random, history: list[list[int]]) -> list[int]:
    """A prompt of its own, or one that continues an earlier one, so that caches take part."""
    length = rng.choice(_BORDERS) if rng.random() < 0.5 else rng.randint(1, 3000)
    start = rng.choice(history) if history and rng.random() < 0.4 else []
    prompt = [*start, *(rng.choice(_TOKEN_IDS) for _ in range(length))][-3500:]
    history.append(prompt)
    del history[:-20]
    return prompt


async def _one_client(
    client: CompletionClient,
    deployment: Deployment,
    judge: Judge,
    rng: random.Random,
    end_s: float,
    tally: _Tally,
) -> None:
    history: list[list[int]] = []
    while time.monotonic() < end_s and not tally.wrong:
        body: dict[str, object] = {
            "prompt": _prompt(rng, history),
            "max_tokens": rng.randint(1, 24),
            "temperature": rng.choice([0.0, 0.8]),
            # Between many candidates a draw too often falls on a border, where rounding decides.
            "top_k": 4,
            "seed": rng.randrange(2**31),
            "ignore_eos": True,
        }
        routed = client.stream(f"{deployment.router_url}/v1/completions", body)
        if rng.random() < 0.2:
            try:
                await asyncio.wait_for(routed, rng.uniform(0.001, 0.2))
            except TimeoutError:
                tally.num_left += 1
            continue
        answer = await routed
        plain_url = rng.choice(deployment.instances).url
        salted = {**body, "cache_salt": f"plain-{rng.random()}"}
        plain = await client.stream(f"{plain_url}/v1/completions", salted)
        assert answer.report is not None
        tally.num_moved += answer.report.num_received_bytes > 0
        if answer.token_ids == plain.token_ids:
            tally.num_right += 1
            continue
        num_clear = judge.num_clear(body, plain.token_ids)
        is_whole = len(answer.token_ids) == len(plain.token_ids)
        if is_whole and answer.token_ids[:num_clear] == plain.token_ids[:num_clear]:
            tally.num_tied_otherwise += 1
        else:
            report = answer.report
            tally.wrong.append(f"{report}: {answer.token_ids} is not {plain.token_ids}")


async def _unsettled(session: aiohttp.ClientSession, deployment: Deployment) -> list[str]:
    """Say which instances still hold something."""
    holding = []
    for instance in deployment.instances:
        async with session.get(f"{instance.url}/kvferry/instance") as response:
            shown = await response.json()
        exchange = shown["exchange"]
        counts = [value for key, value in exchange.items() if key.startswith("num_")]
        if shown["num_free_blocks"] != shown["num_blocks"] or any(counts):
            holding.append(f"{instance.name}: {shown['num_free_blocks']} free, {exchange}")
    return holding


@pytest.mark.parametrize("transport", ["nixl", "shm"])
async def test_every_answer_is_right_and_every_block_comes_back(
    tmp_path: Path, transport: str, soak_s: float, soak_random: random.Random
) -> None:
    model = make_tiny_model(tmp_path / "model")
    groups = (InstanceGroup(count=2, num_blocks=1500),)
    topology = Topology(
        model=str(model),
        dtype="float32",
        transport=transport,
        prefill=groups,
        decode=groups,
    )
    judge, tally = Judge(model), _Tally()
    timeout = aiohttp.ClientTimeout(total=120)
    async with (
        Supervisor(topology, tmp_path) as supervisor,
        aiohttp.ClientSession(timeout=timeout) as session,
    ):
        deployment = await supervisor.start()
        client = CompletionClient(session, SystemClock())
        end_s = time.monotonic() + soak_s
        seeds = [soak_random.random() for _ in range(_NUM_CLIENTS)]
        clients = asyncio.gather(
            *(
                _one_client(client, deployment, judge, random.Random(seed), end_s, tally)
                for seed in seeds
            )
        )
        await supervisor.guard(_finished(clients))
        settle_end_s = time.monotonic() + _SETTLE_S
        while (holding := await _unsettled(session, deployment)) and (
            time.monotonic() < settle_end_s
        ):
            await asyncio.sleep(0.2)
    assert not tally.wrong
    assert not holding
    assert tally.num_right > 0
    assert tally.num_tied_otherwise <= max(2, _MAX_TIED_OTHERWISE * tally.num_right)
    assert tally.num_moved > 0


async def _finished(clients: asyncio.Future[list[None]]) -> None:
    await clients
