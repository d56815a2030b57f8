"""Which instances get requests: full, flapping, dead, loading, none; and how many at once."""

from __future__ import annotations

import asyncio

import pytest

from kvferry.router.config import OnPrefillFailure
from kvferry.router.fleet.registry import Health
from tests.integration.router_setup import Deployment, deployment, events_of
from tests.support.scripted_engine import Script

_STREAM = {"prompt": "a", "stream": True}
_WHOLE = {"prompt": "a"}


async def test_full_instances_are_passed_over_and_stay_healthy() -> None:
    async with deployment(2, 1) as world:
        world.p.prefill = Script(status=429)
        for _ in range(4):
            async with world.post(_WHOLE) as response:
                assert response.status == 200
        assert world.router.fleet.health(world.p.url) is Health.HEALTHY
        assert await world.outcomes() == {"ok": 4}


async def test_push_back_of_all_reaches_the_client() -> None:
    async with deployment(2, 1) as world:
        for engine in world.prefill:
            engine.prefill = Script(status=429, body=b"{}", headers={"Retry-After": "7"})
        async with world.post(_WHOLE) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "7")
        assert await world.outcomes() == {"overloaded": 1}


async def test_occasional_resets_cost_no_request() -> None:
    async with deployment(2, 2, health_interval_s=0.05) as world:
        for number in range(100):
            if number % 20 == 0:
                world.prefill[number % 2].once.append(Script(reset_before_headers=True))
                world.decode[number // 20 % 2].once.append(Script(reset_before_headers=True))
            async with world.post(_STREAM) as response:
                assert response.status == 200
                assert "error" not in events_of(await response.read())[-1]
        assert sum((await world.outcomes()).values()) == 100
        fleet = world.router.fleet.snapshot()
        assert {view.num_inflight for view in (*fleet.prefill, *fleet.decode)} == {0}


async def test_dead_instance_is_left_out_until_it_is_back() -> None:
    async with deployment(2, 1, health_interval_s=0.05) as world:
        dead = world.p
        await dead.stop()
        async with world.post(_WHOLE) as response:
            assert response.status == 200
        async with asyncio.timeout(5):
            while world.router.fleet.health(dead.url) is not Health.DOWN:
                await asyncio.sleep(0.01)
        num_before = len(world.prefill[1].received)
        for _ in range(4):
            async with world.post(_WHOLE) as response:
                assert response.status == 200
        assert len(world.prefill[1].received) == num_before + 4
        await dead.start()
        await dead.wait_until(lambda: dead.num_probes >= 3)
        async with asyncio.timeout(5):
            while world.router.fleet.health(dead.url) is not Health.HEALTHY:
                await asyncio.sleep(0.01)
        received = len(dead.received)
        for _ in range(4):
            async with world.post(_WHOLE) as response:
                assert response.status == 200
        assert len(dead.received) == received + 2


async def test_instance_that_is_still_loading_gets_nothing() -> None:
    async with deployment(2, 1, health_interval_s=0.05) as world:
        world.p.health_status = 503
        async with asyncio.timeout(5):
            while world.router.fleet.health(world.p.url) is not Health.DOWN:
                await asyncio.sleep(0.01)
        for _ in range(3):
            async with world.post(_WHOLE) as response:
                assert response.status == 200
        assert world.p.received == []


async def test_slow_probe_makes_suspect_first_and_down_then() -> None:
    async with deployment(1, 1, health_interval_s=0.05, health_timeout_s=0.1) as world:
        world.p.health_gate = asyncio.Event()
        seen: list[Health] = []
        async with asyncio.timeout(5):
            while Health.DOWN not in seen:
                health = world.router.fleet.health(world.p.url)
                if not seen or seen[-1] is not health:
                    seen.append(health)
                await asyncio.sleep(0.005)
        assert seen == [Health.HEALTHY, Health.SUSPECT, Health.DOWN]


async def test_without_a_healthy_instance_requests_are_turned_away_at_once() -> None:
    async with deployment(health_interval_s=0.05) as world:
        await world.d.stop()
        async with asyncio.timeout(5):
            while world.router.fleet.health(world.d.url) is not Health.DOWN:
                await asyncio.sleep(0.01)
        async with world.post(_STREAM) as response:
            answer = await response.json()
        assert (response.status, answer["error"]["code"]) == (503, "no_instance")
        assert response.headers["Retry-After"] == "1"
        assert world.p.received == []
        assert await world.outcomes() == {"no_instance": 1}
        async with world.client.get(world.router.url + "/health") as response:
            assert response.status == 503
            assert (await response.json())["num_healthy"] == {"prefill": 1, "decode": 0}


@pytest.mark.parametrize("policy", list(OnPrefillFailure))
async def test_without_a_prefill_instance_the_policy_decides(policy: OnPrefillFailure) -> None:
    async with deployment(health_interval_s=0.05, on_prefill_failure=policy) as world:
        await world.p.stop()
        async with asyncio.timeout(5):
            while world.router.fleet.health(world.p.url) is not Health.DOWN:
                await asyncio.sleep(0.01)
        async with world.post(_WHOLE) as response:
            status = response.status
        falls_back = policy is not OnPrefillFailure.ERROR
        assert status == (200 if falls_back else 503)
        outcome = "fallback_decode_only" if falls_back else "no_instance"
        assert await world.outcomes() == {outcome: 1}


async def test_more_requests_than_allowed_are_turned_away() -> None:
    gate = asyncio.Event()
    async with deployment(max_inflight=2) as world:
        world.p.prefill.before_headers = gate
        running = [asyncio.ensure_future(_status(world)) for _ in range(2)]
        await world.p.wait_until(lambda: len(world.p.received) == 2)
        async with world.post(_WHOLE) as response:
            answer = await response.json()
        assert (response.status, answer["error"]["code"]) == (429, "overloaded")
        assert response.headers["Retry-After"] == "1"
        gate.set()
        assert await asyncio.gather(*running) == [200, 200]
        assert await world.outcomes() == {"overloaded": 1, "ok": 2}


async def _status(world: Deployment) -> int:
    async with world.post(_WHOLE) as response:
        await response.read()
        return response.status
