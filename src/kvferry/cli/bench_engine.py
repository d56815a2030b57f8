"""``kvferry bench engine``: the engine against plain transformers, on one core, in this process."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvferry.bench.report import format_table, machine
from kvferry.cli.record_file import json_option, write_record
from kvferry.cli.token_counts import TokenCounts
from kvferry.cluster.child import pin
from kvferry.cluster.topology import DEFAULT_MODEL

if TYPE_CHECKING:
    from kvferry.engine.measure import EngineMeasurement


@click.command()
@click.argument("model", default=DEFAULT_MODEL)
@click.option("--rounds", default=5, show_default=True, help="Rounds of all arms.")
@click.option(
    "--lengths", type=TokenCounts(), default="512,2048", show_default=True, help="Prompt tokens."
)
@click.option(
    "--dtype",
    default="bfloat16",
    show_default=True,
    type=click.Choice(["bfloat16", "float16", "float32"]),
    help="Type of weights and KV.",
)
@click.option("--core", type=int, help="Core to run on.  [default: the last one]")
@click.option("--seed", default=0, show_default=True, help="Seed of the random prompts.")
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
    import msgspec

    from kvferry.engine.bundled_model import resolve_model
    from kvferry.engine.measure import MeasureOptions, measure_engine

    options = MeasureOptions(num_rounds=rounds, prompt_tokens=lengths, dtype=dtype, seed=seed)
    with click.progressbar(length=1, label="loading", file=sys.stderr) as bar:

        def progress(done: int, total: int, label: str) -> None:
            bar.length, bar.label = total, f"{label:<20}"
            bar.update(done - bar.pos)
            bar.render_progress()

        measurement = measure_engine(resolve_model(model), options, progress=progress)
    click.echo(format_measurement(measurement))
    record = {"record": "engine", "version": 1, "machine": machine()}
    write_record(json_path, {**record, "measurement": msgspec.to_builtins(measurement)})
    if require_goals and not measurement.is_met:
        raise click.exceptions.Exit(1)


def _pin_to(core: int | None) -> None:
    if hasattr(os, "sched_getaffinity"):
        available = sorted(os.sched_getaffinity(0))
        if core is not None and core not in available:
            shown = ", ".join(map(str, available))
            raise click.UsageError(f"--core {core} is not available; available: {shown}")
        pin(str(available[-1] if core is None else core))


def format_measurement(measurement: EngineMeasurement) -> str:
    """Return the table: medians, the median ratio with its extremes, and the goal."""
    rows = [
        [
            item.name,
            f"{item.ours:.4g}",
            f"{item.reference:.4g}",
            item.unit,
            f"{item.ratio:.3f} [{item.ratio_low:.3f}, {item.ratio_high:.3f}]",
            f"{'≤' if item.at_most else '≥'} {item.goal:g}",
            "met" if item.is_met else "MISSED",
        ]
        for item in measurement.comparisons
    ]
    header = ["figure", "ours", "reference", "unit", "ratio [least, greatest]", "goal", ""]
    return format_table(header, rows)
