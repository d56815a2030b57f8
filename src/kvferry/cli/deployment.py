"""Start what a command line says, run something against it, and stop it again.

Owns the options that say what to start, the run folder, the signals and what is said meanwhile; the
processes are the supervisor's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click

from kvferry.cli.options import Command, options
from kvferry.cluster.process import LogFollower
from kvferry.cluster.supervisor import Deployment, Supervisor
from kvferry.cluster.topology import DEFAULT_MODEL, RouterTopology, Topology, load_topology
from kvferry.errors import ClusterError, FerryError
from kvferry.options import option, same_as

Result = TypeVar("Result")
_SIGNAL_EXIT = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyChanges:
    """What a command line says of the deployment to start; None changes nothing."""

    topology: Topology | None = option(
        None,
        "TOML file that says what to start; the options below override it.",
        metavar="FILE",
        parse=lambda text: load_topology(Path(text)),
    )
    model: str | None = same_as(
        Topology, "model", default=None, flag="--model", default_text=DEFAULT_MODEL
    )
    prefill: int | None = option(None, "Number of prefill instances.", minimum=1, maximum=64)
    decode: int | None = option(None, "Number of decode instances.", minimum=1, maximum=64)
    transport: str | None = same_as(Topology, "transport")
    dtype: str | None = same_as(Topology, "dtype")
    engine_arguments: str | None = option(
        None, "Further options of every `kvferry engine serve`, as one text.", metavar="TEXT"
    )
    router_arguments: str | None = option(
        None, "Further options of `kvferry router`, as one text.", metavar="TEXT"
    )
    port: int | None = same_as(
        RouterTopology, "port", default=None, help="The router's.", default_text="free"
    )

    def changed(self) -> Topology:
        """Return the file's topology, or the default one, with the changes."""
        base = self.topology or Topology()
        topology = base.with_counts(prefill=self.prefill, decode=self.decode)
        topology = topology.with_engine_arguments(*_split("engine", self.engine_arguments))
        further = _split("router", self.router_arguments)
        router = replace(
            base.router,
            port=base.router.port if self.port is None else self.port,
            arguments=(*base.router.arguments, *further),
        )
        return replace(
            topology,
            model=self.model or base.model,
            transport=self.transport or base.transport,
            dtype=self.dtype or base.dtype,
            router=router,
        )


def topology_options(function: Command) -> Command:
    """Add the options to a command, which gets them as ``topology`` and ``verbose``."""
    verbose = click.option("-v", "--verbose", is_flag=True, help="Show the logs of all processes.")
    changed = options(
        TopologyChanges, "topology", build=lambda **given: TopologyChanges(**given).changed()
    )
    return changed(verbose(function))


def _split(program: str, text: str | None) -> list[str]:
    """Split ``text`` as a shell does."""
    try:
        return shlex.split(text or "")
    except ValueError as error:
        raise click.UsageError(f"--{program}-arguments {text!r}: {error}") from error


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
    with log_folder("kvferry-", keeps_on=ClusterError) as run_folder:
        async with (
            Supervisor(topology, run_folder, on_progress=say) as supervisor,
            _followed_logs(supervisor, enabled=verbose),
        ):
            say(f"starting {topology.model}: logs in {run_folder}")
            deployment = await supervisor.start()
            result = await supervisor.guard(body(deployment))
            say("stopping")
        return result


@contextlib.contextmanager
def log_folder(prefix: str, *, keeps_on: type[FerryError]) -> Iterator[Path]:
    """Yield a folder for logs. An error of ``keeps_on`` keeps it and names it; else it is removed.

    ``keeps_on`` and what derives from it take just a message.
    """
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield folder
    except keeps_on as error:
        raise type(error)(f"{error}\nlogs are kept in {folder}") from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


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
