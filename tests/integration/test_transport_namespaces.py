"""A peer in another container, with neither the pid nor the network namespace in common."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

import pytest

from tests.integration.pid_namespace import IN_PID_NAMESPACE
from tests.support.peer_process import PeerProcess, PeerSetup, Pool
from tests.support.transports import available_transports

pytestmark = pytest.mark.slow


@pytest.fixture
def other_network() -> Iterator[str]:
    """A network namespace that is reached over a cable, as another container's is."""
    name, here, there = (f"kvf{os.getpid()}{end}" for end in ("", "a", "b"))
    commands = [
        f"ip netns add {name}",
        f"ip link add {here} type veth peer name {there} netns {name}",
        f"ip address add 198.18.77.1/30 dev {here}",
        f"ip link set {here} up",
        f"ip -n {name} address add 198.18.77.2/30 dev {there}",
        f"ip -n {name} link set {there} up",
        f"ip -n {name} link set lo up",
    ]
    with contextlib.ExitStack() as ends:
        ends.callback(subprocess.run, ["ip", "netns", "delete", name], check=False)
        for command in commands:
            subprocess.run(command.split(), check=True)
        yield name


@pytest.mark.skipif("nixl" not in available_transports(), reason="NIXL is missing")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes network namespaces")
def test_dead_sender_of_which_nothing_can_be_proven_is_never_quiet(other_network: str) -> None:
    """Neither its pid can be seen from here, nor its sockets."""
    setup = PeerSetup("nixl", {"ucx_net_devices": None}, 8, 4096)
    launcher = ("ip", "netns", "exec", other_network, *IN_PID_NAMESPACE)
    pool, sender = Pool(setup), PeerProcess(setup, launcher)
    try:
        link = pool.transport.open_link("sender")
        link.connect(sender.metadata)
        assert pool.transport.num_blind_links() == 1
        link.disconnect()
        sender.kill()
        assert not link.is_quiet()
        assert pool.transport.num_blind_links() == 1
    finally:
        sender.kill()
        pool.transport.close()
