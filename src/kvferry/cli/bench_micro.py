"""``kvferry bench engine`` and ``transfer``: parts of an instance, measured in this process."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import click

from kvferry.cli.bench import dtype_option, seed_option, show
from kvferry.cli.options import Listed
from kvferry.cli.record_file import json_option
from kvferry.cluster.child import pin
from kvferry.cluster.topology import DEFAULT_MODEL


@click.command(context_settings={"show_default": True})
@click.argument("model", default=DEFAULT_MODEL)
@click.option("--rounds", default=5, help="Rounds of all arms.")
@click.option("--lengths", type=Listed(int), default="512,2048", help="Prompt tokens.")
@dtype_option
@click.option("--core", type=int, help="Core to run on.  [default: the last one]")
@seed_option
@click.option("--require-goals", is_flag=True, help="Fail if a ratio misses its goal.")
@json_option
def engine(
    *,
    model: str,
    rounds: int,
    lengths: tuple[int, ...],
    dtype: str,
    core: int | None,
    seed: int,
    require_goals: bool,
    json_path: Path | None,
) -> None:
    """Measure prefill, decode and a batch against plain transformers, arms interleaved.

    MODEL is a bundled model or a model folder. Both run on one thread of one core.
    """
    _pin_to(core)
    # Imported after pinning: the tensor library sizes its pools by the cores that it finds.
    from kvferry.bench.engine import MeasureOptions, measure_engine, report_engine
    from kvferry.engine.bundled_model import resolve_model

    options = MeasureOptions(num_rounds=rounds, prompt_tokens=lengths, dtype=dtype, seed=seed)
    with click.progressbar(length=1, label="loading", file=sys.stderr) as bar:

        def progress(done: int, total: int, label: str) -> None:
            bar.length, bar.label = total, f"{label:<20}"
            bar.update(done - bar.pos)
            bar.render_progress()

        measurement = measure_engine(resolve_model(model), options, progress=progress)
    show(report_engine(measurement), dataclasses.asdict(options), json_path)
    if require_goals and not measurement.is_met:
        raise click.exceptions.Exit(1)


def _pin_to(core: int | None) -> None:
    if hasattr(os, "sched_getaffinity"):
        available = sorted(os.sched_getaffinity(0))
        if core is not None and core not in available:
            shown = ", ".join(map(str, available))
            raise click.UsageError(f"--core {core} is not available; available: {shown}")
        pin(str(available[-1] if core is None else core))


@click.command(context_settings={"show_default": True})
@click.option(
    "--transport",
    "transports",
    multiple=True,
    default=("nixl", "shm"),
    type=click.Choice(["nixl", "shm"]),
    help="How bytes move; repeatable.",
)
@click.option("--mib", default=64, type=click.IntRange(1), help="MiB moved.")
@click.option("--block-kib", default=360, type=click.IntRange(1), help="KiB of a block.")
@click.option("--repeats", default=15, type=click.IntRange(1), help="Copies that count.")
@seed_option
@json_option
def transfer(
    *,
    transports: tuple[str, ...],
    mib: int,
    block_kib: int,
    repeats: int,
    seed: int,
    json_path: Path | None,
) -> None:
    """Measure moving blocks, contiguous and scattered, read and written.

    The reference is one plain copy of the same bytes by the same transport, taken in turns.
    """
    from kvferry.bench.transfer import OPERATIONS, CopyPlan, measure_copy, report_copies

    plans = [
        CopyPlan(
            transport=name,
            operation=operation,
            num_bytes=mib * 2**20,
            block_bytes=block_kib * 1024,
            is_scattered=is_scattered,
            num_repeats=repeats,
        )
        for name in transports
        for operation in OPERATIONS
        for is_scattered in (False, True)
    ]
    with click.progressbar(plans, label="transfers", file=sys.stderr) as progress:
        measured = [measure_copy(plan, seed) for plan in progress]
    show(report_copies(measured), {"mib": mib, "block_kib": block_kib, "seed": seed}, json_path)
