"""``kvferry bench vllm``: vLLM with its own connectors against vLLM with ours, on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
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
from kvferry.clock import SystemClock
from kvferry.errors import FerryError

_TIMEOUT = aiohttp.ClientTimeout(total=300)


@click.command()
@vllm_plan_options
@click.option("--seed", default=1, show_default=True, help="Seed of the random prompts.")
@json_option
@vllm_settings_options
def vllm(*, settings: VllmSettings, plan: VllmPlan, seed: int, json_path: Path | None) -> None:
    """Measure vLLM with NixlConnector, NixlPushConnector and FerryConnector on this machine.

    Each deployment is a prefill and a decode instance on a core of their own, asked without a
    router. Arms alternate; deployments that are not asked stand still.
    """
    rng = random.Random(seed)
    all_at_once = len(plan.deployments) <= settings.at_once
    steps = plan_steps(plan, rng, all_at_once=all_at_once)
    samples = run_to_end(_measure(settings, plan, steps, rng))
    click.echo(vllm_table(samples, random.Random(seed)))
    arguments: dict[str, object] = {
        **dataclasses.asdict(plan),
        "seed": seed,
        "model": settings.model_name,
        "dtype": settings.dtype,
        "at_once": settings.at_once,
        "waits_quietly": settings.waits_quietly,
        "vllm_arguments": settings.arguments,
    }
    write_record(json_path, vllm_record(samples, arguments, random.Random(seed)))


async def _measure(
    settings: VllmSettings, plan: VllmPlan, steps: Sequence[VllmStep], rng: random.Random
) -> list[VllmSample]:
    run_folder = Path(tempfile.mkdtemp(prefix="kvferry-vllm-"))
    clock = SystemClock()
    # A server that has stood still may close a kept connection just when it is asked.
    connector = aiohttp.TCPConnector(force_close=True)
    try:
        async with (
            aiohttp.ClientSession(timeout=_TIMEOUT, connector=connector) as session,
            VllmStage(
                settings, CompletionClient(session, clock), run_folder, os.environ, clock
            ) as stage,
        ):
            say(f"{len(steps)} steps; logs in {run_folder}")
            with _as_death(stage):
                samples = await _run_steps(VllmBench(stage, plan, rng), steps)
            say("stopping")
    except FerryError:
        say(f"logs are kept in {run_folder}")
        raise
    except BaseException:
        shutil.rmtree(run_folder, ignore_errors=True)
        raise
    shutil.rmtree(run_folder, ignore_errors=True)
    return samples


async def _run_steps(bench: VllmBench, steps: Sequence[VllmStep]) -> list[VllmSample]:
    with click.progressbar(length=len(steps), label="vLLM", file=sys.stderr) as progress:
        return await bench.run(steps, on_step=lambda step: progress.update(1))


@contextlib.contextmanager
def _as_death(stage: VllmStage) -> Iterator[None]:
    """Turn what goes wrong because a process has died into the error that says so."""
    try:
        yield
    except FerryError as error:
        raise stage.death() or error from error
