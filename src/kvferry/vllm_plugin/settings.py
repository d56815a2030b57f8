"""The plugin's options: ``kv_connector_extra_config`` as a typed value."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from kvferry.blocks.retention import RetentionLimits
from kvferry.connector.config import (
    DEFAULT_RECOMPUTE_THRESHOLD_TOKENS,
    ExchangeConfig,
)
from kvferry.errors import ConfigError
from kvferry.options import check_options, option, read_options, same_as
from kvferry.protocol.ids import Epoch, InstanceId, new_epoch
from kvferry.protocol.keys import KeyChoice, is_loopback
from kvferry.protocol.params import MAX_PORT


@dataclass(frozen=True, slots=True)
class WorkerRank:
    """Which of an engine's tensor-parallel workers this is, and the epoch that they share."""

    rank: int = 0
    num_ranks: int = 1
    epoch: Epoch = field(default_factory=new_epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSettings:
    """What an operator may set. Those that ``ExchangeConfig`` has too go there as they are."""

    instance_id: str | None = option(
        None,
        "A name that stays the same over restarts.",
        default_text="host name and control port, or the engine's id without one",
    )
    control_host: str = same_as(ExchangeConfig, "control_host")
    control_port: int = same_as(
        ExchangeConfig,
        "control_port",
        help="Port of the same; 0 takes a free one, but the router needs one that is known. With "
        "tensor parallelism rank 0's; the others' follow it.",
    )
    advertise_host: str | None = same_as(ExchangeConfig, "advertise_host")
    cluster_key_file: Path | None = same_as(KeyChoice, "cluster_key_file")
    no_user_key: bool = same_as(KeyChoice, "no_user_key")
    transport_backend: str = option("UCX", "NIXL's: UCX, or LIBFABRIC for EFA.")
    ucx_tls: str | None = option(
        None,
        "UCX's transports, such as tcp.",
        default_text="UCX_TLS, else UCX's choice without System V's shared memory, which it opens "
        "to the user's group",
    )
    recompute_threshold_tokens: int = option(
        DEFAULT_RECOMPUTE_THRESHOLD_TOKENS,
        "Fewer missing prompt tokens than this are computed, not moved.",
        minimum=0,
    )
    retention_s: float = same_as(RetentionLimits, "duration_s")
    max_retained_share: float = same_as(RetentionLimits, "max_share")
    handoff_lease_s: float = same_as(ExchangeConfig, "handoff_lease_s")
    receive_timeout_s: float = same_as(ExchangeConfig, "receive_timeout_s")
    history_timeout_s: float = same_as(ExchangeConfig, "history_timeout_s")
    prefill_timeout_s: float = same_as(ExchangeConfig, "prefill_timeout_s")
    control_timeout_s: float = same_as(ExchangeConfig, "control_timeout_s")
    max_held_share: float = same_as(ExchangeConfig, "max_held_share")
    max_registered_share: float = same_as(ExchangeConfig, "max_registered_share")
    max_quarantine_share: float = same_as(ExchangeConfig, "max_quarantine_share")
    verify_transfers: bool = same_as(ExchangeConfig, "verify_transfers")

    def __post_init__(self) -> None:
        check_options(self, has_flags=False)

    def check_ports(self, num_ranks: int) -> None:
        """Raise ``ConfigError`` unless each of an engine's ranks has a control port."""
        last_port = self.control_port + num_ranks - 1
        if num_ranks > 1 and not (self.control_port and last_port <= MAX_PORT):
            raise ConfigError(
                f"tensor parallelism over {num_ranks} ranks needs as many control ports in a row: "
                f"set control_port to the first one, 1 to {MAX_PORT - num_ranks + 1}"
            )

    def exchange_config(self, engine_id: str, rank: WorkerRank | None = None) -> ExchangeConfig:
        """Return the options of a worker's exchange; None: the only one. Raises ``ConfigError``."""
        worker = rank or WorkerRank()
        choice = KeyChoice(cluster_key_file=self.cluster_key_file, no_user_key=self.no_user_key)
        key = choice.find(os.environ, is_local=is_loopback(self.control_host))
        own = {entry.name for entry in fields(self)}
        shared: dict[str, Any] = {
            entry.name: getattr(self, entry.name)
            for entry in fields(ExchangeConfig)
            if entry.name in own
        }
        shared |= {
            "instance_id": InstanceId(self.instance_id or self._default_name(engine_id)),
            "epoch": worker.epoch,
            "control_port": self.control_port + worker.rank,
            "cluster_key": key.secret if key else None,
            "user_key_file": key.user_file if key else None,
        }
        return ExchangeConfig(**shared)

    def _default_name(self, engine_id: str) -> str:
        if not self.control_port:
            return f"vllm-{engine_id}"
        return f"{self.advertise_host or socket.gethostname()}:{self.control_port}"


def parse_settings(extra_config: Mapping[str, Any]) -> PluginSettings:
    """Check and convert ``kv_connector_extra_config``. Raises ``ConfigError`` naming what is wrong.

    vLLM itself reads some keys of it; those that kvferry does not know are refused all the same,
    since a misspelt one would be silently ignored.
    """
    return read_options(PluginSettings, extra_config, "kv_connector_extra_config")
