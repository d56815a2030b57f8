"""A deployment's life: start every process, wait until all are ready, watch them, stop them.

Knows the order of things; one process is ``process.py``'s.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from kvferry.clock import Clock, SystemClock
from kvferry.cluster.plan import engine_arguments, plan_instances, router_arguments
from kvferry.cluster.process import ManagedProcess, ReadyReport
from kvferry.cluster.topology import Topology
from kvferry.protocol.params import Role

Progress = Callable[[str], None]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorConfig:
    """What is started, and bounds of the supervisor's waits."""

    ready_deadline_s: float = 300.0
    """For each process; the first start of a bundled model converts it."""
    stop_grace_s: float = 10.0
    """From SIGTERM to SIGKILL."""
    program: tuple[str, ...] = (sys.executable, "-m", "kvferry.cli.main")
    """The program whose subcommands are started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningInstance:
    """One instance that serves."""

    name: str
    role: Role
    url: str
    pid: int
    control_address: str
    cores: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningRouter:
    """One router that serves."""

    name: str
    url: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A deployment that serves."""

    router_url: str
    router_pid: int
    instances: tuple[RunningInstance, ...]
    further_routers: tuple[RunningRouter, ...] = ()
    """In the topology's order."""

    def urls(self, role: Role) -> list[str]:
        """Return the URLs of the instances of one role."""
        return [instance.url for instance in self.instances if instance.role is role]


def _available_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return []


class Supervisor:
    """Runs one deployment: ``async with Supervisor(…) as s: await s.start(); await s.watch()``."""

    def __init__(
        self,
        topology: Topology,
        run_folder: Path,
        *,
        config: SupervisorConfig | None = None,
        clock: Clock | None = None,
        on_progress: Progress = lambda message: None,
    ) -> None:
        self._topology = topology
        self._run_folder = run_folder
        self._config = config or SupervisorConfig()
        self._clock = clock or SystemClock()
        self._on_progress = on_progress
        self._processes: list[ManagedProcess] = []
        self._routers: list[ManagedProcess] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    @property
    def log_paths(self) -> list[Path]:
        """Log files of the processes started so far."""
        return [process.log_path for process in self._processes]

    async def start(self) -> Deployment:
        """Start instances, then the routers, and return once all of them serve.

        Raises ``ClusterError`` naming the process that died or was not ready in time.
        """
        instances = await self._start_instances()
        routers = await self._start_routers(instances)
        return Deployment(
            router_url=routers[0].url,
            router_pid=routers[0].pid,
            instances=instances,
            further_routers=routers[1:],
        )

    async def watch(self) -> None:
        """Wait until a process dies and raise ``ClusterError`` saying which and how."""
        ends = {asyncio.ensure_future(process.wait_ended()): process for process in self._processes}
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
        raise ends[done.pop()].death()

    async def guard(self, body: Coroutine[Any, Any, Result]) -> Result:
        """Return the result of ``body``, or raise ``ClusterError`` if a process dies before."""
        work = asyncio.ensure_future(body)
        watch = asyncio.ensure_future(self.watch())
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if watch.done() and not work.done():
                watch.result()
            return await work
        finally:
            for task in (work, watch):
                task.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)

    async def stop(self) -> None:
        """End the routers, then every instance, each within the grace time. Safe to repeat."""
        grace_s = self._config.stop_grace_s
        await asyncio.gather(*(process.stop(grace_s) for process in self._routers))
        await asyncio.gather(*(process.stop(grace_s) for process in self._processes))

    async def _start_instances(self) -> tuple[RunningInstance, ...]:
        planned = plan_instances(self._topology, _available_cores())
        started = []
        for plan in planned:
            process = self._new_process(plan.name)
            arguments = engine_arguments(self._topology, plan.group, plan.name, process.ready_path)
            await process.start([*self._config.program, *arguments], plan.cores)
            started.append(process)
        return tuple(
            RunningInstance(
                name=plan.name,
                role=plan.role,
                url=ready.url,
                pid=process.pid,
                control_address=ready.control_address,
                cores=plan.cores,
            )
            for plan, process, ready in zip(
                planned, started, await self._wait_ready(started), strict=True
            )
        )

    async def _start_routers(
        self, instances: Sequence[RunningInstance]
    ) -> tuple[RunningRouter, ...]:
        urls = {role: [each.url for each in instances if each.role is role] for role in Role}
        for number, router in enumerate(self._topology.routers):
            process = self._new_process(f"router-{number}" if number else "router")
            self._routers.append(process)
            arguments = router_arguments(
                self._topology.host,
                router,
                prefill=urls[Role.PREFILL],
                decode=urls[Role.DECODE],
                ready_path=process.ready_path,
            )
            await process.start([*self._config.program, *arguments])
        reports = await self._wait_ready(self._routers)
        return tuple(
            RunningRouter(name=process.name, url=ready.url, pid=process.pid)
            for process, ready in zip(self._routers, reports, strict=True)
        )

    def _new_process(self, name: str) -> ManagedProcess:
        process = ManagedProcess(name, self._run_folder, self._clock)
        self._processes.append(process)
        return process

    async def _wait_ready(self, processes: Sequence[ManagedProcess]) -> list[ReadyReport]:
        """Wait for all at once; the first that fails ends the wait."""
        begun_s = self._clock.monotonic_s()

        async def wait_one(process: ManagedProcess) -> ReadyReport:
            ready = await process.wait_ready(self._config.ready_deadline_s)
            taken_s = self._clock.monotonic_s() - begun_s
            self._on_progress(f"{process.name} ready at {ready.url} after {taken_s:.1f} s")
            return ready

        waits = [asyncio.ensure_future(wait_one(process)) for process in processes]
        try:
            return await asyncio.gather(*waits)
        finally:
            for wait in waits:
                wait.cancel()
