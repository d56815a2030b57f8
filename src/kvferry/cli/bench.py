"""``kvferry bench``: the group of measurements, and what their commands have in common."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from kvferry.cli.main import LazyCommand, LazyGroup
from kvferry.cli.record_file import write_record

if TYPE_CHECKING:
    # Imported when something is measured: the help of the group starts without an HTTP client.
    from kvferry.bench.client import CompletionClient
    from kvferry.bench.legs_client import LegsClient, LegsTargets
    from kvferry.bench.report import Report

Item = TypeVar("Item")
Decorator = Callable[[Callable[..., None]], Callable[..., None]]
_TOTAL_TIMEOUT_S = 300.0

bench = LazyGroup(
    name="bench",
    help_text="""Measure handoffs, turns, vLLM, the engine, transfers.

    Arms are interleaved and medians shown with their spread; --json keeps every sample.
    """,
    lazy={
        "handoff": LazyCommand(
            "kvferry.cli.bench_handoff", "handoff", "What a handoff adds to a request."
        ),
        "turns": LazyCommand(
            "kvferry.cli.bench_turns", "turns", "A conversation's turns, with and without reuse."
        ),
        "vllm": LazyCommand(
            "kvferry.cli.bench_vllm", "vllm", "vLLM's own connectors against ours, on this machine."
        ),
        "engine": LazyCommand(
            "kvferry.cli.bench_micro", "engine", "The engine against plain transformers."
        ),
        "transfer": LazyCommand(
            "kvferry.cli.bench_micro", "transfer", "Moving blocks against one plain copy."
        ),
    },
)


seed_option = click.option(
    "--seed", default=1, show_default=True, help="Seed of what is drawn at random."
)
dtype_option = click.option(
    "--dtype",
    default="bfloat16",
    show_default=True,
    type=click.Choice(["bfloat16", "float16", "float32"]),
    help="Type of weights and KV.",
)
url_option = click.option("--url", help="Router of a running deployment; none: start one.")
decode_url_option = click.option("--decode-url", help="Decode instance, where vLLM runs.")


def engine_option(kinds: Sequence[str]) -> Decorator:
    """Return ``--engine``: kvferry, or vLLM of one of ``kinds``."""
    return click.option(
        "--engine",
        type=click.Choice(["kvferry", *map(str, kinds)]),
        default="kvferry",
        show_default=True,
        help="What runs already; vLLM's two legs are asked without a router.",
    )


def legs_of(engine: str, prefill_urls: Sequence[str], decode_url: str | None) -> LegsTargets | None:
    """Return the vLLM instances whose two legs are to be asked; None where a router is."""
    from kvferry.bench.legs_client import LegsTargets
    from kvferry.client.engine_kinds import EngineKind

    if engine == "kvferry":
        if decode_url is not None:
            raise click.UsageError("--decode-url needs --engine vllm; else name the router")
        return None
    if decode_url is None or len(prefill_urls) != 1:
        raise click.UsageError(
            f"--engine {engine} needs --prefill-url and --decode-url, one of each"
        )
    prefill_url, decode_url = (url.rstrip("/") for url in (prefill_urls[0], decode_url))
    return LegsTargets(engine=EngineKind(engine), prefill_url=prefill_url, decode_url=decode_url)


@contextlib.asynccontextmanager
async def open_client(*, keeps_connections: bool = True) -> AsyncIterator[CompletionClient]:
    """Yield a client of servers on any host; each request may take five minutes."""
    import aiohttp

    from kvferry.bench.client import CompletionClient
    from kvferry.clock import SystemClock

    timeout = aiohttp.ClientTimeout(total=_TOTAL_TIMEOUT_S)
    connector = aiohttp.TCPConnector(force_close=not keeps_connections)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        yield CompletionClient(session, SystemClock())


@contextlib.asynccontextmanager
async def open_asker(legs: LegsTargets | None) -> AsyncIterator[CompletionClient | LegsClient]:
    """Yield a client of a router, or of the two instances of ``legs``."""
    from kvferry.bench.legs_client import LegsClient

    async with open_client() as client:
        yield client if legs is None else LegsClient(client, legs)


def show(report: Report, arguments: Mapping[str, object], json_path: Path | None) -> None:
    """Print what was found and write the record, if there is a path for it."""
    click.echo(report.text)
    write_record(json_path, report.record(arguments))
