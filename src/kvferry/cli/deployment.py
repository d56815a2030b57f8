"""Run something against a deployment that is started for it and stopped after it.

Owns the run folder, the signals and what is said meanwhile; the processes are the supervisor's.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import click

from kvferry.cluster.logs import LogFollower
from kvferry.cluster.supervisor import Deployment, Supervisor
from kvferry.cluster.topology import Topology
from kvferry.errors import ClusterError

Result = TypeVar("Result")
EXIT_TERMINATED = 143


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


def run_to_end(work: Awaitable[Result]) -> Result:
    """Run ``work`` on a fresh event loop; Ctrl-C and SIGTERM cancel it and let it clean up.

    SIGTERM then ends the program with code 143.
    """
    terminated = False

    async def cancellable() -> Result:
        task = asyncio.current_task()
        assert task is not None

        def on_terminate() -> None:
            nonlocal terminated
            terminated = True
            task.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, on_terminate)
        return await work

    try:
        return asyncio.run(cancellable())
    except asyncio.CancelledError:
        if terminated:
            raise click.exceptions.Exit(EXIT_TERMINATED) from None
        raise
