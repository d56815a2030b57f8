"""Transports by name. The only importer of those that need more than this package.

Nothing is imported before it is asked for.
"""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from kvferry.errors import ConfigError
from kvferry.transport.base import Transport
from kvferry.transport.host import ProcessIdentity

_OPTIONS = {"nixl": ("backend", "ucx_tls", "ucx_net_devices"), "shm": ()}
"""What each takes, best first."""


def default_transport() -> str:
    """Return "nixl" where it really imports, else "shm"."""
    try:
        importlib.import_module("kvferry.transport.nixl").load_nixl()
    except (ConfigError, ImportError):
        return "shm"
    return "nixl"


def create_transport(
    name: str, *, process: ProcessIdentity | None = None, **options: object
) -> Transport:
    """Return a fresh transport. ``process`` is who we say we are, by default the real one.

    ``nixl`` takes ``backend`` ("UCX" or "LIBFABRIC"), ``ucx_tls`` and ``ucx_net_devices``;
    ``shm`` takes none. Raises ``ConfigError`` for a name or an option that does not exist.
    """
    if name not in _OPTIONS:
        raise ConfigError(_unknown("transport", name, tuple(_OPTIONS)))
    for option in options:
        if option not in _OPTIONS[name]:
            raise ConfigError(_unknown(f"{name} option", option, _OPTIONS[name]))
    # Any: what a module attribute's call takes is checked here, by name and by value.
    module: Any = importlib.import_module(f"kvferry.transport.{name}")
    if name == "shm":
        shm: Transport = module.ShmTransport(process)
        return shm
    backend = options.get("backend", "UCX")
    if backend not in ("UCX", "LIBFABRIC"):
        raise ConfigError(f"nixl backend {backend!r} is neither 'UCX' nor 'LIBFABRIC'")
    nixl: Transport = module.NixlTransport(module.NixlOptions(**options), process)
    return nixl


def _unknown(what: str, name: str, known: tuple[str, ...]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    hint = f"; the nearest is {nearest[0]!r} of {', '.join(known)}" if nearest else "; it has none"
    return f"unknown {what} {name!r}{hint}"
