"""Probes instances, and asks who they are: each interval, and at once when one is suspect.

Owns one task for each instance. What a probe found is recorded in the fleet; what waits for an
instance learns of the probes that went unanswered.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from multidict import CIMultiDict

from kvferry.clock import Clock
from kvferry.errors import FerryError
from kvferry.observe.log import get_logger
from kvferry.router.fleet.identity import Identities, InstanceIdentity
from kvferry.router.fleet.registry import Fleet, FleetEvent, Health
from kvferry.router.upstream import LegFailedError, Upstream

_NUM_SLICES = 5
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ProbeTimes:
    """When instances are probed."""

    interval_s: float
    """From the end of a probe to the next one."""
    timeout_s: float
    """Bound of a probe, and of asking who an instance is."""

    @property
    def doubted_interval_s(self) -> float:
        """After a first probe that went unanswered: what waits there should not wait long."""
        return self.interval_s / 2

    @property
    def min_silence_s(self) -> float:
        """Probes may fail at once while a network recovers; connections outlive that."""
        return 1.5 * self.timeout_s


class HealthMonitor:
    """Keeps the health of every instance of ``fleet`` up to date between start and stop."""

    def __init__(
        self,
        fleet: Fleet,
        upstream: Upstream,
        identities: Identities,
        times: ProbeTimes,
        clock: Clock,
    ) -> None:
        self._fleet = fleet
        self._upstream = upstream
        self._identities = identities
        self._times = times
        self._clock = clock
        self._wanted = {url: asyncio.Event() for url in fleet.urls}
        self._tasks: list[asyncio.Task[None]] = []
        self._noted: dict[str, str] = {}
        """Of those that are well, what has been said already."""

    async def start(self) -> None:
        """Probe all once, which takes up to the probe's timeout, then keep probing."""
        self._fleet.subscribe(self._hear)
        await self.probe_all()
        self._tasks = [asyncio.create_task(self._watch(url)) for url in self._fleet.urls]

    async def probe_all(self) -> None:
        """Probe all once, at the same time."""
        await asyncio.gather(*(self.probe(url) for url in self._fleet.urls))

    async def stop(self) -> None:
        """Stop probing, for good."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._identities.close()

    def _hear(self, event: FleetEvent, url: str) -> None:
        match event:
            case FleetEvent.SUSPECT:
                self._wanted[url].set()  # Rather than at the end of its interval.
            case FleetEvent.NEW_EPOCH:
                _log.info("an instance was started anew", extra={"fields": {"instance": url}})
            case FleetEvent.DRAINED:
                _log.info("an instance has drained", extra={"fields": {"instance": url}})

    async def _watch(self, url: str) -> None:
        wanted = self._wanted[url]
        while True:
            try:
                async with asyncio.timeout(self._pause_s(url)):
                    await wanted.wait()
            except TimeoutError:
                pass  # The usual case: the interval has passed.
            wanted.clear()
            await self.probe(url)

    def _pause_s(self, url: str) -> float:
        is_doubted = self._fleet.waits(url).silence.is_doubted
        return self._times.doubted_interval_s if is_doubted else self._times.interval_s

    async def probe(self, url: str) -> None:
        """Ask ``GET /health`` once, and an instance that is well who it is; record the answers.

        An instance that refuses or answers anything but 200 is down. One that is merely slow is
        suspect first and down the second time: a busy engine may be late once. If nothing else has
        come from it meanwhile, it has fallen silent then, and what waits for it ends.
        """
        timeout_s = self._times.timeout_s
        waits = self._fleet.waits(url)
        waits.silence.begin_probe(self._clock.monotonic_s())
        try:
            async with running_timeout(timeout_s):
                answer = await self._upstream.get(url, "/health", CIMultiDict())
        except TimeoutError:
            before = self._fleet.health(url)
            after = Health.SUSPECT if before is Health.HEALTHY else Health.DOWN
            self._record(url, after, f"no answer to a probe within {timeout_s:g} s")
            waits.take_unanswered(self._clock.monotonic_s(), self._times.min_silence_s)
        except LegFailedError as error:
            self._record(url, Health.DOWN, str(error))
            if error.is_unanswered:
                waits.take_unanswered(self._clock.monotonic_s(), self._times.min_silence_s)
            else:
                waits.silence.hear()
        else:
            waits.silence.hear()
            healthy = answer.status == 200
            detail = "" if healthy else f"a probe was answered {answer.status}"
            self._record(url, Health.HEALTHY if healthy else Health.DOWN, detail)
            if self._fleet.health(url) is Health.HEALTHY:
                await self._identify(url)

    async def _identify(self, url: str) -> None:
        """Ask who it is; one that does not say is unknown, and well all the same.

        The old identity stands until then, and when the answer is merely late.
        """
        known = self._fleet.identity(url)
        try:
            async with running_timeout(self._times.timeout_s):
                identity = await self._identities.identify(url, known)
        except TimeoutError:
            self._note_unknown(
                url,
                f"no answer to who it is within {self._times.timeout_s:g} s"
                f"{self._identities.why_silent(url)}",
            )
        except FerryError as error:
            self._fleet.set_identity(url, None)
            self._note_unknown(url, f"it cannot be asked who it is: {error}")
        else:
            self._fleet.set_identity(url, identity)
            detail = "" if identity is None else self._difference(identity)
            if not detail:
                self._noted.pop(url, None)
                return
            self._note(url, "two instances exchange nothing", detail)

    def _difference(self, identity: InstanceIdentity) -> str:
        """Return with whom one of ``identity`` exchanges nothing and why, of several the first."""
        for url in self._fleet.urls:
            difference = identity.difference_from(self._fleet.identity(url))
            if difference:
                return f"it exchanges nothing with {url}, and is not paired with it: {difference}"
        return ""

    def _note_unknown(self, url: str, detail: str) -> None:
        """Say why an instance takes no part in pushes and read-backs."""
        self._note(url, "an instance does not say who it is", detail)

    def _note(self, url: str, what: str, detail: str) -> None:
        """Show what is wrong with an instance that is well; logged once, until it is right."""
        self._fleet.set_detail(url, detail)
        if self._noted.get(url) != what:
            self._noted[url] = what
            _log.warning(what, extra={"fields": {"instance": url, "detail": detail}})

    def _record(self, url: str, health: Health, detail: str) -> None:
        before = self._fleet.health(url)
        self._fleet.set_health(url, health, detail)
        after = self._fleet.health(url)
        if before is not after:
            _log.info(
                "an instance's health has changed",
                extra={"fields": {"instance": url, "health": after.value, "detail": detail}},
            )


@asynccontextmanager
async def running_timeout(limit_s: float) -> AsyncIterator[None]:
    """As ``asyncio.timeout``, counting only time in which the event loop ran.

    So a process that did not run itself blames nobody else. The limit is a chain of slices. However
    late the loop comes back (the process was stopped, a callback was slow), that costs one slice,
    and what has come meanwhile is taken in before the next one ends. Raises ``TimeoutError``.
    """
    loop = asyncio.get_running_loop()
    slice_s = limit_s / _NUM_SLICES

    timer: asyncio.TimerHandle | None = None

    async with asyncio.timeout(None) as deadline:

        def begin_slice(num_left: int) -> None:
            nonlocal timer
            if num_left > 0:
                timer = loop.call_later(slice_s, begin_slice, num_left - 1)
            else:
                deadline.reschedule(loop.time())

        begin_slice(_NUM_SLICES)
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
