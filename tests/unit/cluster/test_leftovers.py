"""What is still there after a deployment is named; what is gone is not."""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.cluster.leftovers import Footprint, footprint_of, remaining
from kvferry.cluster.supervisor import Deployment, RunningInstance, RunningRouter
from kvferry.protocol.params import Role


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def _deployment(port: int) -> Deployment:
    instance = RunningInstance(
        name="prefill-0",
        role=Role.PREFILL,
        url=f"http://127.0.0.1:{port}",
        pid=os.getpid(),
        control_address=f"tcp://127.0.0.1:{port}",
        cores=(),
    )
    return Deployment(
        router_url=f"http://127.0.0.1:{port}", router_pid=os.getpid(), instances=(instance,)
    )


def test_everything_of_a_running_deployment_is_seen(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    name = Path("/dev/shm") / f"kvferry-test-{secrets.token_hex(8)}"
    with name.open("w+b") as file:
        try:
            file.truncate(4096)
            with mmap.mmap(file.fileno(), 4096):
                footprint = footprint_of(_deployment(port))
            left = remaining(footprint)
            assert f"process {os.getpid()}" in left
            assert f"port {port} on 127.0.0.1" in left
            assert f"shared memory {name}" in left
        finally:
            name.unlink()
    assert f"shared memory {name}" not in remaining(footprint)


def test_nothing_is_left_of_what_has_ended(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    listener.close()
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait(30)
        ended = Footprint(
            pids=frozenset({child.pid}),
            addresses=frozenset({("127.0.0.1", port)}),
            shared_memory=frozenset({Path("/dev/shm/kvferry-never-there")}),
        )
        assert remaining(ended) == []


def test_instances_without_a_control_address_are_fine() -> None:
    deployment = Deployment(router_url="http://127.0.0.1:9", router_pid=1, instances=())
    assert footprint_of(deployment).addresses == {("127.0.0.1", 9)}


def test_further_routers_are_seen_too(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    router = RunningRouter(name="router-1", url=f"http://127.0.0.1:{port}", pid=os.getpid())
    deployment = Deployment(
        router_url="http://127.0.0.1:9", router_pid=1, instances=(), further_routers=(router,)
    )
    footprint = footprint_of(deployment)
    assert os.getpid() in footprint.pids
    assert ("127.0.0.1", port) in footprint.addresses
