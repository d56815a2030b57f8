"""``kvferry bench handoff``: against a deployment of its own, or a running one."""

from __future__ import annotations

import dataclasses
import random
import sys
from dataclasses import replace
from pathlib import Path

import aiohttp
import click

from kvferry.bench.background import BackgroundPlan
from kvferry.bench.client import CompletionClient
from kvferry.bench.handoff import Arm, HandoffPlan, HandoffSample, Targets, measure_handoffs
from kvferry.bench.legs_client import LegsClient, LegsTargets
from kvferry.bench.report import handoff_record, handoff_table
from kvferry.cli.bench_background import run_background
from kvferry.cli.deployment import run_to_end, topology_options, with_deployment
from kvferry.cli.handoff_options import (
    background_options,
    link_options,
    plan_options,
    target_options,
)
from kvferry.cli.record_file import json_option, write_record
from kvferry.clock import SystemClock
from kvferry.cluster.supervisor import Deployment
from kvferry.cluster.topology import RouterTopology, Topology
from kvferry.protocol.params import Role

_TIMEOUT = aiohttp.ClientTimeout(total=300)


@click.command()
@target_options
@plan_options
@click.option("--seed", default=1, show_default=True, help="Seed of the random prompts.")
@background_options
@json_option
@topology_options
@link_options
def handoff(
    *,
    topology: Topology,
    verbose: bool,
    targets: Targets | None,
    legs: LegsTargets | None,
    plan: HandoffPlan,
    background: BackgroundPlan | None,
    link: str,
    seed: int,
    json_path: Path | None,
) -> None:
    """Measure what a handoff adds to a request, inside each request, on this host's clock.

    The arms are interleaved: colocated asks one instance directly; pull, push and push-late go
    through a router. With --background it measures instead how much running decodes slow down.
    """
    if targets is not None and (background is not None or link != "auto"):
        raise click.UsageError("--background and --link need a deployment of their own, not --url")
    if background is not None:
        background = replace(background, last_token_id=plan.last_token_id)
        run_background(topology, background, seed=seed, verbose=verbose, json_path=json_path)
        return
    if legs is not None:
        _require_moves(plan, legs)
    if targets is not None:
        samples = run_to_end(_measure(targets, plan, seed, legs))
    else:
        samples = _measure_own(topology, plan, seed, verbose=verbose)
    click.echo(handoff_table(samples, random.Random(seed)))
    arguments: dict[str, object] = {
        **dataclasses.asdict(plan),
        "seed": seed,
        "link": link,
        "model": topology.model,
        "dtype": topology.dtype,
    }
    write_record(json_path, handoff_record(samples, arguments, random.Random(seed)))


def _measure_own(
    topology: Topology, plan: HandoffPlan, seed: int, *, verbose: bool
) -> list[HandoffSample]:
    if Arm.PUSH_LATE in plan.arms:
        late = RouterTopology(decode_choice="late", arguments=topology.router.arguments)
        topology = replace(topology, further_routers=(late,))

    async def measure(deployment: Deployment) -> list[HandoffSample]:
        return await _measure(_targets_of(deployment), plan, seed)

    return run_to_end(with_deployment(topology, measure, verbose=verbose))


def _targets_of(deployment: Deployment) -> Targets:
    further = deployment.further_routers
    return Targets(
        router_url=deployment.router_url,
        plain_url=deployment.urls(Role.PREFILL)[0],
        late_router_url=further[0].url if further else None,
    )


def _require_moves(plan: HandoffPlan, legs: LegsTargets) -> None:
    for arm in plan.arms:
        if arm is Arm.PUSH_LATE or arm.mode not in (None, *legs.engine.modes):
            raise click.UsageError(
                f"--engine {legs.engine} has no arm {arm}: name others by --arms"
            )


async def _measure(
    targets: Targets, plan: HandoffPlan, seed: int, legs: LegsTargets | None = None
) -> list[HandoffSample]:
    with click.progressbar(length=plan.num_requests, label="handoffs", file=sys.stderr) as progress:
        async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
            client = CompletionClient(session, SystemClock())
            return await measure_handoffs(
                client if legs is None else LegsClient(client, legs),
                targets,
                plan,
                random.Random(seed),
                on_request=lambda: progress.update(1),
            )
