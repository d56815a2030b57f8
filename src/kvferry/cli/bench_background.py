"""The background form of ``kvferry bench handoff``: a deployment sized for it, and its windows."""

from __future__ import annotations

import dataclasses
import math
import random
import sys
from dataclasses import replace
from pathlib import Path

import aiohttp
import click

from kvferry.bench.background import (
    BackgroundBench,
    BackgroundPlan,
    BackgroundTargets,
    WindowSample,
)
from kvferry.bench.background_report import background_record, background_table
from kvferry.bench.client import CompletionClient
from kvferry.cli.deployment import run_to_end, with_deployment
from kvferry.cli.record_file import write_record
from kvferry.clock import SystemClock
from kvferry.cluster.supervisor import Deployment
from kvferry.cluster.topology import Topology
from kvferry.protocol.params import Role

_TIMEOUT = aiohttp.ClientTimeout(total=300)
_BLOCK_TOKENS = 16
_ROOM_PROMPTS = 6
"""Arriving prompts that fit beside the streams on decode, and beside all prompts on prefill."""
_SPARE_TURNS = 3


def sized_for_background(
    topology: Topology, plan: BackgroundPlan
) -> tuple[Topology, BackgroundPlan]:
    """Return one prefill instance that keeps every prompt and one decode that cannot.

    So many prompts take turns in the returned plan that decode has lost each when it comes again.
    """
    prompt_blocks = plan.length_tokens // _BLOCK_TOKENS + 2
    stream_blocks = plan.stream_tokens // _BLOCK_TOKENS + 1
    decode_blocks = _ROOM_PROMPTS * prompt_blocks + plan.num_streams * stream_blocks
    plan = replace(plan, num_moving=math.ceil(decode_blocks / prompt_blocks) + _SPARE_TURNS)
    prefill_blocks = (plan.num_moving + plan.num_held + _ROOM_PROMPTS) * prompt_blocks
    topology = topology.with_counts(prefill=1, decode=1)
    prefill, decode = (
        (replace(groups[0], num_blocks=num_blocks, kv_cache_gib=None),)
        for groups, num_blocks in (
            (topology.prefill, prefill_blocks),
            (topology.decode, decode_blocks),
        )
    )
    return replace(topology, prefill=prefill, decode=decode), plan


def run_background(
    topology: Topology, plan: BackgroundPlan, *, seed: int, verbose: bool, json_path: Path | None
) -> None:
    """Measure, show the table, write the record."""
    sized, plan = sized_for_background(topology, plan)

    async def measure(deployment: Deployment) -> list[WindowSample]:
        return await _measure(deployment, plan, seed)

    samples = run_to_end(with_deployment(sized, measure, verbose=verbose))
    click.echo(background_table(samples, random.Random(seed)))
    arguments: dict[str, object] = {
        **dataclasses.asdict(plan),
        "seed": seed,
        "topology": dataclasses.asdict(sized),
    }
    write_record(json_path, background_record(samples, arguments, random.Random(seed)))


async def _measure(deployment: Deployment, plan: BackgroundPlan, seed: int) -> list[WindowSample]:
    targets = BackgroundTargets(
        router_url=deployment.router_url,
        prefill_url=deployment.urls(Role.PREFILL)[0],
        decode_url=deployment.urls(Role.DECODE)[0],
    )
    clock = SystemClock()
    async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
        client = CompletionClient(session, clock)
        bench = BackgroundBench(client, targets, plan, random.Random(seed), clock)
        with click.progressbar(
            length=bench.num_steps, label="windows", file=sys.stderr
        ) as progress:
            return await bench.run(on_step=lambda: progress.update(1))
