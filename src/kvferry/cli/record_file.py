"""Write a measurement's record to a file, whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import click

from kvferry.errors import ConfigError

json_option = click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write the record with every sample to this file.",
)


def write_record(path: Path | None, record: Mapping[str, object]) -> None:
    """Write ``record`` as JSON to ``path``, if there is one. Raises ``ConfigError`` if it fails."""
    if path is None:
        return
    draft = path.with_name(path.name + ".draft")
    try:
        draft.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error
    click.echo(f"wrote {path}", err=True)
