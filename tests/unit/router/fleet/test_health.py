"""Which probes say that an instance is silent, and when the next one is sent."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from typing import cast

import aiohttp
import pytest
from aiohttp.client_reqrep import ConnectionKey
from multidict import CIMultiDict

from kvferry.protocol.ids import Epoch, InstanceId
from kvferry.router.fleet.health import HealthMonitor, ProbeTimes
from kvferry.router.fleet.identity import Identities, InstanceIdentity
from kvferry.router.fleet.registry import Fleet, Health
from kvferry.router.upstream import LegAnswer, LegFailedError, LegFailure, Upstream
from tests.support.fake_clock import FakeClock

_URL = "http://p"
_KEY = ConnectionKey("p", 80, False, True, None, None, None)
_WELL = LegAnswer(200, {}, b"")


class _Upstream:
    """Answers probes as it was told to, one after the other."""

    def __init__(self, clock: FakeClock, *results: LegAnswer | Exception | None) -> None:
        self._clock = clock
        self._results = list(results)
        self.asked_s: list[float] = []

    async def get(self, base: str, path: str, headers: CIMultiDict[str]) -> LegAnswer:
        self.asked_s.append(time.monotonic())
        self._clock.advance(2.0)
        result = self._results.pop(0) if self._results else None
        if result is None:
            await asyncio.Event().wait()
        if isinstance(result, OSError):
            raise LegFailedError(LegFailure.UNREACHABLE, str(result)) from result
        if isinstance(result, Exception):
            raise result
        assert result is not None
        return result


class _Nobody:
    async def identify(self, url: str, known: InstanceIdentity | None) -> InstanceIdentity | None:
        return None

    def why_silent(self, url: str) -> str:
        return ", as is its way"

    def close(self) -> None:
        pass


class World:
    """One instance that a leg waits for, and what its probes are answered."""

    def __init__(
        self,
        *results: LegAnswer | Exception | None,
        interval_s: float = 60.0,
        timeout_s: float = 0.02,
    ) -> None:
        clock = FakeClock()
        self.fleet = Fleet([_URL], [])
        self.upstream = _Upstream(clock, *results)
        self.monitor = HealthMonitor(
            self.fleet,
            cast(Upstream, self.upstream),
            cast(Identities, _Nobody()),
            ProbeTimes(interval_s, timeout_s),
            clock,
        )
        self.leg = asyncio.create_task(self._wait())

    async def _wait(self) -> None:
        with self.fleet.waits(_URL).of_leg():
            await asyncio.Event().wait()

    async def probe(self, times: int) -> bool:
        """Probe it so often; return whether the leg has ended."""
        await asyncio.sleep(0)
        for _ in range(times):
            await self.monitor.probe(_URL)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        is_ended = self.leg.done()
        self.leg.cancel()
        await asyncio.wait([self.leg])
        return is_ended


def _connector_error(number: int) -> aiohttp.ClientConnectorError:
    return aiohttp.ClientConnectorError(_KEY, OSError(number, "no"))


@pytest.mark.parametrize(
    "failure",
    [
        None,
        _connector_error(errno.EHOSTUNREACH),
        _connector_error(errno.ENETUNREACH),
        aiohttp.ClientConnectorDNSError(_KEY, socket.gaierror(socket.EAI_NONAME, "no name")),
        aiohttp.ConnectionTimeoutError("connecting took too long"),
        _connector_error(errno.ECONNREFUSED),
    ],
)
async def test_where_nobody_answers_two_probes_end_the_leg(failure: Exception | None) -> None:
    assert not await World(failure).probe(1)
    world = World(failure, failure)
    assert await world.probe(2)
    assert world.fleet.health(_URL) is Health.DOWN


@pytest.mark.parametrize(
    "result",
    [
        _WELL,
        LegAnswer(503, {}, b""),
        LegFailedError(LegFailure.BROKEN, "reset"),
    ],
)
async def test_whoever_says_anything_is_not_silent(result: LegAnswer | Exception) -> None:
    assert not await World(*[result] * 4).probe(4)
    assert not await World(*[None, result] * 3).probe(6)


async def test_a_doubted_instance_is_probed_after_half_the_interval() -> None:
    world = World(_WELL, None, None, interval_s=1.6)
    await world.monitor.start()
    async with asyncio.timeout(20):
        while len(world.upstream.asked_s) < 4:
            await asyncio.sleep(0.01)
    await world.monitor.stop()
    with pytest.raises(LegFailedError):
        await world.leg
    first_s, second_s, third_s, fourth_s = world.upstream.asked_s
    assert second_s - first_s >= 1.59
    assert 0.8 <= third_s - second_s < 1.59
    assert fourth_s - third_s >= 1.59


def test_with_the_default_times_silence_takes_less_than_ten_seconds() -> None:
    """From the end of one probe: interval, probe, half of it, probe; and a late answer before."""
    times = ProbeTimes(2.0, 2.0)
    identity_s = times.timeout_s
    found_s = times.interval_s + times.doubted_interval_s + 2 * times.timeout_s
    assert identity_s + found_s < 10
    assert times.min_silence_s < times.doubted_interval_s + 2 * times.timeout_s


class _Layouts:
    """Instances that say of what layout they are."""

    def __init__(self, **fingerprints: str) -> None:
        self.fingerprints = fingerprints

    async def identify(self, url: str, known: InstanceIdentity | None) -> InstanceIdentity | None:
        name = url.removeprefix("http://")
        fingerprint = self.fingerprints[name]
        return InstanceIdentity(
            instance_id=InstanceId(name),
            epoch=Epoch(1),
            control_address="tcp://a:1",
            fingerprint=fingerprint,
        )

    def why_silent(self, url: str) -> str:
        return ""

    def close(self) -> None:
        pass


async def test_instances_of_different_layouts_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    fleet, layouts = Fleet(["http://p"], ["http://d", "http://e"]), _Layouts(p="a", d="b", e="")
    monitor = HealthMonitor(
        fleet,
        cast(Upstream, _Upstream(FakeClock(), *[_WELL] * 12)),
        cast(Identities, layouts),
        ProbeTimes(60.0, 1.0),
        FakeClock(),
    )
    for _ in range(2):
        await monitor.probe_all()
    details = {url: fleet.detail(url) for url in fleet.urls}
    assert details["http://p"].startswith("it exchanges nothing with http://d")
    assert details["http://d"].startswith("it exchanges nothing with http://p")
    assert "kvferry doctor names what differs" in details["http://p"]
    assert details["http://e"] == ""
    assert len([r for r in caplog.records if "exchange nothing" in r.message]) == 2
    layouts.fingerprints["d"] = "a"
    for _ in range(2):
        await monitor.probe_all()
    assert [fleet.detail(url) for url in fleet.urls] == ["", "", ""]


async def test_an_instance_that_does_not_say_who_it_is_is_told_of_with_the_reason() -> None:
    world = World(_WELL)
    nobody = _Nobody()

    async def wait_for_ever(url: str, known: InstanceIdentity | None) -> InstanceIdentity | None:
        await asyncio.Event().wait()
        return None

    nobody.identify = wait_for_ever  # type: ignore[method-assign]
    world.monitor = HealthMonitor(
        world.fleet,
        cast(Upstream, world.upstream),
        cast(Identities, nobody),
        ProbeTimes(60.0, 0.02),
        FakeClock(),
    )
    await world.probe(1)
    assert world.fleet.detail(_URL) == "no answer to who it is within 0.02 s, as is its way"
