"""The background form of ``kvferry bench handoff``: a deployment sized for it, and its windows."""

from __future__ import annotations

import dataclasses
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
"""Arriving prompts that fit beside what must fit; fewer than take turns, so that decode misses."""


def sized_for_background(topology: Topology, plan: BackgroundPlan) -> Topology:
    """Return one prefill instance that can keep every prompt, and one decode that cannot."""
    topology = topology.with_counts(prefill=1, decode=1)
    prompt_blocks = plan.length_tokens // _BLOCK_TOKENS + 2
    stream_blocks = plan.stream_tokens // _BLOCK_TOKENS + 1
    num_prompts = plan.num_moving + plan.num_held
    pools = {
        Role.PREFILL: (num_prompts + _ROOM_PROMPTS) * prompt_blocks,
        Role.DECODE: _ROOM_PROMPTS * prompt_blocks + plan.num_streams * stream_blocks,
    }
    prefill, decode = (
        (replace(groups[0], num_blocks=pools[role], kv_cache_gib=None),)
        for role, groups in topology.groups_by_role().items()
    )
    return replace(topology, prefill=prefill, decode=decode)


def run_background(
    topology: Topology, plan: BackgroundPlan, *, seed: int, verbose: bool, json_path: Path | None
) -> None:
    """Measure, show the table, write the record."""

    async def measure(deployment: Deployment) -> list[WindowSample]:
        return await _measure(deployment, plan, seed)

    sized = sized_for_background(topology, plan)
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
