"""The border to NIXL: every error mapped, nothing kept alive."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from kvferry.errors import ConfigError, FerryError, LocalProtocolError, RemoteProtocolError
from kvferry.transport.base import address_of
from kvferry.transport.geometry import RegionGeometry
from kvferry.transport.host import this_process
from kvferry.transport.nixl_agent import ERROR_TABLE, NixlAgent, NixlMetadata, Stage, load_nixl
from kvferry.transport.nixl_options import NixlOptions
from kvferry.transport.peer_watch import FarewellPage
from tests.support.transports import available_transports

pytestmark = pytest.mark.skipif("nixl" not in available_transports(), reason="NIXL is missing")


@pytest.fixture
def geometry() -> Iterator[tuple[RegionGeometry, ...]]:
    memory = memoryview(bytearray(65_536))
    yield (RegionGeometry(address_of(memory), 4096, 4096, 16),)
    memory.release()


def metadata_of(agent: NixlAgent, geometry: tuple[RegionGeometry, ...]) -> NixlMetadata:
    farewell = FarewellPage().reference
    return NixlMetadata("UCX", agent.name, agent.metadata, geometry, this_process(), farewell)


def test_every_error_of_nixl_is_mapped() -> None:
    bindings = sys.modules[f"{load_nixl().__name__}._bindings"]
    raised = {
        name
        for name, value in vars(bindings).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert raised == set(ERROR_TABLE)
    for mapped in ERROR_TABLE.values():
        assert len(mapped) == len(Stage)
        assert all(issubclass(error, FerryError) for error in mapped)


def test_wrong_options_are_config_errors(geometry: tuple[RegionGeometry, ...]) -> None:
    for options in (NixlOptions(ucx_tls="bogus"), NixlOptions("LIBFABRIC")):
        words = f"backend {options.backend} does not start .* NIXL_LOG_LEVEL=INFO"
        with pytest.raises(ConfigError, match=words):
            NixlAgent(load_nixl(), options, geometry)


def test_destroying_is_proven_even_where_an_error_is_kept(
    geometry: tuple[RegionGeometry, ...],
) -> None:
    agent = NixlAgent(load_nixl(), NixlOptions(), geometry)
    peer = NixlAgent(load_nixl(), NixlOptions(), geometry)
    kept = []
    with pytest.raises(RemoteProtocolError) as bad_bytes:
        agent.attach(replace(metadata_of(peer, geometry), agent_metadata=b"nonsense"))
    kept.append(bad_bytes.value)
    with pytest.raises(RemoteProtocolError) as bad_name:
        agent.attach(replace(metadata_of(peer, geometry), agent_name="another"))
    kept.append(bad_name.value)
    assert all(error.__context__ is None for error in kept)
    assert agent.destroy()
    assert agent.destroy()
    assert peer.destroy()


def test_a_region_that_the_peer_did_not_register_is_refused(
    geometry: tuple[RegionGeometry, ...],
) -> None:
    agent = NixlAgent(load_nixl(), NixlOptions(), geometry)
    peer = NixlAgent(load_nixl(), NixlOptions(), geometry)
    beyond = (RegionGeometry(geometry[0].start, 4096, 4096, 17),)
    with pytest.raises(RemoteProtocolError):
        agent.attach(metadata_of(peer, beyond))
    assert agent.destroy()
    assert peer.destroy()


def test_nothing_returned_is_an_error(
    geometry: tuple[RegionGeometry, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = NixlAgent(load_nixl(), NixlOptions(), geometry)
    monkeypatch.setattr(agent._nixl, "add_remote_agent", lambda _: None)
    with pytest.raises(LocalProtocolError, match="nothing"):
        agent.attach(metadata_of(agent, geometry))
    monkeypatch.undo()
    assert agent.destroy()


def test_nixl_says_nothing_on_standard_streams() -> None:
    script = (
        "from kvferry.transport.registry import create_transport\n"
        "from kvferry.transport.base import MemoryRegion, address_of\n"
        "from kvferry.errors import FerryError\n"
        "t = create_transport('nixl')\n"
        "v = t.allocate(4096)\n"
        "t.register([MemoryRegion(address_of(v), 4096, 4096, 1)])\n"
        "t.open_link('a')\n"
        "try:\n"
        "    create_transport('nixl', ucx_tls='bogus').register([])\n"
        "except FerryError:\n"
        "    pass\n"
        "t.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
