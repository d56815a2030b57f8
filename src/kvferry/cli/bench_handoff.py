"""``kvferry bench handoff``: against a deployment of its own, or a running one."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import aiohttp
import click

from kvferry.bench.client import CompletionClient
from kvferry.bench.handoff import HandoffPlan, HandoffSample, Targets, measure_handoffs
from kvferry.bench.report import handoff_record, handoff_table
from kvferry.cli.deployment import run_to_end, with_deployment
from kvferry.cli.record_file import json_option, write_record
from kvferry.cli.token_counts import TokenCounts
from kvferry.cli.topology_options import topology_options
from kvferry.clock import SystemClock
from kvferry.cluster.supervisor import Deployment
from kvferry.cluster.topology import Topology
from kvferry.protocol.params import Role

_TIMEOUT = aiohttp.ClientTimeout(total=300)


@click.command()
@click.option("--url", help="Router of a running deployment; none: start one.")
@click.option("--plain-url", help="Instance of it that serves the colocated arm.")
@click.option(
    "--lengths", type=TokenCounts(), default="512,2048", show_default=True, help="Prompt tokens."
)
@click.option("--repeats", default=30, show_default=True, help="Requests of each length and arm.")
@click.option("--warmups", default=2, show_default=True, help="Further ones that do not count.")
@click.option("--max-tokens", default=12, show_default=True, help="Tokens of each answer.")
@click.option("--seed", default=1, show_default=True, help="Seed of the random prompts.")
@click.option(
    "--last-token-id", default=40_000, show_default=True, help="Prompts are of ids up to this."
)
@json_option
@topology_options
def handoff(
    *,
    topology: Topology,
    verbose: bool,
    url: str | None,
    plain_url: str | None,
    lengths: tuple[int, ...],
    repeats: int,
    warmups: int,
    max_tokens: int,
    seed: int,
    last_token_id: int,
    json_path: Path | None,
) -> None:
    """Measure what a handoff adds to a request, inside each request, on this host's clock.

    Two arms, interleaved: pull (through the router) and colocated (one instance asked directly).
    """
    plan = HandoffPlan(
        lengths_tokens=lengths,
        repeats=repeats,
        warmups=warmups,
        max_tokens=max_tokens,
        first_token_id=min(1_000, last_token_id // 2),
        last_token_id=last_token_id,
    )
    if (url is None) != (plain_url is None):
        raise click.UsageError("give both --url and --plain-url, or neither")
    if url is not None and plain_url is not None:
        targets = Targets(router_url=url.rstrip("/"), plain_url=plain_url.rstrip("/"))
        samples = run_to_end(_measure(targets, plan, seed))
    else:

        async def measure(deployment: Deployment) -> list[HandoffSample]:
            return await _measure(_targets_of(deployment), plan, seed)

        samples = run_to_end(with_deployment(topology, measure, verbose=verbose))
    click.echo(handoff_table(samples, random.Random(seed)))
    arguments: dict[str, object] = {
        "lengths_tokens": list(lengths),
        "repeats": repeats,
        "warmups": warmups,
        "max_tokens": max_tokens,
        "seed": seed,
        "model": topology.model,
        "dtype": topology.dtype,
    }
    write_record(json_path, handoff_record(samples, arguments, random.Random(seed)))


def _targets_of(deployment: Deployment) -> Targets:
    return Targets(router_url=deployment.router_url, plain_url=deployment.urls(Role.PREFILL)[0])


async def _measure(targets: Targets, plan: HandoffPlan, seed: int) -> list[HandoffSample]:
    with click.progressbar(length=plan.num_requests, label="handoffs", file=sys.stderr) as progress:
        async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
            return await measure_handoffs(
                CompletionClient(session, SystemClock()),
                targets,
                plan,
                random.Random(seed),
                on_request=lambda: progress.update(1),
            )
