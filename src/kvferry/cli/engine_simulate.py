"""``kvferry engine simulate``: an instance without a model, for routers, benchmarks and clients."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import click

from kvferry.cli.options import options, ready_file_option
from kvferry.cli.record_file import write_json
from kvferry.simulator import SimulatorConfig, serving


@click.command()
@options(SimulatorConfig, "config")
@ready_file_option("{url, instance_id, pid}")
def simulate(*, config: SimulatorConfig, ready_file: Path | None) -> None:
    """Serve an instance that computes nothing, until SIGTERM or Ctrl-C.

    It answers OpenAI's API as kvferry's engine or vLLM would, after the times given here, and
    hands prompts over to other simulated instances. A router, a benchmark or a client needs
    neither a model nor a core for each instance then. An answer's tokens mean nothing; a text
    counts as a token for every four letters.
    """
    asyncio.run(_serve(config, ready_file))


async def _serve(config: SimulatorConfig, ready_file: Path | None) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with serving(config) as url:
        click.echo(f"kvferry engine ready: {url} instance {config.instance_id} simulated")
        if ready_file is not None:
            about = {"url": url, "instance_id": config.instance_id, "pid": os.getpid()}
            write_json(ready_file, about)
        await ended.wait()
