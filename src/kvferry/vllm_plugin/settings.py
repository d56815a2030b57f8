"""The plugin's options: ``kv_connector_extra_config`` as a typed value."""

from __future__ import annotations

import difflib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvferry.connector.config import ExchangeConfig
from kvferry.errors import ConfigError
from kvferry.protocol.hosts import is_loopback
from kvferry.protocol.ids import Epoch, InstanceId, new_epoch
from kvferry.protocol.user_key import find_key

_Seconds = Annotated[float, Meta(gt=0, le=86_400)]
_Share = Annotated[float, Meta(gt=0, le=1)]
_MAX_PORT = 65_535
_Port = Annotated[int, Meta(ge=0, le=_MAX_PORT)]


@dataclass(frozen=True, slots=True)
class WorkerRank:
    """Which of an engine's tensor-parallel workers this is, and the epoch that they share."""

    rank: int = 0
    num_ranks: int = 1
    epoch: Epoch = field(default_factory=new_epoch)


class PluginSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an operator may set; all have defaults. Durations in seconds, shares of the pool."""

    instance_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    """Stable over restarts; default: host name and control port, or the engine's id without one."""
    control_host: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    control_port: _Port = 0
    """0 takes a free port; the router needs one that is known. With tensor parallelism rank 0's;
    the others' follow it."""
    advertise_host: Annotated[str, Meta(min_length=1)] | None = None
    cluster_key_file: Annotated[str, Meta(min_length=1)] | None = None
    no_user_key: bool = False
    """On loopback have no key, where none is given: any user of this host may ask."""
    transport_backend: str = "UCX"
    """NIXL's: ``UCX`` or ``LIBFABRIC``."""
    ucx_tls: Annotated[str, Meta(min_length=1)] | None = None
    recompute_threshold_tokens: Annotated[int, Meta(ge=0)] = 64
    retention_s: Annotated[float, Meta(ge=0, le=86_400)] = 480.0
    max_retained_share: _Share = 0.5
    handoff_lease_s: _Seconds = 30.0
    receive_timeout_s: _Seconds = 10.0
    history_timeout_s: _Seconds = 5.0
    prefill_timeout_s: _Seconds = 300.0
    control_timeout_s: _Seconds = 2.0
    max_held_share: _Share = 0.25
    max_registered_share: _Share = 0.25
    max_quarantine_share: _Share = 0.25
    verify_transfers: bool = False
    """Compare a digest of every moved block, in all modes, with peers that do so too; on a CPU."""

    def check_ports(self, num_ranks: int) -> None:
        """Raise ``ConfigError`` unless each of an engine's ranks has a control port."""
        last_port = self.control_port + num_ranks - 1
        if num_ranks > 1 and not (self.control_port and last_port <= _MAX_PORT):
            raise ConfigError(
                f"tensor parallelism over {num_ranks} ranks needs as many control ports in a row: "
                f"set control_port to the first one, 1 to {_MAX_PORT - num_ranks + 1}"
            )

    def exchange_config(self, engine_id: str, rank: WorkerRank | None = None) -> ExchangeConfig:
        """Return the options of a worker's exchange; None: the only one. Raises ``ConfigError``."""
        worker = rank or WorkerRank()
        key = find_key(
            Path(self.cluster_key_file) if self.cluster_key_file else None,
            os.environ,
            is_local=is_loopback(self.control_host),
            no_user_key=self.no_user_key,
        )
        return ExchangeConfig(
            instance_id=InstanceId(self.instance_id or self._default_name(engine_id)),
            epoch=worker.epoch,
            control_host=self.control_host,
            control_port=self.control_port + worker.rank,
            advertise_host=self.advertise_host,
            cluster_key=key.secret if key else None,
            user_key_file=key.user_file if key else None,
            handoff_lease_s=self.handoff_lease_s,
            receive_timeout_s=self.receive_timeout_s,
            history_timeout_s=self.history_timeout_s,
            prefill_timeout_s=self.prefill_timeout_s,
            control_timeout_s=self.control_timeout_s,
            max_held_share=self.max_held_share,
            max_registered_share=self.max_registered_share,
            max_quarantine_share=self.max_quarantine_share,
            verify_blocks=self.verify_transfers,
        )

    def _default_name(self, engine_id: str) -> str:
        if not self.control_port:
            return f"vllm-{engine_id}"
        return f"{self.advertise_host or socket.gethostname()}:{self.control_port}"


def parse_settings(extra_config: Mapping[str, Any]) -> PluginSettings:
    """Check and convert ``kv_connector_extra_config``. Raises ``ConfigError`` naming what is wrong.

    vLLM itself reads some keys of it; those that kvferry does not know are refused all the same,
    since a misspelt one would be silently ignored.
    """
    known = PluginSettings.__struct_fields__
    for key in extra_config:
        if key not in known:
            (nearest,) = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            raise ConfigError(
                f"kv_connector_extra_config: unknown key {key!r}; the nearest is {nearest!r} of "
                f"{', '.join(known)}"
            )
    try:
        return msgspec.convert(dict(extra_config), PluginSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"kv_connector_extra_config: {error}") from error
