"""``kvferry bench vllm``: vLLM with its own connectors against vLLM with ours, on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shlex
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import click

from kvferry.bench.vllm import (
    VllmBench,
    VllmPlan,
    VllmSample,
    plan_steps,
    report_vllm,
)
from kvferry.cli.bench import (
    dtype_option,
    open_client,
    seed_option,
    show,
)
from kvferry.cli.deployment import log_folder, run_to_end, say
from kvferry.cli.options import options
from kvferry.cli.record_file import json_option
from kvferry.cli.vllm_stage import VllmSettings, VllmStage
from kvferry.clock import Clock, SystemClock
from kvferry.errors import FerryError, MeasurementError

_GIB_OF_A_DEPLOYMENT = 6.3
"""Two instances with a pool of 1 GiB each."""


@click.command(context_settings={"show_default": True})
@options(VllmPlan, "plan_fields", build=dict)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    help="Starts of each deployment, where memory does not hold all at once.  "
    "[default: 2, or 1 for one repeat]",
)
@click.option(
    "--limit-s",
    type=click.FloatRange(0, min_open=True),
    help="Begin no further request after so many seconds, starts included.",
)
@seed_option
@json_option
@click.option(
    "--vllm",
    "python",
    type=click.Path(exists=True, path_type=Path),
    help="Python of an environment with vLLM and kvferry, or its folder.  [default: .venv-vllm]",
)
@click.option("--model", default="smollm2-135m", help="Bundled model or model folder.")
@dtype_option
@click.option(
    "--chunk-tokens",
    type=click.IntRange(1),
    help="Prefill computes at most this many tokens a step.  [default: vLLM's]",
)
@click.option(
    "--at-once",
    type=click.IntRange(1),
    help="Deployments that exist at a time.  [default: what memory holds]",
)
@click.option(
    "--as-is",
    is_flag=True,
    help="Leave vLLM's and NIXL's busy waits alone: for hosts with many free cores.",
)
@click.option(
    "--vllm-arguments",
    default="",
    show_default=False,
    metavar="TEXT",
    help="Further options of every `vllm serve`, as one text.",
)
def vllm(
    *,
    plan_fields: dict[str, Any],
    rounds: int | None,
    limit_s: float | None,
    seed: int,
    json_path: Path | None,
    python: Path | None,
    model: str,
    dtype: str,
    chunk_tokens: int | None,
    at_once: int | None,
    as_is: bool,
    vllm_arguments: str,
) -> None:
    """Measure vLLM with NixlConnector, NixlPushConnector and FerryConnector on this machine.

    Each deployment is a prefill and a decode instance on a core of their own, asked without a
    router. Arms alternate; deployments that are not asked stand still.
    """
    from kvferry.engine.bundled_model import resolve_model

    plan = VllmPlan(rounds=rounds or min(2, plan_fields["repeats"]), **plan_fields)
    chunks = () if chunk_tokens is None else ("--max-num-batched-tokens", str(chunk_tokens))
    settings = VllmSettings(
        python=vllm_python(python or Path(".venv-vllm")),
        model=str(resolve_model(model)),
        dtype=dtype,
        cores=_two_cores(),
        waits_quietly=not as_is,
        at_once=at_once or deployments_that_fit(_available_gib()),
        arguments=(*chunks, *shlex.split(vllm_arguments)),
    )
    samples = _measure(settings, plan, random.Random(seed), limit_s)
    if not samples:
        raise MeasurementError("nothing was measured within --limit-s")
    about = {"seed": seed, "limit_s": limit_s, "model": model, "dtype": dtype}
    about |= {"at_once": settings.at_once, "waits_quietly": settings.waits_quietly}
    arguments = dataclasses.asdict(plan) | about | {"vllm_arguments": settings.arguments}
    show(report_vllm(samples, random.Random(seed)), arguments, json_path)


def _measure(
    settings: VllmSettings, plan: VllmPlan, rng: random.Random, limit_s: float | None
) -> list[VllmSample]:
    all_at_once = len(plan.deployments) <= settings.at_once
    steps = plan_steps(plan, rng, all_at_once=all_at_once)
    clock = SystemClock()
    end_s = None if limit_s is None else clock.monotonic_s() + limit_s

    def is_over() -> bool:
        return end_s is not None and clock.monotonic_s() >= end_s

    async def measure() -> list[VllmSample]:
        async with _stage(settings, clock) as stage:
            say(f"{len(steps)} requests and conversations, at most")
            with click.progressbar(length=len(steps), label="vLLM", file=sys.stderr) as progress:
                return await VllmBench(stage, plan, rng).run(
                    steps, is_over=is_over, on_step=lambda step: progress.update(1)
                )

    return run_to_end(measure())


@contextlib.asynccontextmanager
async def _stage(settings: VllmSettings, clock: Clock) -> AsyncIterator[VllmStage]:
    """Yield a stage; what goes wrong because a process has died is raised as the error of that."""
    # A server that has stood still may close a kept connection just when it is asked.
    with log_folder("kvferry-vllm-", keeps_on=FerryError) as run_folder:
        async with (
            open_client(keeps_connections=False) as client,
            VllmStage(settings, client, run_folder, os.environ, clock) as stage,
        ):
            say(f"logs in {run_folder}")
            try:
                yield stage
            except FerryError as error:
                raise stage.death() or error from error
            say("stopping")


def vllm_python(path: Path) -> Path:
    """Return the Python at ``path`` or in the environment there. Refuses one without vLLM."""
    python = path / "bin" / "python" if path.is_dir() else path
    # Not resolved: a virtual environment's Python is a link to another one.
    if not (python.is_file() and (python.parent / "vllm").is_file()):
        raise click.UsageError(
            f"there is no vLLM at {path}: name the Python of an environment that has it by --vllm "
            "(scripts/set_up_vllm.sh makes one for CPUs)"
        )
    return python.absolute()


def deployments_that_fit(available_gib: float) -> int:
    """Return how many deployments that much memory holds; at least one is tried."""
    return max(1, int(available_gib / _GIB_OF_A_DEPLOYMENT))


def _available_gib() -> float:
    with open("/proc/meminfo", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["MemAvailable"].split()[0]) / 2**20


def _two_cores() -> tuple[int, int]:
    cores = sorted(os.sched_getaffinity(0))
    return cores[0], cores[1 % len(cores)]
