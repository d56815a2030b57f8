"""Run something against a deployment that is started for it and stopped after it.

Owns the run folder, the signals and what is said meanwhile; the processes are the supervisor's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import click

from kvferry.cluster.logs import LogFollower
from kvferry.cluster.supervisor import Deployment, Supervisor
from kvferry.cluster.topology import Topology
from kvferry.errors import ClusterError

Result = TypeVar("Result")
_SIGNAL_EXIT = 128


def say(message: str) -> None:
    """Tell people something on stderr; stdout is for results."""
    click.echo(message, err=True)


async def with_deployment(
    topology: Topology,
    body: Callable[[Deployment], Coroutine[Any, Any, Result]],
    *,
    verbose: bool = False,
) -> Result:
    """Start ``topology``, run ``body`` with it and stop it, whatever happens.

    Raises ``ClusterError`` if a process dies; then its logs are kept and their folder is named.
    """
    run_folder = Path(tempfile.mkdtemp(prefix="kvferry-"))
    try:
        async with (
            Supervisor(topology, run_folder, on_progress=say) as supervisor,
            _followed_logs(supervisor, enabled=verbose),
        ):
            say(f"starting {topology.model}: logs in {run_folder}")
            deployment = await supervisor.start()
            result = await supervisor.guard(body(deployment))
            say("stopping")
    except ClusterError as error:
        raise ClusterError(f"{error}\nlogs are kept in {run_folder}") from error
    except BaseException:
        shutil.rmtree(run_folder, ignore_errors=True)
        raise
    shutil.rmtree(run_folder, ignore_errors=True)
    return result


@contextlib.asynccontextmanager
async def _followed_logs(supervisor: Supervisor, *, enabled: bool) -> AsyncIterator[None]:
    if not enabled:
        yield
        return
    follower = asyncio.ensure_future(LogFollower(say).follow(lambda: supervisor.log_paths))
    try:
        yield
    finally:
        follower.cancel()
        await asyncio.gather(follower, return_exceptions=True)


def run_to_end(work: Coroutine[Any, Any, Result]) -> Result:
    """Run ``work`` on a fresh event loop; Ctrl-C and SIGTERM cancel it and let it clean up.

    Then the program ends with code 130 or 143. A second signal while it cleans up ends it at once;
    the kernel ends the processes that it started.
    """
    received: list[signal.Signals] = []

    async def cancellable() -> Result:
        task = asyncio.ensure_future(work)

        def on_signal(number: signal.Signals) -> None:
            if received:
                os._exit(_SIGNAL_EXIT + number)
            received.append(number)
            task.cancel()

        loop = asyncio.get_running_loop()
        # Set even where a shell has started this in the background with SIGINT ignored: whoever
        # sends it to a deployment means to end it.
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal, number)
        return await task

    try:
        return asyncio.run(cancellable())
    except asyncio.CancelledError:
        if received:
            raise click.exceptions.Exit(_SIGNAL_EXIT + received[0]) from None
        raise
