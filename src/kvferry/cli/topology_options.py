"""The options that say what to start, shared by every command that starts a deployment."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click

from kvferry.cluster.topology import Topology, load_topology

_OPTIONS = (
    click.option(
        "--topology",
        "topology_path",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="TOML file that says what to start; the options below override it.",
    ),
    click.option("--model", help="Bundled model or model folder.  [default: smollm2-135m]"),
    click.option("--prefill", type=click.IntRange(1, 64), help="Number of prefill instances."),
    click.option("--decode", type=click.IntRange(1, 64), help="Number of decode instances."),
    click.option(
        "--transport",
        type=click.Choice(["auto", "nixl", "shm"]),
        help="How KV moves; auto is nixl where it works, else shm.  [default: auto]",
    ),
    click.option(
        "--dtype",
        type=click.Choice(["bfloat16", "float16", "float32"]),
        help="Type of weights and KV.",
    ),
    click.option(
        "--engine-arguments",
        metavar="TEXT",
        help="Further options of every `kvferry engine serve`, as one text.",
    ),
    click.option(
        "--router-arguments",
        metavar="TEXT",
        help="Further options of `kvferry router`, as one text.",
    ),
    click.option("--port", type=click.IntRange(0, 65_535), help="The router's.  [default: free]"),
    click.option("-v", "--verbose", is_flag=True, help="Show the logs of all processes."),
)


def topology_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options to a command, which gets them as ``topology`` and ``verbose``."""

    @functools.wraps(function)
    def with_topology(
        *,
        topology_path: Path | None,
        model: str | None,
        prefill: int | None,
        decode: int | None,
        transport: str | None,
        dtype: str | None,
        port: int | None,
        engine_arguments: str | None,
        router_arguments: str | None,
        **rest: object,
    ) -> None:
        topology = Topology() if topology_path is None else load_topology(topology_path)
        topology = topology.with_counts(prefill=prefill, decode=decode)
        topology = topology.with_engine_arguments(*_split("engine", engine_arguments))
        router = topology.router
        router = replace(
            router,
            port=router.port if port is None else port,
            arguments=(*router.arguments, *_split("router", router_arguments)),
        )
        function(
            topology=replace(
                topology,
                model=model or topology.model,
                transport=transport or topology.transport,
                dtype=dtype or topology.dtype,
                router=router,
            ),
            **rest,
        )

    for option in reversed(_OPTIONS):
        with_topology = option(with_topology)
    return with_topology


def _split(program: str, text: str | None) -> list[str]:
    """Split ``text`` as a shell does."""
    try:
        return shlex.split(text or "")
    except ValueError as error:
        raise click.UsageError(f"--{program}-arguments {text!r}: {error}") from error
