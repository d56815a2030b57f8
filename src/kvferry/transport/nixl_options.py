"""How NIXL is told to reach peers: our options as its settings."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class NixlOptions:
    """How NIXL reaches peers."""

    backend: Literal["UCX", "LIBFABRIC"] = "UCX"
    ucx_tls: str | None = None
    """UCX transports, comma separated, as in ``UCX_TLS``; None: UCX's own choice."""
    ucx_net_devices: str | None = "lo"
    """Network device that UCX listens on, as in ``UCX_NET_DEVICES``; None: all of them, which it
    takes to reach another host. Peers on one host share memory whatever this says."""


def engine_options(options: NixlOptions) -> dict[str, str]:
    """Return UCX's settings for one agent. NIXL splits them at commas: a list goes by environ."""
    if options.backend != "UCX":
        return {}
    settings = {"TLS": options.ucx_tls, "NET_DEVICES": options.ucx_net_devices}
    single = []
    for name, value in settings.items():
        if value is not None and "," in value:
            os.environ[f"UCX_{name}"] = value
        elif value is not None:
            single.append(f"{name}={value}")
    return {"engine_config": ",".join(single)} if single else {}
