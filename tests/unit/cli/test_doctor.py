"""``kvferry doctor``: what it refuses, what it says of what is not there, its code."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.cli.main import run


@pytest.fixture
def dead_url() -> Iterator[str]:
    """A port that is taken, and that nobody listens on."""
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{unheard.getsockname()[1]}"


def test_what_is_not_there_is_named_and_the_code_is_1(
    dead_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "record.json"
    assert run(["doctor", dead_url, "--no-transfers", "--json", str(path)]) == 1
    shown = capsys.readouterr()
    assert "FAILED" in shown.out
    assert dead_url in shown.out
    assert "no connection" in shown.out
    assert "1 failed" in shown.out.splitlines()[-1]
    assert "asking" in shown.err
    assert json.loads(path.read_text())["result"] == "failed"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "URL"),
        (["127.0.0.1:8000"], "is no URL"),
        (["http://"], "is no URL"),
        (["http://a", "--control", "tcp://b:1"], "URL=tcp://HOST:PORT"),
        (["http://a", "--control", "http://a=b:1"], "URL=tcp://HOST:PORT"),
    ],
)
def test_wrong_usage_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["doctor", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_control_port_of_an_unknown_url_is_refused(
    dead_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [dead_url, "--control", "http://elsewhere:1=tcp://elsewhere:2"]
    assert run(["doctor", *arguments]) == 1
    said = capsys.readouterr().err
    assert "http://elsewhere:1" in said
    assert dead_url in said


def test_a_key_that_cannot_be_read_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["http://127.0.0.1:1", "--cluster-key-file", str(tmp_path / "none")]
    assert run(["doctor", *arguments]) == 1
    assert "cluster key" in capsys.readouterr().err
