"""Transports by name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvferry.errors import ConfigError
from kvferry.transport.registry import create_transport, default_transport
from tests.support.transports import available_transports


def test_a_name_gives_that_transport() -> None:
    for name in available_transports():
        transport = create_transport(name)
        assert transport.name == name
        transport.close()


def test_the_default_is_available() -> None:
    assert default_transport() in available_transports()
    assert "shm" in available_transports()


@pytest.mark.parametrize(("wrong", "nearest"), [("nxil", "nixl"), ("SHM", "shm")])
def test_an_unknown_name_is_refused_with_the_nearest(wrong: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"nearest is '{nearest}'"):
        create_transport(wrong)


def test_an_unknown_option_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="nearest is 'ucx_tls'"):
        create_transport("nixl", ucx_tsl="tcp")
    with pytest.raises(ConfigError, match="it has none"):
        create_transport("shm", ucx_tls="tcp")


def test_a_wrong_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="LIBFABRIC"):
        create_transport("nixl", backend="GDS")


def test_importing_it_imports_nothing_heavy() -> None:
    script = (
        "import sys, kvferry.transport.registry as registry\n"
        "assert registry.create_transport\n"
        "heavy = {'numpy', 'torch', 'nixl', 'nixl_cu12'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
