"""``kvferry bench handoff``: against a deployment of its own, or a running one."""

from __future__ import annotations

import dataclasses
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from kvferry.bench.background import (
    BackgroundBench,
    BackgroundPlan,
    BackgroundTargets,
    WindowSample,
    report_background,
)
from kvferry.bench.handoff import (
    Arm,
    HandoffPlan,
    HandoffSample,
    Targets,
    measure_handoffs,
    report_handoffs,
)
from kvferry.bench.legs_client import LegsTargets
from kvferry.cli.bench import (
    decode_url_option,
    engine_option,
    legs_of,
    open_asker,
    open_client,
    seed_option,
    show,
    url_option,
)
from kvferry.cli.deployment import run_to_end, topology_options, with_deployment
from kvferry.cli.options import options
from kvferry.cli.record_file import json_option
from kvferry.client.engine_kinds import VLLM_KINDS
from kvferry.clock import SystemClock
from kvferry.cluster.supervisor import Deployment
from kvferry.cluster.topology import RouterTopology, Topology
from kvferry.protocol.params import Role

_BLOCK_TOKENS = 16
_ROOM_PROMPTS = 6
"""Arriving prompts that fit beside the streams on decode, and beside all prompts on prefill."""
_SPARE_TURNS = 3


@click.command(context_settings={"show_default": True})
@engine_option(VLLM_KINDS)
@decode_url_option
@url_option
@click.option("--late-url", help="Router of it that chooses decode late, for push-late.")
@click.option("--plain-url", help="Instance of it that serves the colocated arm.")
@click.option(
    "--prefill-url", "prefill_urls", multiple=True, help="Prefill instance, where vLLM runs."
)
@options(HandoffPlan, "plan")
@seed_option
@click.option(
    "--background",
    "num_streams",
    type=click.IntRange(1),
    help="Measure the TPOT of this many running decodes instead, while handoffs arrive.",
)
@options(BackgroundPlan, "background", build=dict)
@json_option
@topology_options
@click.option(
    "--link",
    type=click.Choice(["auto", "tcp"]),
    default="auto",
    help="What NIXL moves over in the deployment that is started; tcp is a slow link.",
)
def handoff(
    *,
    topology: Topology,
    verbose: bool,
    url: str | None,
    late_url: str | None,
    plain_url: str | None,
    engine: str,
    prefill_urls: tuple[str, ...],
    decode_url: str | None,
    plan: HandoffPlan,
    num_streams: int | None,
    background: dict[str, Any],
    link: str,
    seed: int,
    json_path: Path | None,
) -> None:
    """Measure what a handoff adds to a request, inside each request, on this host's clock.

    The arms are interleaved: colocated asks one instance directly; pull, push and push-late go
    through a router. With --background it measures instead how much running decodes slow down.
    """
    legs = legs_of(engine, prefill_urls, decode_url)
    if (prefill_urls and legs is None) or (url and legs is not None):
        raise click.UsageError("--prefill-url needs --engine vllm, and --url must not be there")
    targets = _targets(url, late_url, plain_url, legs)
    if targets is not None and (num_streams is not None or link != "auto"):
        raise click.UsageError("--background and --link need a deployment of their own, not --url")
    topology = _linked(topology, link)
    if num_streams is not None:
        running = BackgroundPlan(
            num_streams=num_streams, last_token_id=plan.last_token_id, **background
        )
        _run_background(topology, running, seed=seed, verbose=verbose, json_path=json_path)
        return
    if legs is not None:
        _require_moves(plan.arms, legs)
    if targets is not None:
        samples = run_to_end(_measure(targets, plan, seed, legs))
    else:
        samples = _measure_own(topology, plan, seed, verbose=verbose)
    about = {"seed": seed, "link": link, "model": topology.model, "dtype": topology.dtype}
    arguments = dataclasses.asdict(plan) | about
    show(report_handoffs(samples, random.Random(seed)), arguments, json_path)


def _targets(
    url: str | None, late_url: str | None, plain_url: str | None, legs: LegsTargets | None
) -> Targets | None:
    """Return what runs already; None where a deployment is to be started."""
    if (url is None) != (plain_url is None):
        raise click.UsageError("give both --url and --plain-url, or neither")
    if late_url is not None and url is None:
        raise click.UsageError("--late-url needs --url and --plain-url")
    if legs is not None:
        return Targets(router_url=legs.decode_url, plain_url=legs.prefill_url)
    if url is None or plain_url is None:
        return None
    return Targets(
        router_url=url.rstrip("/"),
        plain_url=plain_url.rstrip("/"),
        late_router_url=late_url.rstrip("/") if late_url else None,
    )


def _require_moves(arms: Sequence[Arm], legs: LegsTargets) -> None:
    for arm in arms:
        if arm is Arm.PUSH_LATE or arm.mode not in (None, *legs.engine.modes):
            raise click.UsageError(
                f"--engine {legs.engine} has no arm {arm}: name others by --arms"
            )


def _linked(topology: Topology, link: str) -> Topology:
    """Return ``topology`` with what NIXL moves over."""
    if link == "auto":
        return topology
    if topology.transport == "shm":
        raise click.UsageError("--link tcp is NIXL's: leave out --transport shm")
    return replace(topology, transport="nixl").with_engine_arguments("--ucx-tls", link)


def _measure_own(
    topology: Topology, plan: HandoffPlan, seed: int, *, verbose: bool
) -> list[HandoffSample]:
    if Arm.PUSH_LATE in plan.arms:
        late = RouterTopology(decode_choice="late", arguments=topology.router.arguments)
        topology = replace(topology, further_routers=(late,))

    async def measure(deployment: Deployment) -> list[HandoffSample]:
        further = deployment.further_routers
        targets = Targets(
            router_url=deployment.router_url,
            plain_url=deployment.urls(Role.PREFILL)[0],
            late_router_url=further[0].url if further else None,
        )
        return await _measure(targets, plan, seed)

    return run_to_end(with_deployment(topology, measure, verbose=verbose))


async def _measure(
    targets: Targets, plan: HandoffPlan, seed: int, legs: LegsTargets | None = None
) -> list[HandoffSample]:
    with click.progressbar(length=plan.num_requests, label="handoffs", file=sys.stderr) as progress:
        async with open_asker(legs) as client:
            rng = random.Random(seed)
            return await measure_handoffs(client, targets, plan, rng, lambda: progress.update(1))


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


def _run_background(
    topology: Topology, plan: BackgroundPlan, *, seed: int, verbose: bool, json_path: Path | None
) -> None:
    topology, plan = sized_for_background(topology, plan)

    async def measure(deployment: Deployment) -> list[WindowSample]:
        targets = BackgroundTargets(
            router_url=deployment.router_url,
            prefill_url=deployment.urls(Role.PREFILL)[0],
            decode_url=deployment.urls(Role.DECODE)[0],
        )
        with click.progressbar(length=plan.num_steps, label="windows", file=sys.stderr) as progress:
            async with open_client() as client:
                bench = BackgroundBench(client, targets, plan, random.Random(seed), SystemClock())
                return await bench.run(on_step=lambda: progress.update(1))

    samples = run_to_end(with_deployment(topology, measure, verbose=verbose))
    about = {"seed": seed, "topology": dataclasses.asdict(topology)}
    arguments = dataclasses.asdict(plan) | about
    show(report_background(samples, random.Random(seed)), arguments, json_path)
