"""``kvferry bench vllm``: vLLM with its own connectors against vLLM with ours, on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import aiohttp
import click

from kvferry.bench.client import CompletionClient
from kvferry.bench.vllm_bench import VllmBench, VllmSample
from kvferry.bench.vllm_plan import VllmPlan, VllmStep, plan_steps
from kvferry.bench.vllm_report import vllm_record, vllm_table
from kvferry.cli.deployment import run_to_end, say
from kvferry.cli.record_file import json_option, write_record
from kvferry.cli.vllm_options import vllm_plan_options, vllm_settings_options
from kvferry.cli.vllm_stage import VllmSettings, VllmStage
from kvferry.clock import Clock, SystemClock
from kvferry.errors import FerryError, MeasurementError

_TIMEOUT = aiohttp.ClientTimeout(total=300)


@click.command()
@vllm_plan_options
@click.option(
    "--limit-s",
    type=click.FloatRange(0, min_open=True),
    help="Begin no further request after so many seconds, starts included.",
)
@click.option("--seed", default=1, show_default=True, help="Seed of the random prompts.")
@json_option
@vllm_settings_options
def vllm(
    *,
    settings: VllmSettings,
    plan: VllmPlan,
    limit_s: float | None,
    seed: int,
    json_path: Path | None,
) -> None:
    """Measure vLLM with NixlConnector, NixlPushConnector and FerryConnector on this machine.

    Each deployment is a prefill and a decode instance on a core of their own, asked without a
    router. Arms alternate; deployments that are not asked stand still.
    """
    rng = random.Random(seed)
    all_at_once = len(plan.deployments) <= settings.at_once
    steps = plan_steps(plan, rng, all_at_once=all_at_once)
    clock = SystemClock()
    end_s = None if limit_s is None else clock.monotonic_s() + limit_s

    async def measure() -> list[VllmSample]:
        async with _stage(settings, clock) as stage:
            say(f"{len(steps)} requests and conversations, at most")
            with _as_death(stage):
                return await _run_steps(
                    VllmBench(stage, plan, rng),
                    steps,
                    lambda: end_s is not None and clock.monotonic_s() >= end_s,
                )

    samples = run_to_end(measure())
    if not samples:
        raise MeasurementError("nothing was measured within --limit-s")
    click.echo(vllm_table(samples, random.Random(seed)))
    arguments: dict[str, object] = {
        **dataclasses.asdict(plan),
        "seed": seed,
        "limit_s": limit_s,
        "model": settings.model_name,
        "dtype": settings.dtype,
        "at_once": settings.at_once,
        "waits_quietly": settings.waits_quietly,
        "vllm_arguments": settings.arguments,
    }
    write_record(json_path, vllm_record(samples, arguments, random.Random(seed)))


@contextlib.asynccontextmanager
async def _stage(settings: VllmSettings, clock: Clock) -> AsyncIterator[VllmStage]:
    """Yield a stage with a folder for its logs, which are kept where something goes wrong."""
    run_folder = Path(tempfile.mkdtemp(prefix="kvferry-vllm-"))
    # A server that has stood still may close a kept connection just when it is asked.
    connector = aiohttp.TCPConnector(force_close=True)
    try:
        async with (
            aiohttp.ClientSession(timeout=_TIMEOUT, connector=connector) as session,
            VllmStage(
                settings, CompletionClient(session, clock), run_folder, os.environ, clock
            ) as stage,
        ):
            say(f"logs in {run_folder}")
            yield stage
            say("stopping")
    except FerryError:
        say(f"logs are kept in {run_folder}")
        raise
    except BaseException:
        shutil.rmtree(run_folder, ignore_errors=True)
        raise
    shutil.rmtree(run_folder, ignore_errors=True)


async def _run_steps(
    bench: VllmBench, steps: Sequence[VllmStep], is_over: Callable[[], bool]
) -> list[VllmSample]:
    with click.progressbar(length=len(steps), label="vLLM", file=sys.stderr) as progress:
        return await bench.run(steps, is_over=is_over, on_step=lambda step: progress.update(1))


@contextlib.contextmanager
def _as_death(stage: VllmStage) -> Iterator[None]:
    """Turn what goes wrong because a process has died into the error that says so."""
    try:
        yield
    except FerryError as error:
        raise stage.death() or error from error
