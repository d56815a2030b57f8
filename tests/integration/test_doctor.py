"""``kvferry doctor`` against real processes: all well, and each thing that may be wrong."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli.main import run
from tests.integration.deployment_setup import Deployment, open_deployment
from tests.support.process_forks import ProcessForks

pytestmark = pytest.mark.slow

OPTIONS = ("--num-blocks", "400")
SHM = (*OPTIONS, "--transport", "shm")
Record = dict[str, Any]
Doctor = Callable[..., tuple[int, Record]]


@pytest.fixture
def doctor(tmp_path: Path) -> Doctor:
    """Runs the command; returns its code and its record."""

    def examine(*arguments: str) -> tuple[int, Record]:
        path = tmp_path / "record.json"
        code = run(["doctor", "--timeout-s", "20", "--json", str(path), *arguments])
        record: Record = json.loads(path.read_text())
        return code, record

    return examine


def _found(record: Record, check: str) -> list[Record]:
    return [item for item in record["findings"] if item["check"] == check]


def _failed(record: Record) -> list[Record]:
    return [item for item in record["findings"] if item["result"] == "failed"]


@pytest.fixture(scope="module")
def deployment(
    forks: ProcessForks, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """A prefill and a decode instance with a router; one beside them of another dtype."""
    with open_deployment(tmp_path_factory.mktemp("doctor"), forks) as deployment:
        prefill = deployment.add_engine("prefill", tiny_model, *SHM)
        decode = deployment.add_engine("decode", tiny_model, *SHM)
        deployment.add_engine("odd", tiny_model, *SHM, "--dtype", "bfloat16")
        deployment.wait_ready()
        deployment.add_router([prefill], [decode])
        yield deployment


def test_a_router_and_its_instances_are_well(deployment: Deployment, doctor: Doctor) -> None:
    code, record = doctor(deployment["router"].url)
    assert (code, _failed(record)) == (0, [])
    assert {item["subject"] for item in _found(record, "handoff")} == {
        "prefill → decode",
        "decode → prefill",
    }
    assert _found(record, "router")
    moved = record["facts"]["pairs"][0]["long"]
    assert len(moved) == 2
    assert all(item["num_bytes"] > 0 and item["is_reported"] for item in moved)


def test_two_instances_are_well_without_a_router(deployment: Deployment, doctor: Doctor) -> None:
    urls = (deployment["prefill"].url, deployment["decode"].url)
    code, record = doctor(*urls, "--max-pairs", "1", "--tokens", "256", "--repeats", "1")
    assert (code, _failed(record)) == (0, [])
    assert [item["result"] for item in _found(record, "handoff")] == ["ok", "warning"]


def test_nothing_is_asked_of_the_engines_without_transfers(
    deployment: Deployment, doctor: Doctor
) -> None:
    code, record = doctor(deployment["router"].url, "--no-transfers")
    assert (code, _found(record, "handoff")) == (0, [])


def test_another_dtype_is_named(deployment: Deployment, doctor: Doctor) -> None:
    urls = [deployment[name].url for name in ("prefill", "decode", "odd")]
    code, record = doctor(*urls, "--tokens", "256", "--repeats", "1")
    assert code == 1
    (failed,) = _failed(record)
    assert (failed["check"], failed["subject"]) == ("layout", "odd")
    assert "kv_dtype is bfloat16, float32 on prefill" in failed["found"]
    assert "--dtype" in failed["remedy"]
    tried = {item["subject"] for item in _found(record, "handoff")}
    assert tried == {"prefill → decode", "decode → prefill"}


def test_a_dead_control_port_is_named(deployment: Deployment, doctor: Doctor) -> None:
    url = deployment["decode"].url
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{unheard.getsockname()[1]}"
        arguments = ("--control", f"{url}={address}", "--no-transfers", "--timeout-s", "5")
        code, record = doctor(url, *arguments)
    assert code == 1
    (failed,) = _failed(record)
    assert (failed["check"], failed["subject"]) == ("control port", "decode")
    assert address in failed["found"]


def test_an_instance_that_stands_still_is_named(deployment: Deployment, doctor: Doctor) -> None:
    decode = deployment["decode"]
    decode.pause()
    try:
        code, record = doctor(deployment["prefill"].url, decode.url, "--timeout-s", "5")
    finally:
        decode.resume()
    assert code == 1
    (failed,) = _failed(record)
    assert (failed["check"], failed["subject"]) == ("http", decode.url)
    assert "no answer within" in failed["found"]


@pytest.fixture(scope="module")
def nixl_pair(
    forks: ProcessForks, wide_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Deployment, Path]]:
    """Two instances with a cluster key, and blocks large enough to tell a bandwidth."""
    folder = tmp_path_factory.mktemp("doctor-nixl")
    key_path = folder / "key"
    key_path.write_text("k" * 64)
    options = ("--num-blocks", "100", "--transport", "nixl", "--cluster-key-file", str(key_path))
    with open_deployment(folder, forks) as deployment:
        for name in ("prefill", "decode"):
            deployment.add_engine(name, wide_model, *options)
        deployment.wait_ready()
        yield deployment, key_path


def _urls(deployment: Deployment) -> list[str]:
    return [program.url for program in deployment.instances]


def test_a_pair_by_nixl_with_a_cluster_key_is_well(
    nixl_pair: tuple[Deployment, Path], doctor: Doctor
) -> None:
    deployment, key_path = nixl_pair
    code, record = doctor(*_urls(deployment), "--cluster-key-file", str(key_path))
    assert (code, _failed(record)) == (0, [])
    handoffs = _found(record, "handoff")
    assert len(handoffs) == 2
    assert all("B/s" in item["found"] for item in handoffs)
    assert _found(record, "ptrace scope")
    assert "k" * 64 not in json.dumps(record)


def test_a_wrong_cluster_key_is_named(
    nixl_pair: tuple[Deployment, Path], doctor: Doctor, tmp_path: Path
) -> None:
    deployment, _ = nixl_pair
    other = tmp_path / "other"
    other.write_text("o" * 64)
    code, record = doctor(*_urls(deployment), "--no-transfers", "--cluster-key-file", str(other))
    assert code == 1
    assert [(item["check"], item["subject"]) for item in _failed(record)] == [
        ("control port", "prefill"),
        ("control port", "decode"),
    ]
    assert all("cluster key" in item["found"] for item in _failed(record))


def test_a_missing_cluster_key_is_named(nixl_pair: tuple[Deployment, Path], doctor: Doctor) -> None:
    deployment, _ = nixl_pair
    code, record = doctor(*_urls(deployment), "--repeats", "1", "--tokens", "128")
    assert code == 1
    assert {item["check"] for item in _failed(record)} == {"control port", "handoff"}
    assert all("cluster key" in item["remedy"] for item in _failed(record))
