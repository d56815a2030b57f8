"""Transports by name. The only importer of those that need more than this package.

Nothing is imported before it is asked for.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from kvferry.errors import ConfigError
from kvferry.transport.base import Transport
from kvferry.transport.host import ProcessIdentity

_Factory = Callable[[dict[str, object], ProcessIdentity | None], Transport]
_NIXL_PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl")


def transport_names() -> tuple[str, ...]:
    """Return all names that ``create_transport`` takes, best first."""
    return tuple(_factories())


def available_transports() -> tuple[str, ...]:
    """Return the names whose dependencies are installed, best first."""
    has_nixl = any(importlib.util.find_spec(package) for package in _NIXL_PACKAGES)
    return tuple(name for name in transport_names() if name != "nixl" or has_nixl)


def default_transport() -> str:
    """Return "nixl" where it really imports, else "shm"."""
    for package in _NIXL_PACKAGES:
        if importlib.util.find_spec(package) is None:
            continue
        try:
            importlib.import_module("kvferry.transport.nixl").load_nixl()
        except (ConfigError, ImportError):
            return "shm"
        return "nixl"
    return "shm"


def create_transport(
    name: str, *, process: ProcessIdentity | None = None, **options: object
) -> Transport:
    """Return a fresh transport. ``process`` is who we say we are, by default the real one.

    ``nixl`` takes ``backend`` ("UCX" or "LIBFABRIC"), ``ucx_tls`` and ``ucx_net_devices``;
    ``shm`` takes none. Raises ``ConfigError`` for a name or an option that does not exist.
    """
    factories = _factories()
    if name not in factories:
        raise ConfigError(_unknown("transport", name, factories))
    return factories[name](options, process)


def _factories() -> dict[str, _Factory]:
    return {"nixl": _create_nixl, "shm": _create_shm}


def _create_nixl(options: dict[str, object], process: ProcessIdentity | None) -> Transport:
    # Any: what a module attribute's call takes is checked below, by name and by value.
    nixl: Any = importlib.import_module("kvferry.transport.nixl")
    _require_known("nixl", options, ("backend", "ucx_tls", "ucx_net_devices"))
    backend = options.get("backend", "UCX")
    if backend not in ("UCX", "LIBFABRIC"):
        raise ConfigError(f"nixl backend {backend!r} is neither 'UCX' nor 'LIBFABRIC'")
    transport: Transport = nixl.NixlTransport(nixl.NixlOptions(**options), process)
    return transport


def _create_shm(options: dict[str, object], process: ProcessIdentity | None) -> Transport:
    _require_known("shm", options, ())
    shm: Any = importlib.import_module("kvferry.transport.shm")  # Any: a module's attribute.
    transport: Transport = shm.ShmTransport(process)
    return transport


def _require_known(name: str, options: dict[str, object], known: tuple[str, ...]) -> None:
    for option in options:
        if option not in known:
            raise ConfigError(_unknown(f"{name} option", option, known))


def _unknown(what: str, name: str, known: object) -> str:
    names = [str(entry) for entry in known] if isinstance(known, dict | tuple) else []
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
    hint = f"; the nearest is {nearest[0]!r} of {', '.join(names)}" if nearest else "; it has none"
    return f"unknown {what} {name!r}{hint}"
