"""Options of the key that instances ask for, for commands that talk to them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from kvferry.protocol.user_key import OwnKey  # Imported when a command runs.

_Command = Callable[..., None]

_OPTIONS = (
    click.option(
        "--cluster-key-file",
        type=click.Path(dir_okay=False, path_type=Path),
        help="The key that instances ask for, of what is said about handoffs and at their control "
        "ports; or in KVFERRY_CLUSTER_KEY.  [default: for instances on loopback the user's own]",
    ),
    click.option(
        "--no-user-key",
        is_flag=True,
        help="Use no key on loopback: for instances that were started with --no-user-key, or are "
        "of a release before the user's key.",
    ),
)


@dataclass(frozen=True, slots=True)
class KeyChoice:
    """What the options say."""

    cluster_key_file: Path | None
    no_user_key: bool

    def find(self, addresses: Iterable[str], *, makes: bool) -> OwnKey | None:
        """Return the key for instances at ``addresses``. Raises ``ConfigError`` as ``find_key``."""
        from kvferry.protocol.hosts import is_local_address
        from kvferry.protocol.user_key import find_key

        return find_key(
            self.cluster_key_file,
            os.environ,
            is_local=any(map(is_local_address, addresses)),
            no_user_key=self.no_user_key,
            makes=makes,
        )


def key_options(function: _Command) -> _Command:
    """Add the options to a command, which gets them as ``key_choice``."""

    @functools.wraps(function)
    def with_key(*, cluster_key_file: Path | None, no_user_key: bool, **values: object) -> None:
        function(**values, key_choice=KeyChoice(cluster_key_file, no_user_key))

    decorated: _Command = with_key
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated
