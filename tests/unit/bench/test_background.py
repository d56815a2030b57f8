"""Windows alternate over running streams; what arrives is what its arm says or nothing counts."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
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
from kvferry.errors import ConfigError, MeasurementError
from tests.support.fake_clock import FakeClock
from tests.unit.bench.conftest import ServeAnswer, with_mode

_LENGTH = 100
_TOKEN_S = 0.005
_PLAN = BackgroundPlan(
    num_streams=2,
    arrivals_per_s=50,
    length_tokens=_LENGTH,
    window_s=0.1,
    rounds=2,
    num_moving=3,
    num_held=1,
)
RunBench = Callable[..., Awaitable[list[WindowSample]]]

_CACHED = {"num_cached_tokens": 96}
_MOVED = {"num_received_tokens": _LENGTH, "num_received_bytes": 8}


def _events(num_tokens: int, report: dict[str, Any]) -> list[dict[str, Any] | bytes]:
    tokens: list[dict[str, Any] | bytes] = [
        {"choices": [{"token_ids": [token]}]} for token in range(num_tokens)
    ]
    return [*tokens, {"choices": [], "kv_report": report}, b"data: [DONE]\n\n"]


@pytest.fixture
def clock() -> FakeClock:
    """Time that passes only with what the servers do, so that a slow machine changes nothing."""
    return FakeClock()


@pytest.fixture
async def client(clock: FakeClock) -> AsyncIterator[CompletionClient]:
    async with aiohttp.ClientSession() as session:
        yield CompletionClient(session, clock)


@pytest.fixture
async def decode_url(clock: FakeClock) -> AsyncIterator[str]:
    """An instance that streams tokens until it is left; time passes with each of them."""

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b'data: {"choices":[{"token_ids":[1]}]}\n\n')
            clock.advance(_TOKEN_S / _PLAN.num_streams)
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

    def __init__(self, clock: FakeClock, answer_s: float = 0.001, **reports: dict[str, Any]):
        self.reports = {"held": _CACHED, "moved": _MOVED, "prefill": _CACHED} | reports
        self.warmed: list[tuple[int, ...]] = []
        self.arrived: list[tuple[str | None, tuple[int, ...]]] = []
        self._clock = clock
        self._answer_s = answer_s

    def prefill(self, body: dict[str, Any]) -> list[dict[str, Any] | bytes]:
        self.warmed.append(tuple(body["prompt"]))
        return _events(1, self.reports["prefill"])

    def route(self, body: dict[str, Any], mode: str | None) -> list[dict[str, Any] | bytes]:
        prompt = tuple(body["prompt"])
        self.arrived.append((mode, prompt))
        self._clock.advance(self._answer_s)
        is_held = prompt == self.warmed[_PLAN.num_moving]
        return _events(2, {"mode": mode, **self.reports["held" if is_held else "moved"]})


@pytest.fixture
def run_bench(serve_answer: ServeAnswer, client: CompletionClient, clock: FakeClock) -> RunBench:
    """Run a bench to its end, and count its steps."""

    async def run(
        decode_url: str, deployment: _Deployment, plan: BackgroundPlan = _PLAN
    ) -> list[WindowSample]:
        targets = BackgroundTargets(
            router_url=await serve_answer(with_mode(deployment.route)),
            prefill_url=await serve_answer(deployment.prefill),
            decode_url=decode_url,
        )
        steps: list[int] = []
        bench = BackgroundBench(client, targets, plan, random.Random(1), clock)
        samples = await bench.run(on_step=lambda: steps.append(1))
        assert len(steps) == plan.num_steps
        return samples

    return run


async def test_arms_alternate_over_prompts_that_prefill_has(
    run_bench: RunBench, decode_url: str, clock: FakeClock
) -> None:
    deployment = _Deployment(clock)
    samples = await run_bench(decode_url, deployment)
    assert Counter(sample.arm for sample in samples) == dict.fromkeys(BackgroundArm, 2)
    assert [sample.repeat for sample in samples] == [0, 0, 0, 1, 1, 1]
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
    run_bench: RunBench, decode_url: str, clock: FakeClock
) -> None:
    for sample in await run_bench(decode_url, _Deployment(clock)):
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
    run_bench: RunBench,
    decode_url: str,
    clock: FakeClock,
    held: dict[str, Any],
    moved: dict[str, Any],
    prefill: dict[str, Any],
    words: str,
) -> None:
    deployment = _Deployment(clock, held=held, moved=moved, prefill=prefill)
    with pytest.raises(MeasurementError, match=words):
        await run_bench(decode_url, deployment)


async def test_a_stream_that_ends_too_soon_is_refused(
    run_bench: RunBench, serve_answer: ServeAnswer, clock: FakeClock
) -> None:
    short = await serve_answer(lambda body: _events(3, {}))
    with pytest.raises(MeasurementError, match="a background stream ended before its window"):
        await run_bench(short, _Deployment(clock, answer_s=_PLAN.window_s))


async def test_a_deployment_that_cannot_keep_up_is_refused(
    run_bench: RunBench, decode_url: str, clock: FakeClock
) -> None:
    plan = BackgroundPlan(
        num_streams=1, length_tokens=_LENGTH, arrivals_per_s=1e6, window_s=0.1, max_unanswered=4
    )
    with pytest.raises(MeasurementError, match="cannot keep up"):
        await run_bench(decode_url, _Deployment(clock), plan)


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
