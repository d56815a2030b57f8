"""Options as UCX's settings, and which READs need the holder's help."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvferry.transport import nixl_options
from kvferry.transport.base import address_of
from kvferry.transport.geometry import RegionGeometry
from kvferry.transport.host import ProcessIdentity, this_process
from kvferry.transport.nixl_options import (
    NixlOptions,
    engine_options,
    may_write_directly,
    reads_natively,
)

MEMORY = memoryview(bytearray(64))
REGION = RegionGeometry(address_of(MEMORY), 64, 64, 1)


def test_ucx_listens_on_loopback_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    assert engine_options(NixlOptions()) == {"engine_config": "TLS=^sysv,NET_DEVICES=lo"}
    assert engine_options(NixlOptions(ucx_net_devices=None)) == {"engine_config": "TLS=^sysv"}
    options = NixlOptions(ucx_tls="tcp", ucx_net_devices="eth0")
    assert engine_options(options) == {"engine_config": "TLS=tcp,NET_DEVICES=eth0"}
    assert engine_options(NixlOptions("LIBFABRIC")) == {}


def test_an_operators_own_choice_of_transports_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "all")
    assert engine_options(NixlOptions()) == {"engine_config": "NET_DEVICES=lo"}


def test_a_list_goes_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "all")
    options = engine_options(NixlOptions(ucx_tls="tcp,cma"))
    assert options == {"engine_config": "NET_DEVICES=lo"}
    assert os.environ["UCX_TLS"] == "tcp,cma"


@pytest.mark.parametrize(
    ("tls", "expected"),
    [(None, True), ("all", True), ("sm,tcp", True), ("tcp", False), ("tcp,self", False)],
)
def test_a_process_beside_us_is_read_directly_where_ucx_may(
    tls: str | None, expected: bool
) -> None:
    assert reads_natively(NixlOptions(ucx_tls=tls), this_process(), REGION) is expected


def test_a_process_whose_memory_is_closed_to_us_is_not_read_directly() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    gone = msgspec.structs.replace(this_process(), pid=process.pid)
    assert not reads_natively(NixlOptions(), gone, REGION)


@pytest.mark.parametrize(
    ("beside", "options", "has_rdma", "expected"),
    [
        (None, NixlOptions(ucx_net_devices=None), False, False),
        (None, NixlOptions(ucx_net_devices=None), True, True),
        (None, NixlOptions(), True, False),
        (None, NixlOptions(ucx_tls="tcp", ucx_net_devices=None), True, False),
        (None, NixlOptions("LIBFABRIC"), False, True),
    ],
)
def test_between_hosts_only_rdma_reads(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    beside: ProcessIdentity | None,
    options: NixlOptions,
    has_rdma: bool,
    expected: bool,
) -> None:
    if has_rdma:
        (tmp_path / "mlx5_0").touch()
    monkeypatch.setattr(nixl_options, "_RDMA_DEVICES", tmp_path)
    assert reads_natively(options, beside, REGION) is expected


@pytest.mark.parametrize(
    ("tls", "expected"), [(None, True), ("tcp", False), ("tcp,self", False), ("tcp,sm", True)]
)
def test_over_tcp_alone_nobody_writes_past_our_end(tls: str | None, *, expected: bool) -> None:
    assert may_write_directly(NixlOptions(ucx_tls=tls)) is expected
