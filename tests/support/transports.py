"""Which transports can be tested here."""

from __future__ import annotations

import importlib.util

from kvferry.transport.nixl_agent import NIXL_PACKAGES


def available_transports() -> tuple[str, ...]:
    """The names whose dependencies are installed, best first."""
    has_nixl = any(importlib.util.find_spec(package) for package in NIXL_PACKAGES)
    return ("nixl", "shm") if has_nixl else ("shm",)
