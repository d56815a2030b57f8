"""An instance's processes stand still, go on, and end for good, whatever they have started."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvferry.clock import SystemClock
from kvferry.cluster.leftovers import shared_memory_of
from kvferry.cluster.vllm_process import VllmInstance, VllmProcess, free_ports, session_members
from kvferry.errors import ClusterError
from tests.unit.cluster.pretended_vllm import pretend_vllm

_DEADLINE_S = 60.0


def _instance(tmp_path: Path, *arguments: str) -> VllmInstance:
    port, side_channel_port = free_ports(2)
    return VllmInstance(
        python=pretend_vllm(tmp_path / "bin"),
        model="none",
        port=port,
        side_channel_port=side_channel_port,
        core=min(os.sched_getaffinity(0)),
        waits_quietly=False,
        arguments=arguments,
    )


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[VllmProcess]:
    started = VllmProcess("p", _instance(tmp_path), tmp_path, SystemClock())
    try:
        await started.start(os.environ)
        await started.wait_healthy(_DEADLINE_S)
        yield started
    finally:
        await started.stop()


def _states(pids: list[int]) -> set[str]:
    stats = [Path(f"/proc/{pid}/stat").read_text() for pid in pids]
    return {stat.rpartition(")")[2].split()[0] for stat in stats}


async def test_all_of_its_processes_stand_still_and_go_on(process: VllmProcess) -> None:
    members = session_members(process.pid)
    assert len(members) == 3
    process.pause()
    async with asyncio.timeout(_DEADLINE_S):
        while _states(members) != {"T"}:
            await asyncio.sleep(0.01)
    process.resume()
    await process.wait_healthy(_DEADLINE_S)
    assert "T" not in _states(members)


@pytest.mark.parametrize("is_paused", [True, False])
async def test_nothing_of_it_is_left(process: VllmProcess, is_paused: bool) -> None:
    shared = [path for pid in session_members(process.pid) for path in shared_memory_of(pid)]
    semaphore = Path(f"/dev/shm/sem.kvferry-test-{process.pid}")
    assert [path.exists() for path in (*shared, semaphore)] == [True, True]
    if is_paused:
        process.pause()
    await process.stop()
    await process.stop()
    assert session_members(process.pid) == []
    assert [path.exists() for path in (*shared, semaphore)] == [False, False]
    assert not list(Path("/dev/shm").glob(f"kvferry-test-{process.pid}*"))
    assert process.has_ended


async def test_one_that_dies_at_the_start_says_why(tmp_path: Path) -> None:
    process = VllmProcess("p", _instance(tmp_path, "--die"), tmp_path, SystemClock())
    await process.start(os.environ)
    with pytest.raises(ClusterError, match=r"p ended with code 1\n.*nothing works here"):
        await process.wait_healthy(_DEADLINE_S)
    await process.stop()


async def test_one_that_never_started_is_stopped_at_once(tmp_path: Path) -> None:
    await VllmProcess("p", _instance(tmp_path), tmp_path, SystemClock()).stop()
