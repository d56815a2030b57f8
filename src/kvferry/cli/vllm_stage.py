"""The deployments of ``kvferry bench vllm``: started when they are used, paused when they are not.

As many stay as there is room for; the one that was used least lately ends first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from kvferry.bench.client import CompletionClient
from kvferry.bench.legs_client import LegsClient, LegsTargets
from kvferry.bench.vllm import VllmDeployment
from kvferry.cli.deployment import say
from kvferry.clock import Clock
from kvferry.cluster.vllm_process import VllmInstance, VllmProcess, free_ports
from kvferry.errors import ClusterError
from kvferry.protocol.params import Role

_START_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """What all instances have in common."""

    python: Path
    model: str
    """Its folder."""
    dtype: str
    cores: tuple[int, int]
    """Of prefill, of decode."""
    waits_quietly: bool
    at_once: int
    """How many deployments there may be at a time."""
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Pair:
    """A deployment that runs."""

    prefill: VllmProcess
    decode: VllmProcess
    client: LegsClient

    @property
    def processes(self) -> tuple[VllmProcess, VllmProcess]:
        return self.prefill, self.decode


class VllmStage:
    """``async with VllmStage(…) as stage: client = await stage.use(…)``; leaves nothing behind."""

    def __init__(
        self,
        settings: VllmSettings,
        client: CompletionClient,
        run_folder: Path,
        environment: Mapping[str, str],
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._client = client
        self._run_folder = run_folder
        self._environment = environment
        self._clock = clock
        self._processes: list[VllmProcess] = []
        self._running: dict[VllmDeployment, _Pair] = {}
        """Least lately used first."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.gather(*(process.stop() for process in self._processes))

    @property
    def processes(self) -> tuple[VllmProcess, ...]:
        """What has been started and not been ended to make room."""
        return tuple(self._processes)

    async def use(self, deployment: VllmDeployment) -> LegsClient:
        """Return a client of ``deployment``, started or resumed; all others stand still.

        Raises ``ClusterError`` if it does not start.
        """
        for other, pair in self._running.items():
            if other is not deployment:
                for process in pair.processes:
                    process.pause()
        chosen = self._running.pop(deployment, None)
        if chosen is None:
            while len(self._running) >= self._settings.at_once:
                await self._stop(next(iter(self._running)))
            chosen = await self._start(deployment)
        self._running[deployment] = chosen
        for process in chosen.processes:
            process.resume()
        return chosen.client

    def death(self) -> ClusterError | None:
        """Return how a process of a running deployment ended, if one has."""
        for pair in self._running.values():
            for process in pair.processes:
                if process.has_ended:
                    return process.death()
        return None

    async def _start(self, deployment: VllmDeployment) -> _Pair:
        begun_s = self._clock.monotonic_s()
        pair = self._new_pair(deployment)
        self._processes += pair.processes
        await asyncio.gather(*(process.start(self._environment) for process in pair.processes))
        await asyncio.gather(*(process.wait_healthy(_START_S) for process in pair.processes))
        say(f"{deployment} serves after {self._clock.monotonic_s() - begun_s:.0f} s")
        return pair

    async def _stop(self, deployment: VllmDeployment) -> None:
        pair = self._running.pop(deployment)
        await asyncio.gather(*(process.stop() for process in pair.processes))
        for process in pair.processes:
            self._processes.remove(process)

    def _new_pair(self, deployment: VllmDeployment) -> _Pair:
        ports = free_ports(4)
        prefill, decode = (
            VllmProcess(
                f"{deployment}-{role}",
                VllmInstance(
                    python=self._settings.python,
                    model=self._settings.model,
                    port=port,
                    side_channel_port=side_channel_port,
                    core=core,
                    dtype=self._settings.dtype,
                    waits_quietly=self._settings.waits_quietly,
                    transfer_config=deployment.transfer_config(),
                    arguments=(*self._settings.arguments, *deployment.arguments(role)),
                ),
                self._run_folder,
                self._clock,
            )
            for role, core, port, side_channel_port in zip(
                Role, self._settings.cores, ports[:2], ports[2:], strict=True
            )
        )
        targets = LegsTargets(
            engine=deployment.engine,
            prefill_url=prefill.instance.url,
            decode_url=decode.instance.url,
        )
        return _Pair(prefill, decode, LegsClient(self._client, targets))
