"""``kvferry bench turns``: what it refuses, what it measures, what it prints, writes and starts."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.bench.turns import TurnArm
from kvferry.cli.bench_turns import resettable, targets_of
from kvferry.cli.main import run
from kvferry.cluster.supervisor import Deployment, RunningInstance
from kvferry.cluster.topology import InstanceGroup, Topology
from kvferry.protocol.params import Role
from tests.unit.bench.turns_deployment import ScriptedDeployment, serving

_A = "http://127.0.0.1:1"
_TIMEOUT_S = 30


@pytest.fixture
def deployment() -> Iterator[ScriptedDeployment]:
    """A made-up deployment that is served on a thread of its own."""
    scripted, ready, loop = ScriptedDeployment(), threading.Event(), asyncio.new_event_loop()
    ended = asyncio.Event()

    async def serve() -> None:
        async with serving(scripted):
            ready.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert ready.wait(_TIMEOUT_S)
    yield scripted
    loop.call_soon_threadsafe(ended.set)
    thread.join(_TIMEOUT_S)
    loop.close()


def _targets(deployment: ScriptedDeployment) -> list[str]:
    return ["--url", f"{deployment.url}/", "--prefill-url", f"{deployment.url}/"]


def test_a_growing_conversation_of_a_running_deployment(
    deployment: ScriptedDeployment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record_path, picture_path = tmp_path / "record.json", tmp_path / "turns.png"
    shape = ["--turns", "3", "--first-length", "90", "--turn-tokens", "70", "--answer-tokens", "3"]
    few = ["--repeats", "2", "--warmups", "1", "--json", str(record_path)]
    arguments = [*_targets(deployment), *shape, *few, "--picture", str(picture_path)]
    assert run(["bench", "turns", *arguments]) == 0
    record = json.loads(record_path.read_text())
    assert len(record["samples"]) == 4 * 2 * 3
    assert {sample["num_history_tokens"] for sample in record["samples"]} == {0, 93, 166}
    assert record["arguments"]["arms"] == list(TurnArm)
    assert [check["num_same"] for check in record["answers"]] == [2 * 3] * 5
    shown = capsys.readouterr()
    assert "recompute / arm" in shown.out
    assert "beside those of" in shown.out
    assert f"wrote {picture_path}" in shown.err
    assert picture_path.stat().st_size > 0


def test_histories_have_just_the_length_that_is_asked_for(
    deployment: ScriptedDeployment, tmp_path: Path
) -> None:
    path = tmp_path / "record.json"
    shape = ["--histories", "100,200", "--new-tokens", "80", "--arms", "warm,read-back"]
    few = ["--repeats", "1", "--warmups", "0", "--json", str(path)]
    assert run(["bench", "turns", *_targets(deployment), *shape, *few]) == 0
    record = json.loads(path.read_text())
    later = [sample for sample in record["samples"] if sample["turn"] == 2]
    assert {(s["num_history_tokens"], s["num_new_tokens"]) for s in later} == {(100, 80), (200, 80)}
    assert [s["num_history_tokens"] for s in record["summaries"]] == [100, 100, 200, 200]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--url", _A], 2, "give both --url and --prefill-url"),
        (["--prefill-url", _A], 2, "give both --url and --prefill-url"),
        (["--arms", "warm,cold"], 2, "read-back+push"),
        (["--histories", "500", "--turns", "3"], 2, "--turns does not go with --histories"),
        (["--histories", "500", "--turn-tokens", "3"], 2, "--turn-tokens does not go"),
        (["--new-tokens", "50"], 2, "--new-tokens needs --histories"),
        (["--histories", "16"], 1, "no room for an answer of 16"),
        (["--histories", "500,500"], 1, "each of them once"),
        (["--turns", "1"], 2, "--turns"),
        (["--repeats", "0"], 1, "repeats must be at least 1"),
    ],
)
def test_mistakes_are_refused(
    arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "turns", *arguments]) == code
    assert words in capsys.readouterr().err


def test_a_picture_without_matplotlib_is_refused_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run(["bench", "turns", "--picture", "turns.png"]) == 1
    assert "kvferry[plot]" in capsys.readouterr().err


def test_what_is_started_may_be_reset_and_is_measured_at_its_urls() -> None:
    topology = resettable(Topology(prefill=(InstanceGroup(arguments=("--x",)),)))
    assert topology.prefill[0].arguments == ("--x", "--enable-dev-endpoints")
    assert topology.decode[0].arguments == ("--enable-dev-endpoints",)
    instances = tuple(
        RunningInstance(name="", role=role, url=url, pid=1, control_address="", cores=())
        for role, url in ((Role.PREFILL, "a"), (Role.DECODE, "b"), (Role.PREFILL, "c"))
    )
    targets = targets_of(Deployment(router_url="r", router_pid=1, instances=instances))
    assert (targets.router_url, targets.prefill_urls) == ("r", ("a", "c"))
