"""Waits that an instance's silence ends, and those that it leaves alone."""

from __future__ import annotations

import asyncio

import pytest

from kvferry.router.fleet.silence import InstanceWaits, LegWait
from kvferry.router.upstream import LegFailedError, LegFailure
from tests.support.fake_clock import FakeClock

_MIN_SILENCE_S = 3.0


class World:
    """Two instances, and a clock that stands still between two probes."""

    def __init__(self) -> None:
        self.clock = FakeClock(100.0)
        self.waits = InstanceWaits("http://p")
        self.others = InstanceWaits("http://d")
        self.coming: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def begin(self, wait: LegWait | None = None) -> asyncio.Task[bytes]:
        """A task that waits for ``coming``, as a leg does."""
        leg = self.waits.of_leg() if wait is None else wait

        async def read() -> bytes:
            with leg:
                return await self.coming

        task = asyncio.create_task(read())
        await asyncio.sleep(0)
        return task

    def begin_probe(self) -> None:
        self.waits.silence.begin_probe(self.clock.monotonic_s())

    def take_unanswered(self) -> None:
        self.waits.take_unanswered(self.clock.monotonic_s(), _MIN_SILENCE_S)

    def miss_probe(self) -> None:
        self.begin_probe()
        self.clock.advance(2.0)
        self.take_unanswered()

    def fall_silent(self) -> None:
        self.miss_probe()
        self.clock.advance(1.0)
        self.miss_probe()


@pytest.fixture
async def world() -> World:
    return World()


async def test_silence_ends_every_wait_for_the_instance(world: World) -> None:
    first, second = await world.begin(), await world.begin()
    world.miss_probe()
    await asyncio.sleep(0)
    assert not first.done()
    world.clock.advance(1.0)
    world.miss_probe()
    for task in (first, second):
        with pytest.raises(LegFailedError, match=r"silent: nothing has come for 5\.0 s") as failed:
            await task
        assert failed.value.cause is LegFailure.SILENT
        assert task.cancelling() == 0


async def test_the_silence_of_another_instance_ends_nothing(world: World) -> None:
    task = await world.begin()
    world.waits = world.others
    world.fall_silent()
    world.coming.set_result(b"it")
    assert await task == b"it"


async def test_what_comes_on_one_leg_speaks_for_all(world: World) -> None:
    waiting = await world.begin()
    busy = world.waits.of_leg()
    for _ in range(5):
        world.begin_probe()
        with busy:
            await asyncio.sleep(0)
        world.clock.advance(2.0)
        world.take_unanswered()
    world.coming.set_result(b"it")
    assert await waiting == b"it"


async def test_an_answered_probe_speaks_for_all_legs(world: World) -> None:
    task = await world.begin()
    for _ in range(5):
        world.miss_probe()
        world.begin_probe()
        world.waits.silence.hear()
    world.coming.set_result(b"it")
    assert await task == b"it"


async def test_a_leg_that_waits_for_somebody_else_goes_on(world: World) -> None:
    wait = world.waits.of_leg()
    client_reads = asyncio.Event()

    async def stream() -> bytes:
        with wait:
            await asyncio.sleep(0)
        await client_reads.wait()
        with wait:
            return await world.coming

    task = asyncio.create_task(stream())
    await asyncio.sleep(0.01)
    world.fall_silent()
    world.coming.set_result(b"here since long ago")
    client_reads.set()
    assert await task == b"here since long ago"


async def test_a_wait_that_begins_during_silence_ends_with_the_next_probe(world: World) -> None:
    world.fall_silent()
    task = await world.begin()
    assert not task.done()
    world.miss_probe()
    with pytest.raises(LegFailedError):
        await task


async def test_a_leg_whose_wait_was_ended_can_wait_again(world: World) -> None:
    wait = world.waits.of_leg()
    task = await world.begin(wait)
    world.fall_silent()
    with pytest.raises(LegFailedError):
        await task
    world.coming = asyncio.get_running_loop().create_future()
    task = await world.begin(wait)
    world.coming.set_result(b"it")
    assert await task == b"it"


async def test_who_cancels_the_request_has_the_last_word(world: World) -> None:
    task = await world.begin()
    world.fall_silent()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_deadline_around_the_wait_stays_its_own(world: World) -> None:
    task = await world.begin()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(task, 0.01)


async def test_a_failure_of_the_leg_is_passed_on_and_is_no_sign_of_life(world: World) -> None:
    world.miss_probe()
    world.clock.advance(1.0)
    with pytest.raises(ConnectionResetError), world.waits.of_leg():
        raise ConnectionResetError
    task = await world.begin()
    world.miss_probe()
    with pytest.raises(LegFailedError):
        await task


async def test_waits_that_are_over_are_forgotten(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        with world.waits.of_leg():
            pass
    task = await world.begin()
    world.fall_silent()
    with pytest.raises(LegFailedError):
        await task
    world.miss_probe()
    told = [vars(r)["fields"]["num_legs"] for r in caplog.records if "silent" in r.message]
    assert told == [1]
