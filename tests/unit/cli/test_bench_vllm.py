"""``kvferry bench vllm``: what it refuses, and which deployments there are at a time."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from kvferry.bench.client import CompletionClient
from kvferry.bench.vllm import VllmDeployment
from kvferry.cli.bench_vllm import deployments_that_fit, vllm_python
from kvferry.cli.main import run
from kvferry.cli.vllm_stage import VllmSettings, VllmStage
from kvferry.client.engine_kinds import EngineKind
from kvferry.clock import SystemClock
from kvferry.cluster.vllm_process import VllmProcess, session_members
from kvferry.errors import ClusterError
from tests.unit.bench.scripted_vllm import ScriptedPair, serving_pair
from tests.unit.cluster.pretended_vllm import pretend_vllm

_TIMEOUT_S = 30
_A = "http://127.0.0.1:1"
_BOTH = ["--engine", "vllm", "--prefill-url", _A, "--decode-url", _A]


def _settings(tmp_path: Path, *arguments: str) -> VllmSettings:
    core = min(os.sched_getaffinity(0))
    return VllmSettings(
        python=pretend_vllm(tmp_path / "bin"),
        model="none",
        dtype="bfloat16",
        cores=(core, core),
        waits_quietly=False,
        at_once=2,
        arguments=arguments,
    )


async def test_the_deployment_that_was_used_least_lately_makes_room(tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    async with (
        aiohttp.ClientSession() as session,
        VllmStage(
            settings, CompletionClient(session, SystemClock()), tmp_path, os.environ, SystemClock()
        ) as stage,
    ):
        nixl = await stage.use(VllmDeployment.NIXL)
        ferry = await stage.use(VllmDeployment.FERRY)
        assert await stage.use(VllmDeployment.NIXL) is nixl
        processes: list[VllmProcess] = list(stage.processes)
        assert len(processes) == 4
        await stage.use(VllmDeployment.NIXL_PUSH)
        assert len(stage.processes) == 4
        assert await stage.use(VllmDeployment.NIXL) is nixl
        assert await stage.use(VllmDeployment.FERRY) is not ferry
        assert stage.death() is None
        processes += stage.processes
    assert [pid for process in processes for pid in session_members(process.pid)] == []


async def test_a_deployment_that_does_not_start_leaves_nothing(tmp_path: Path) -> None:
    async with aiohttp.ClientSession() as session:
        stage = VllmStage(
            _settings(tmp_path, "--die"),
            CompletionClient(session, SystemClock()),
            tmp_path,
            os.environ,
            SystemClock(),
        )
        with pytest.raises(ClusterError, match="nothing works here"):
            async with stage:
                await stage.use(VllmDeployment.FERRY)
    assert [pid for process in stage.processes for pid in session_members(process.pid)] == []


@pytest.mark.parametrize(("gib", "count"), [(2.0, 1), (7.5, 1), (15.0, 2), (20.0, 3)])
def test_as_many_deployments_as_memory_holds(gib: float, count: int) -> None:
    assert deployments_that_fit(gib) == count


def test_an_environment_is_named_by_its_python_or_its_folder(tmp_path: Path) -> None:
    python = pretend_vllm(tmp_path / "bin")
    assert vllm_python(python) == vllm_python(tmp_path) == python


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--vllm", "."], 2, "there is no vLLM at"),
        (["--arms", "nixl-pull,nixl-shove"], 2, "ferry-push"),
        (["--repeats", "1", "--rounds", "2"], 1, "rounds must be"),
        (["--max-tokens", "2"], 1, "max tokens must be at least 4"),
    ],
)
def test_mistakes_are_refused(
    arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "vllm", *arguments]) == code
    assert words in capsys.readouterr().err


@pytest.fixture
def pair() -> Iterator[ScriptedPair]:
    """Two made-up instances with FerryConnector, served on a thread of their own."""
    served: list[ScriptedPair] = []
    ready, loop, ended = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        async with serving_pair(EngineKind.VLLM) as made:
            served.append(made)
            ready.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert ready.wait(_TIMEOUT_S)
    yield served[0]
    loop.call_soon_threadsafe(ended.set)
    thread.join(_TIMEOUT_S)
    loop.close()


def _urls(pair: ScriptedPair) -> list[str]:
    urls = ["--prefill-url", f"{pair.prefill.url}/", "--decode-url", pair.decode.url]
    return ["--engine", "vllm", *urls]


def test_handoffs_of_running_instances_are_measured_by_their_two_legs(
    pair: ScriptedPair, tmp_path: Path
) -> None:
    path = tmp_path / "record.json"
    few = ["--lengths", "6", "--repeats", "2", "--warmups", "0", "--json", str(path)]
    assert run(["bench", "handoff", *_urls(pair), *few]) == 0
    samples = json.loads(path.read_text())["samples"]
    assert {sample["arm"] for sample in samples} == {"colocated", "pull", "push"}
    assert {s["num_received_tokens"] for s in samples if s["arm"] != "colocated"} == {6}
    for sample in samples:
        own_step_s = 0.0 if sample["arm"] == "colocated" else sample["decode_step_s"]
        parts_s = sample["until_prefill_end_s"] + sample["after_prefill_s"] + own_step_s
        assert parts_s == pytest.approx(sample["ttft_s"])


def test_turns_of_running_instances_are_measured_by_their_two_legs(
    pair: ScriptedPair, tmp_path: Path
) -> None:
    path = tmp_path / "record.json"
    shape = ["--histories", "30", "--new-tokens", "5", "--answer-tokens", "4", "--warmups", "0"]
    few = ["--repeats", "1", "--arms", "recompute,read-back", "--json", str(path)]
    assert run(["bench", "turns", *_urls(pair), *shape, *few]) == 0
    samples = json.loads(path.read_text())["samples"]
    seconds = {s["arm"]: s["num_read_back_tokens"] for s in samples if s["turn"] == 2}
    assert seconds == {"recompute": 0, "read-back": 35}
    assert pair.prefill.num_resets == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["handoff", "--engine", "vllm", "--prefill-url", _A], "one of each"),
        (["handoff", "--prefill-url", _A], "--prefill-url needs --engine vllm"),
        (["handoff", "--decode-url", _A], "--decode-url needs --engine vllm"),
        (["handoff", *_BOTH, "--arms", "push-late"], "has no arm push-late"),
        (["handoff", *_BOTH, "--url", _A, "--plain-url", _A], "--url must not be there"),
        (["turns", *_BOTH, "--url", _A], "or neither"),
        (["turns", "--engine", "vllm-nixl"], "'vllm-nixl'"),
    ],
)
def test_instances_that_cannot_be_asked_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", *arguments]) == 2
    assert words in capsys.readouterr().err
