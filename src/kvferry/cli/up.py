"""``kvferry up``: start a deployment on this machine and keep it up until Ctrl-C."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import click

from kvferry.cli.deployment import run_to_end, with_deployment
from kvferry.cli.topology_options import topology_options
from kvferry.cluster.supervisor import Deployment
from kvferry.cluster.topology import DECODE_CHOICES, ROUTE_MODES, Topology


@click.command()
@click.option(
    "--mode",
    type=click.Choice(ROUTE_MODES),
    help="How KV moves from prefill to decode; auto is push where both can.  [default: auto]",
)
@click.option(
    "--decode-choice",
    type=click.Choice(DECODE_CHOICES),
    help="When a push's decode instance is chosen: at arrival, or while prefill computes.  "
    "[default: early]",
)
@topology_options
def up(*, topology: Topology, verbose: bool, mode: str | None, decode_choice: str | None) -> None:
    """Start prefill, decode and router, say where they are, and stop them on Ctrl-C.

    If one of them dies the others are stopped, and the command fails naming it.
    """
    router = replace(
        topology.router,
        mode=mode or topology.router.mode,
        decode_choice=decode_choice or topology.router.decode_choice,
    )
    topology = replace(topology, router=router)
    run_to_end(with_deployment(topology, _stay_up, verbose=verbose))


async def _stay_up(deployment: Deployment) -> None:
    click.echo(describe(deployment))
    await asyncio.Event().wait()


def describe(deployment: Deployment) -> str:
    """Return what a user needs to use ``deployment``: URLs and a command to try."""
    lines = [f"{item.name:<10} {item.url}" for item in deployment.instances]
    body = {
        "messages": [{"role": "user", "content": "Why is the sky blue?"}],
        "max_tokens": 60,
        "stream": True,
    }
    lines += [
        f"{'router':<10} {deployment.router_url}",
        *(f"{router.name:<10} {router.url}" for router in deployment.further_routers),
        "",
        "Try it (Ctrl-C stops everything):",
        f"  curl -N {deployment.router_url}/v1/chat/completions "
        f"-H 'Content-Type: application/json' -d '{json.dumps(body)}'",
    ]
    return "\n".join(lines)
