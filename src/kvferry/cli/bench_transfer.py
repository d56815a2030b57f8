"""``kvferry bench transfer``: moving blocks between two processes against one plain copy."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from kvferry.bench.report import format_table, machine
from kvferry.cli.record_file import json_option, write_record

if TYPE_CHECKING:
    from kvferry.transport.measure import CopyMeasurement

_MIB = 1024 * 1024
_OPERATIONS: tuple[Literal["READ", "WRITE"], ...] = ("READ", "WRITE")


@click.command()
@click.option(
    "--transport",
    "transports",
    multiple=True,
    default=("nixl", "shm"),
    type=click.Choice(["nixl", "shm"]),
    help="How bytes move; repeatable.  [default: nixl and shm]",
)
@click.option("--mib", default=64, show_default=True, type=click.IntRange(1), help="MiB moved.")
@click.option(
    "--block-kib", default=360, show_default=True, type=click.IntRange(1), help="KiB of a block."
)
@click.option(
    "--repeats", default=15, show_default=True, type=click.IntRange(1), help="Copies that count."
)
@click.option("--seed", default=1, show_default=True, help="Seed of the scattered blocks.")
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
    from kvferry.transport.measure import CopyPlan, measure_copy

    plans = [
        CopyPlan(
            transport=name,
            operation=operation,
            num_bytes=mib * _MIB,
            block_bytes=block_kib * 1024,
            is_scattered=is_scattered,
            num_repeats=repeats,
        )
        for name in transports
        for operation in _OPERATIONS
        for is_scattered in (False, True)
    ]
    with click.progressbar(plans, label="transfers", file=sys.stderr) as progress:
        measured = [measure_copy(plan, seed) for plan in progress]
    click.echo(format_measurements(measured))
    samples = [dataclasses.asdict(item) for item in measured]
    record = {"record": "transfer", "version": 1, "machine": machine(), "measured": samples}
    write_record(json_path, record)


def format_measurements(measured: list[CopyMeasurement]) -> str:
    """Return the table of speeds in GiB/s and their ratio."""
    rows = [
        [
            item.transport,
            item.operation,
            "scattered" if item.is_scattered else "contiguous",
            f"{item.num_bytes / _MIB:.1f}",
            f"{item.blocks_bytes_per_s / 2**30:.2f}",
            f"{item.plain_bytes_per_s / 2**30:.2f}",
            f"{item.ratio:.3f}",
        ]
        for item in measured
    ]
    header = ["transport", "does", "blocks", "MiB", "blocks GiB/s", "plain copy GiB/s", "ratio"]
    return format_table(header, rows)
