"""``kvferry doctor`` finds two real vLLM servers well, or says what it was not told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvferry.cli.main import run
from tests.vllm.serving import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_two_servers_are_well(prefill: VllmServer, decode: VllmServer, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    arguments = [prefill.url, decode.url, "--timeout-s", "20", "--json", str(path)]
    for server in (prefill, decode):
        arguments += ["--control", f"{server.url}=tcp://127.0.0.1:{server.control_port}"]
    assert run(["doctor", *arguments]) == 0
    record = json.loads(path.read_text())
    assert not [item for item in record["findings"] if item["result"] == "failed"]
    assert all(item["http"]["engine"].startswith("vLLM") for item in record["facts"]["instances"])
    pairs = record["facts"]["pairs"]
    assert len(pairs) == 2
    # More where the host is busy.
    assert all(len(pair["long"]) >= 2 and not pair["outcome"] for pair in pairs)


def test_servers_without_their_control_ports_are_said_to_be_unchecked(
    prefill: VllmServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["doctor", prefill.url, "--no-transfers"]) == 0
    assert f"--control {prefill.url}=tcp://HOST:PORT" in capsys.readouterr().out
