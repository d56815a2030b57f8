"""Windows alternate over running streams; what arrives is what its arm says or nothing counts."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from kvferry.bench.background import (
    BackgroundArm,
    BackgroundBench,
    BackgroundPlan,
    BackgroundTargets,
    WindowSample,
)
from kvferry.bench.client import CompletionClient
from kvferry.clock import SystemClock
from kvferry.errors import ConfigError, MeasurementError
from tests.unit.bench.conftest import ServeAnswer, with_mode

_LENGTH = 100
_PLAN = BackgroundPlan(
    num_streams=2,
    arrivals_per_s=50,
    length_tokens=_LENGTH,
    window_s=0.1,
    rounds=2,
    num_moving=3,
    num_held=1,
)
_CACHED = {"num_cached_tokens": 96}
_MOVED = {"num_received_tokens": _LENGTH, "num_received_bytes": 8}


def _events(num_tokens: int, report: dict[str, Any]) -> list[dict[str, Any] | bytes]:
    tokens: list[dict[str, Any] | bytes] = [
        {"choices": [{"token_ids": [token]}]} for token in range(num_tokens)
    ]
    return [*tokens, {"choices": [], "kv_report": report}, b"data: [DONE]\n\n"]


@pytest.fixture
async def decode_url() -> AsyncIterator[str]:
    """An instance that streams a token every few milliseconds until it is left."""

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b'data: {"choices":[{"token_ids":[1]}]}\n\n')
            await asyncio.sleep(0.005)

    app = web.Application()
    app.router.add_post("/v1/completions", stream)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


class _Deployment:
    """Knows the prompts that prefill was asked for last, and reports as told."""

    def __init__(self, held: dict[str, Any], moved: dict[str, Any], prefill: dict[str, Any]):
        self.reports = {"held": held, "moved": moved, "prefill": prefill}
        self.warmed: list[tuple[int, ...]] = []
        self.arrived: list[tuple[str | None, tuple[int, ...]]] = []

    def prefill(self, body: dict[str, Any]) -> list[dict[str, Any] | bytes]:
        self.warmed.append(tuple(body["prompt"]))
        return _events(1, self.reports["prefill"])

    def route(self, body: dict[str, Any], mode: str | None) -> list[dict[str, Any] | bytes]:
        prompt = tuple(body["prompt"])
        self.arrived.append((mode, prompt))
        is_held = prompt == self.warmed[_PLAN.num_moving]
        return _events(2, {"mode": mode, **self.reports["held" if is_held else "moved"]})


async def _run(
    serve_answer: ServeAnswer,
    client: CompletionClient,
    decode_url: str,
    deployment: _Deployment,
    plan: BackgroundPlan = _PLAN,
) -> list[WindowSample]:
    targets = BackgroundTargets(
        router_url=await serve_answer(with_mode(deployment.route)),
        prefill_url=await serve_answer(deployment.prefill),
        decode_url=decode_url,
    )
    steps: list[int] = []
    bench = BackgroundBench(client, targets, plan, random.Random(1), SystemClock())
    samples = await bench.run(on_step=lambda: steps.append(1))
    assert len(steps) == bench.num_steps
    return samples


async def test_arms_alternate_over_prompts_that_prefill_has(
    serve_answer: ServeAnswer, client: CompletionClient, decode_url: str
) -> None:
    deployment = _Deployment(_CACHED, _MOVED, _CACHED)
    samples = await _run(serve_answer, client, decode_url, deployment)
    assert Counter(sample.arm for sample in samples) == dict.fromkeys(BackgroundArm, 2)
    assert [sample.round for sample in samples] == [0, 0, 0, 1, 1, 1]
    assert all(sample.num_arrivals == 5 for sample in samples)
    assert {(s.arm, s.num_moved_bytes) for s in samples} == {
        (BackgroundArm.HELD, 0),
        (BackgroundArm.PULL, 40),
        (BackgroundArm.PUSH, 40),
    }
    warmed = deployment.warmed[:4]
    assert deployment.warmed == warmed * 2
    assert {prompt for _, prompt in deployment.arrived} == set(warmed)
    assert {len(prompt) for prompt in warmed} == {_LENGTH + 1}
    moving = [prompt for _, prompt in deployment.arrived if prompt != warmed[3]]
    assert moving == [warmed[turn % 3] for turn in range(len(moving))]
    assert Counter(mode for mode, _ in deployment.arrived)["push"] == 15


async def test_a_window_s_figures_are_of_its_streams(
    serve_answer: ServeAnswer, client: CompletionClient, decode_url: str
) -> None:
    deployment = _Deployment(_CACHED, _MOVED, _CACHED)
    for sample in await _run(serve_answer, client, decode_url, deployment):
        assert len(sample.stream_tpots_s) == 2
        assert min(sample.stream_tpots_s) <= sample.tpot_s <= max(sample.stream_tpots_s)
        assert 0.004 < sample.tpot_s <= sample.longest_gap_s
        assert sample.arrival_e2el_s > 0


@pytest.mark.parametrize(
    ("held", "moved", "prefill", "words"),
    [
        ({"num_cached_tokens": 32}, _MOVED, _CACHED, "held: decode had only 32 of 100"),
        ({**_CACHED, **_MOVED}, _MOVED, _CACHED, "held: decode had only"),
        (_CACHED, {**_MOVED, "num_cached_tokens": 16}, _CACHED, "100 were moved and 16 cached"),
        (_CACHED, {"receive_outcome": "gone"}, _CACHED, "0 were moved and 0 cached: gone"),
        (_CACHED, {**_MOVED, "mode": ""}, _CACHED, "the blocks moved by no mode"),
        (_CACHED, _MOVED, {}, "prefill's cache had only 0"),
    ],
)
async def test_what_is_not_its_arm_s_is_refused(
    serve_answer: ServeAnswer,
    client: CompletionClient,
    decode_url: str,
    held: dict[str, Any],
    moved: dict[str, Any],
    prefill: dict[str, Any],
    words: str,
) -> None:
    deployment = _Deployment(held, moved, prefill)
    with pytest.raises(MeasurementError, match=words):
        await _run(serve_answer, client, decode_url, deployment)


async def test_a_stream_that_ends_too_soon_is_refused(
    serve_answer: ServeAnswer, client: CompletionClient
) -> None:
    short = await serve_answer(lambda body: _events(3, {}))
    with pytest.raises(MeasurementError, match="a background stream ended before its window"):
        await _run(serve_answer, client, short, _Deployment(_CACHED, _MOVED, _CACHED))


async def test_a_deployment_that_cannot_keep_up_is_refused(
    serve_answer: ServeAnswer, client: CompletionClient, decode_url: str
) -> None:
    plan = BackgroundPlan(
        num_streams=1, length_tokens=_LENGTH, arrivals_per_s=1e6, window_s=0.1, max_unanswered=4
    )
    with pytest.raises(MeasurementError, match="cannot keep up"):
        await _run(
            serve_answer, client, decode_url, _Deployment(_CACHED, _MOVED, _CACHED), plan=plan
        )


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_streams": 0},
        {"rounds": 0},
        {"arrivals_per_s": 0.0},
        {"arrivals_per_s": 0.1, "window_s": 1.0},
        {"length_tokens": 64},
    ],
)
def test_plans_that_measure_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        BackgroundPlan(**wrong)
