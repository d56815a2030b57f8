"""The supervisor with real processes: readiness, cores, deaths, stopping, a killed parent."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvferry.cluster.supervisor import Deployment, Supervisor, SupervisorConfig
from kvferry.cluster.topology import InstanceGroup, RouterTopology, Topology
from kvferry.errors import ClusterError
from kvferry.protocol.params import Role

_FAKE = (sys.executable, str(Path(__file__).with_name("fake_program.py")))
_BOUND_S = 30.0


def _config(
    *, ready_deadline_s: float = _BOUND_S, stop_grace_s: float = _BOUND_S
) -> SupervisorConfig:
    return SupervisorConfig(
        program=_FAKE, ready_deadline_s=ready_deadline_s, stop_grace_s=stop_grace_s
    )


def _behaving(behaviour: str, **group: int) -> InstanceGroup:
    return InstanceGroup(arguments=("--behave", behaviour), **group)


def _pids(deployment: Deployment) -> list[int]:
    return [deployment.router_pid, *(item.pid for item in deployment.instances)]


def _runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


async def test_all_start_and_all_end(tmp_path: Path) -> None:
    said: list[str] = []
    topology = Topology(prefill=(InstanceGroup(count=2),))
    async with Supervisor(
        topology, tmp_path, config=_config(), on_progress=said.append
    ) as supervisor:
        deployment = await supervisor.start()
        pids = _pids(deployment)
        assert all(map(_runs, pids))
        assert [item.name for item in deployment.instances] == [
            "prefill-0",
            "prefill-1",
            "decode-0",
        ]
        assert len(deployment.urls(Role.PREFILL)) == 2
        assert len(said) == 4
    assert not any(map(_runs, pids))


async def test_further_routers_are_started_watched_and_ended(tmp_path: Path) -> None:
    late = RouterTopology(decode_choice="late", arguments=("--behave", "die-on-usr1"))
    topology = Topology(further_routers=(late,))
    async with Supervisor(topology, tmp_path, config=_config()) as supervisor:
        deployment = await supervisor.start()
        (router,) = deployment.further_routers
        assert router.name == "router-1"
        assert router.url != deployment.router_url
        pids = [router.pid, *_pids(deployment)]
        assert all(map(_runs, pids))
        os.kill(router.pid, signal.SIGUSR1)
        with pytest.raises(ClusterError, match="router-1 ended with code 7"):
            await supervisor.guard(asyncio.sleep(_BOUND_S))
    assert not any(map(_runs, pids))


async def test_each_instance_is_on_its_own_cores(tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core only")
    async with Supervisor(Topology(), tmp_path, config=_config()) as supervisor:
        deployment = await supervisor.start()
        pinned = [os.sched_getaffinity(item.pid) for item in deployment.instances]
        assert pinned == [set(item.cores) for item in deployment.instances]
        assert not pinned[0] & pinned[1]
        assert os.sched_getaffinity(deployment.router_pid) == os.sched_getaffinity(0)


async def test_one_that_dies_at_start_is_named_with_its_log(tmp_path: Path) -> None:
    topology = Topology(decode=(_behaving("die"),))
    async with Supervisor(topology, tmp_path, config=_config()) as supervisor:
        with pytest.raises(ClusterError, match="decode-0 ended with code 1") as caught:
            await supervisor.start()
    assert "decode-0 | cannot serve: the reason" in str(caught.value)


async def test_router_that_dies_at_start_is_named(tmp_path: Path) -> None:
    topology = Topology(router=RouterTopology(arguments=("--behave", "die")))
    async with Supervisor(topology, tmp_path, config=_config()) as supervisor:
        with pytest.raises(ClusterError, match="router ended with code 1"):
            await supervisor.start()


async def test_one_that_is_never_ready_is_given_up(tmp_path: Path) -> None:
    topology = Topology(prefill=(_behaving("never-ready"),))
    async with Supervisor(topology, tmp_path, config=_config(ready_deadline_s=0.5)) as supervisor:
        with pytest.raises(ClusterError, match="was not ready within"):
            await supervisor.start()


async def test_malformed_ready_file_is_refused(tmp_path: Path) -> None:
    topology = Topology(prefill=(_behaving("lie"),))
    async with Supervisor(topology, tmp_path, config=_config()) as supervisor:
        with pytest.raises(ClusterError, match="prefill-0 wrote a malformed ready file"):
            await supervisor.start()


@pytest.mark.parametrize(
    ("sent", "words"),
    [(signal.SIGUSR1, "ended with code 7"), (signal.SIGKILL, "was killed by SIGKILL")],
)
async def test_death_ends_the_work_and_names_the_dead(
    tmp_path: Path, sent: signal.Signals, words: str
) -> None:
    topology = Topology(decode=(_behaving("die-on-usr1"),))
    async with Supervisor(topology, tmp_path, config=_config()) as supervisor:
        deployment = await supervisor.start()
        pids = _pids(deployment)
        os.kill(deployment.instances[1].pid, sent)
        with pytest.raises(ClusterError, match=f"decode-0 {words}"):
            await supervisor.guard(asyncio.sleep(_BOUND_S))
    assert not any(map(_runs, pids))


async def test_work_that_ends_first_gives_its_result(tmp_path: Path) -> None:
    async with Supervisor(Topology(), tmp_path, config=_config()) as supervisor:
        await supervisor.start()
        assert await supervisor.guard(asyncio.sleep(0, "done")) == "done"


async def test_work_that_fails_keeps_its_error(tmp_path: Path) -> None:
    async def fail() -> None:
        raise ClusterError("of its own")

    async with Supervisor(Topology(), tmp_path, config=_config()) as supervisor:
        await supervisor.start()
        with pytest.raises(ClusterError, match="of its own"):
            await supervisor.guard(fail())


async def test_one_that_ignores_the_request_is_killed(tmp_path: Path) -> None:
    topology = Topology(decode=(_behaving("ignore-term"),))
    async with Supervisor(topology, tmp_path, config=_config(stop_grace_s=0.2)) as supervisor:
        pids = _pids(await supervisor.start())
    assert not any(map(_runs, pids))


async def test_stopped_process_is_ended_too(tmp_path: Path) -> None:
    async with Supervisor(Topology(), tmp_path, config=_config()) as supervisor:
        deployment = await supervisor.start()
        os.kill(deployment.instances[0].pid, signal.SIGSTOP)
        begun_s = time.monotonic()
    assert time.monotonic() - begun_s < _BOUND_S
    assert not any(map(_runs, _pids(deployment)))


def test_nothing_outlives_a_killed_parent(tmp_path: Path) -> None:
    script = Path(__file__).with_name("cluster_parent.py")
    with subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pids: list[int] = json.loads(parent.stdout.readline())
        assert len(pids) == 3
        assert all(map(_runs, pids))
        parent.kill()
        parent.wait(_BOUND_S)
    deadline_s = time.monotonic() + _BOUND_S
    while any(map(_runs, pids)) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not any(map(_runs, pids))
