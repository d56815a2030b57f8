"""Write JSON to a file, whole or not at all: a measurement's record, or that a program serves."""

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
    """Write ``record`` to ``path``, if there is one. Raises ``ConfigError`` if it fails."""
    if path is not None:
        write_json(path, record)
        click.echo(f"wrote {path}", err=True)


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write ``content`` to ``path``, where others may wait for it.

    Raises ``ConfigError`` if it fails.
    """
    draft = path.with_name(path.name + ".draft")
    try:
        draft.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error
