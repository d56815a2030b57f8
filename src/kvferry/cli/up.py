"""``kvferry up``: start a deployment on this machine and keep it up until Ctrl-C."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import click

from kvferry.cli.deployment import run_to_end, topology_options, with_deployment
from kvferry.cli.options import options
from kvferry.cluster.supervisor import Deployment
from kvferry.cluster.topology import RouterTopology, Topology


@click.command()
@options(RouterTopology, "router_changes", build=dict, names=("mode", "decode_choice"))
@topology_options
def up(*, topology: Topology, verbose: bool, router_changes: dict[str, Any]) -> None:
    """Start prefill, decode and router, say where they are, and stop them on Ctrl-C.

    If one of them dies the others are stopped, and the command fails naming it.
    """
    topology = replace(topology, router=replace(topology.router, **router_changes))
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
