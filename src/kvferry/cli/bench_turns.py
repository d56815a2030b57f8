"""``kvferry bench turns``: against a deployment of its own, or a running one."""

from __future__ import annotations

import dataclasses
import random
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import click

from kvferry.bench.client import CompletionClient
from kvferry.bench.legs_client import LegsClient, LegsTargets
from kvferry.bench.picture import draw_ttft, require_drawing
from kvferry.bench.plain_copy import PlainCopy
from kvferry.bench.turns import TurnSample, TurnsBench, TurnTargets
from kvferry.bench.turns_plan import TurnsPlan, draw_scripts, plan_conversations
from kvferry.bench.turns_report import ttft_curves, turns_record, turns_table
from kvferry.cli.deployment import run_to_end, topology_options, with_deployment
from kvferry.cli.record_file import json_option, write_record
from kvferry.cli.turns_options import picture_option, turn_target_options, turns_plan_options
from kvferry.clock import SystemClock
from kvferry.cluster.supervisor import Deployment
from kvferry.cluster.topology import Topology
from kvferry.protocol.params import Role

_TIMEOUT = aiohttp.ClientTimeout(total=300)


@click.command()
@turn_target_options
@turns_plan_options
@click.option("--seed", default=1, show_default=True, help="Seed of the random prompts.")
@json_option
@picture_option
@topology_options
def turns(
    *,
    topology: Topology,
    verbose: bool,
    targets: TurnTargets | None,
    legs: LegsTargets | None,
    plan: TurnsPlan,
    histories: tuple[int, ...] | None,
    seed: int,
    json_path: Path | None,
    picture_path: Path | None,
) -> None:
    """Measure the turns of a growing conversation, by where prefill has the history from.

    The arms are interleaved: recompute and read-back with prefill's cache emptied before every
    turn, warm with it intact.
    """
    if picture_path is not None:
        require_drawing()
    if targets is not None:
        samples = run_to_end(_measure(targets, plan, seed, legs))
    else:
        samples = _measure_own(topology, plan, seed, verbose=verbose)
    click.echo(turns_table(samples, random.Random(seed)))
    arguments: dict[str, object] = {
        **dataclasses.asdict(plan),
        "seed": seed,
        "model": topology.model,
        "dtype": topology.dtype,
    }
    write_record(json_path, turns_record(samples, arguments, random.Random(seed)))
    if picture_path is not None:
        # First turns of two-turn conversations have no history: they are no part of a curve.
        shown = samples if histories is None else [s for s in samples if s.num_history_tokens]
        draw_ttft(ttft_curves(shown), picture_path, subtitle=_subtitle(topology, plan, targets))
        click.echo(f"wrote {picture_path}", err=True)


def _measure_own(
    topology: Topology, plan: TurnsPlan, seed: int, *, verbose: bool
) -> list[TurnSample]:
    async def measure(deployment: Deployment) -> list[TurnSample]:
        return await _measure(targets_of(deployment), plan, seed)

    return run_to_end(with_deployment(resettable(topology), measure, verbose=verbose))


def resettable(topology: Topology) -> Topology:
    """Return ``topology`` with instances whose prefix cache may be emptied over HTTP."""
    return topology.with_engine_arguments("--enable-dev-endpoints")


def targets_of(deployment: Deployment) -> TurnTargets:
    """Return where the turns of ``deployment`` are measured."""
    return TurnTargets(
        router_url=deployment.router_url, prefill_urls=tuple(deployment.urls(Role.PREFILL))
    )


async def _measure(
    targets: TurnTargets, plan: TurnsPlan, seed: int, legs: LegsTargets | None = None
) -> list[TurnSample]:
    clock, rng = SystemClock(), random.Random(seed)
    conversations = plan_conversations(
        plan.arms,
        range(-plan.warmups, plan.repeats),
        lambda: draw_scripts(plan, rng),
        rng,
        secrets.token_hex(4),
    )
    with click.progressbar(length=plan.num_requests, label="turns", file=sys.stderr) as progress:
        async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
            client = CompletionClient(session, clock)
            asker = client if legs is None else LegsClient(client, legs)
            bench = TurnsBench(asker, targets, PlainCopy(clock).time_s)
            return await bench.run(conversations, on_turn=lambda sample: progress.update(1))


def _subtitle(topology: Topology, plan: TurnsPlan, targets: TurnTargets | None) -> str:
    parts: Sequence[str | None] = (
        None if targets is not None else topology.model,
        None if targets is not None else topology.dtype,
        f"median and quartiles of {plan.repeats} conversations",
    )
    return ", ".join(part for part in parts if part)
