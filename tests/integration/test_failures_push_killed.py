"""A push's prefill is killed, its decode leg is left, or both, at each point of the push.

Where one side has failed at a point, the push gets to no later one: that the other side fails at a
later point of the same push cannot be told from its failing right afterwards. So the pairs of
points are, for each point, the two orders in which both sides fail there, one right after the other
and before the other can have noticed. The KV is wide and moves over TCP, so that WRITEs take long.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from tests.integration.deployment_client import (
    Answer,
    Client,
    Json,
    body_of,
    fresh_prompt,
    new_transfer,
    salted,
)
from tests.integration.deployment_setup import Deployment, Program, open_deployment
from tests.integration.push_legs import (
    CHUNK_OPTIONS,
    SHORT_LEASE,
    WIDE_OPTIONS,
    ControlProxy,
    Push,
    control_proxy,
    leave,
    num_registered,
    peer_of,
    wait_metric,
    wait_registered,
)
from tests.support.process_forks import ProcessForks

pytestmark = pytest.mark.slow

NUM_TOKENS = 240
"""15 blocks: within the share of decode's pool that may wait for a prefill's admission."""
ANSWER_BOUND_S = 5.0
"""From a failure to the right tokens or a clear error."""
OPTIONS = (
    *("--transport", "nixl", "--ucx-tls", "tcp", "--no-user-key"),
    *WIDE_OPTIONS,
    *SHORT_LEASE,
)
"""Without a key, so that the proxy before the control port can read what passes."""
WRITTEN_NOTICE = b"\xa7written"
NUM_OTHER_TOKENS = 900
"""Leaves decode's pool no room for the prompt."""
POINTS = ["unregistered", "registered", "computing", "writing", "written"]
"""``computing``: chunks are written and more will be. ``writing``: the whole prompt at once.
``written``: all is, and decode has not heard so."""
SOAKED = [p if p == "writing" else pytest.param(p, marks=pytest.mark.soak) for p in POINTS]
at_each_point = pytest.mark.parametrize("point", POINTS)
at_each_point_in_soak = pytest.mark.parametrize("point", SOAKED)


@pytest.fixture(scope="module")
def deployment(
    forks: ProcessForks, wide_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    with open_deployment(tmp_path_factory.mktemp("push-killed"), forks) as deployment:
        deployment.add_engine("prefill", wide_model, *OPTIONS, *CHUNK_OPTIONS)
        deployment.add_engine("decode", wide_model, *OPTIONS)
        deployment.wait_ready()
        yield deployment


@dataclass(slots=True)
class AtPoint:
    """A push that has got to a point. ``occupant`` keeps decode's pool full meanwhile."""

    push: Push
    prefill: asyncio.Task[Answer]
    decode: asyncio.Task[Answer]
    occupant: asyncio.Task[Answer] | None = None

    async def free_pool(self) -> None:
        if self.occupant is not None:
            self.occupant.cancel()
            await asyncio.gather(self.occupant, return_exceptions=True)


@dataclass(slots=True)
class Scene:
    """One push between the two programs, brought to a point."""

    client: Client
    deployment: Deployment
    proxy: ControlProxy
    body: Json
    on_failure: str = "recompute"

    @property
    def sender(self) -> Program:
        return self.deployment["prefill"]

    @property
    def receiver(self) -> Program:
        return self.deployment["decode"]

    async def bring_to(self, point: str) -> AtPoint:
        peer = await peer_of(self.client, self.sender)
        push = Push(self.client, self.body, new_transfer(), peer)
        since = self.sender.log_size()
        match point:
            case "unregistered":
                return await self._bring_to_unregistered(push)
            case "registered":
                count = await num_registered(self.client, self.sender)
                decode = self._begin_decode(push)
                await wait_registered(self.client, self.sender, count + 1)
                return AtPoint(push, push.begin_prefill(self.sender), decode)
            case "computing":
                decode = self._begin_decode(push)
                prefill = push.begin_prefill(self.sender)
                await push.wait_writing(self.sender, since)
                assert not prefill.done()
                return AtPoint(push, prefill, decode)
            case "writing":
                prefill = push.begin_prefill(self.sender)
                assert (await prefill).status == 200
                decode = self._begin_decode(push)
                await push.wait_writing(self.sender, since)
                return AtPoint(push, prefill, decode)
            case _:
                return await self._bring_to_written(push)

    async def _bring_to_unregistered(self, push: Push) -> AtPoint:
        """Decode has no blocks to register, for as long as another request has them."""
        other = body_of(fresh_prompt(NUM_OTHER_TOKENS), 100)
        occupant = asyncio.create_task(self.client.post(self.receiver, other))
        await self.client.wait_figure(self.receiver, "num_requests_running", 1)
        decode = self._begin_decode(push)
        await self.client.wait_figure(self.receiver, "num_requests_waiting", 1)
        prefill = push.begin_prefill(self.sender)
        await self.client.wait_figure(self.sender, "num_requests_running", 1)
        return AtPoint(push, prefill, decode, occupant)

    async def _bring_to_written(self, push: Push) -> AtPoint:
        """All is written, but decode will never hear so."""
        metric = "kvferry_handoffs_total"
        written = await self.client.metric(self.sender, metric, outcome="written")
        push.peer = push.peer | {"control_address": self.proxy.address}
        prefill = push.begin_prefill(self.sender)
        decode = self._begin_decode(push)
        await wait_metric(self.client, self.sender, f"{metric} written", written + 1)
        async with asyncio.timeout(2):
            await self.proxy.held.wait()
        return AtPoint(push, prefill, decode)

    def _begin_decode(self, push: Push) -> asyncio.Task[Answer]:
        return push.begin_decode(self.receiver, on_failure=self.on_failure)


@pytest.fixture
async def scene(
    client: Client, deployment: Deployment, case: tuple[Json, list[int]]
) -> AsyncIterator[Scene]:
    async with control_proxy(deployment["prefill"].control_address, WRITTEN_NOTICE) as proxy:
        yield Scene(client, deployment, proxy, case[0])


async def kill(program: Program, leg: asyncio.Task[Answer]) -> None:
    program.kill()
    with contextlib.suppress(aiohttp.ClientError):
        await leg


@at_each_point
async def test_prefill_killed(scene: Scene, case: tuple[Json, list[int]], point: str) -> None:
    reached = await scene.bring_to(point)
    assert not reached.decode.done()
    killed_s = time.monotonic()
    await kill(scene.sender, reached.prefill)
    await reached.free_pool()
    answer = await reached.decode
    assert time.monotonic() - killed_s < ANSWER_BOUND_S
    assert answer.token_ids == case[1]
    assert answer.outcome in ("unreachable", "failed")
    await scene.client.wait_whole(scene.receiver)


@pytest.mark.parametrize("point", ["unregistered", "computing"])
async def test_prefill_killed_where_decode_must_not_recompute(scene: Scene, point: str) -> None:
    scene.on_failure = "error"
    reached = await scene.bring_to(point)
    killed_s = time.monotonic()
    await kill(scene.sender, reached.prefill)
    await reached.free_pool()
    answer = await reached.decode
    assert time.monotonic() - killed_s < ANSWER_BOUND_S
    assert answer.error is not None
    assert "the KV did not come" in answer.error["message"]
    await scene.client.wait_whole(scene.receiver)


@at_each_point
async def test_decode_leg_left(scene: Scene, case: tuple[Json, list[int]], point: str) -> None:
    reached = await scene.bring_to(point)
    await leave(reached.decode)
    prefill = await reached.prefill
    assert prefill.status == 200
    assert prefill.token_ids in (case[1][:1], [])
    await reached.free_pool()
    await scene.client.wait_whole(scene.sender, scene.receiver)


@at_each_point_in_soak
async def test_prefill_killed_and_then_the_decode_leg_left(scene: Scene, point: str) -> None:
    reached = await scene.bring_to(point)
    scene.sender.kill()
    await leave(reached.decode)
    await kill(scene.sender, reached.prefill)
    await reached.free_pool()
    await scene.client.wait_whole(scene.receiver)


@at_each_point_in_soak
async def test_decode_leg_left_and_then_prefill_killed(scene: Scene, point: str) -> None:
    reached = await scene.bring_to(point)
    await leave(reached.decode)
    await kill(scene.sender, reached.prefill)
    await reached.free_pool()
    await scene.client.wait_whole(scene.receiver)


@at_each_point_in_soak
async def test_decode_killed(scene: Scene, case: tuple[Json, list[int]], point: str) -> None:
    """Prefill ends its own work; a decode that comes back is pushed to again."""
    reached = await scene.bring_to(point)
    await kill(scene.receiver, reached.decode)
    await reached.free_pool()
    assert (await reached.prefill).status == 200
    await scene.client.wait_whole(scene.sender)
    scene.receiver.restore()
    peer = await peer_of(scene.client, scene.sender)
    again = Push(scene.client, salted(scene.body), new_transfer(), peer)
    prefill, decode = again.begin_prefill(scene.sender), again.begin_decode(scene.receiver)
    answer = await decode
    assert answer.token_ids == case[1]
    assert answer.outcome == "received"
    assert (await prefill).status == 200
