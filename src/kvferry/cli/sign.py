"""``kvferry sign``: the header that an instance with a key wants of who asks it by hand."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from kvferry.cli.options import options
from kvferry.errors import ConfigError
from kvferry.protocol.ids import TransferId
from kvferry.protocol.keys import KeyChoice


@click.command()
@click.argument("transfer_id")
@click.argument(
    "body_file", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@options(KeyChoice, "key_choice", names=("cluster_key_file",))
def sign(*, transfer_id: str, body_file: Path | None, key_choice: KeyChoice) -> None:
    """Print the header that signs BODY_FILE, byte for byte, for TRANSFER_ID; good for 60 s.

    Without BODY_FILE it is for a request without a body.

    \b
    curl -H "$(kvferry sign ID leg.json)" --data-binary @leg.json URL/v1/completions
    curl -H "$(kvferry sign ID)" -X DELETE URL/kvferry/transfers/ID
    """
    from kvferry.protocol.signing import signature_headers

    key = key_choice.find(os.environ, is_local=True, makes=False)
    if key is None:
        raise ConfigError("this user has no key yet: an instance makes it at its first start")
    body = b"" if body_file is None else body_file.read_bytes()
    headers = signature_headers(key.secret, body, TransferId(transfer_id), time.time())
    for name, value in headers.items():
        click.echo(f"{name}: {value}")
