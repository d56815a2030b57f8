"""Which addresses stay on this host."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """Whether ``host`` is a loopback address; names other than ``localhost`` are not trusted."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_local_address(address: str) -> bool:
    """Whether ``address``, a URL or an endpoint like ``tcp://host:port``, is on loopback."""
    try:
        return is_loopback(urlsplit(address).hostname or "")
    except ValueError:
        return False
