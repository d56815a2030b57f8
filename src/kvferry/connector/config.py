"""Options of one instance's KV exchange."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from kvferry.errors import ConfigError, RequestError
from kvferry.protocol.hosts import is_loopback as is_loopback
from kvferry.protocol.ids import Epoch, InstanceId
from kvferry.protocol.params import PeerAddress, is_port
from kvferry.protocol.user_key import UserKeyFile

MIN_CLUSTER_KEY_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeConfig:
    """All durations in seconds, all shares as fractions of the pool."""

    instance_id: InstanceId
    epoch: Epoch
    control_host: str = "127.0.0.1"
    control_port: int = 0
    """0 takes a free port."""
    advertise_host: str | None = None
    """What peers connect to; default ``control_host``."""
    cluster_key: bytes | None = None
    user_key_file: UserKeyFile | None = None
    """Where ``cluster_key`` is from, if it is a user's own, which counts on loopback only."""
    handoff_lease_s: float = 30.0
    renew_interval_s: float = 5.0
    """Between two heartbeats of a receiver; see ``heartbeat_interval_s``."""
    max_renewals: int = 120
    max_lease_s: float = 600.0
    control_timeout_s: float = 2.0
    """How long a peer may take to answer one control message."""
    receive_timeout_s: float = 10.0
    """From asking for blocks until they are there; then the request is recomputed."""
    quarantine_grace_s: float = 5.0
    """How long an abandoned READ may run before its link is torn down."""
    max_held_share: float = 0.25
    """Of the pool, for finished handoffs that wait for their reader."""
    max_reader_share: float = 1.0
    """Of the pool, for one reader's leases; offers are bounded by ``max_held_share`` already."""
    history_timeout_s: float = 5.0
    """From asking a holder for a conversation's blocks until they are there; then the prompt is
    computed."""
    max_history_share: float = 0.5
    """Of the pool, for one reader's leases on conversations held here."""
    max_quarantine_share: float = 0.25
    max_peers: int = 64
    push_heartbeat_s: float = 1.0
    """How often a receiver asks a sender whether it still lives and what it has missed."""
    prefill_timeout_s: float = 300.0
    """How long a receiver waits for prefill to complete; then the request is recomputed."""
    max_registered_share: float = 0.25
    """Of the pool, for registrations whose prefill has not been admitted."""
    max_early_registrations: int = 1024
    """Registrations that came before their prefill."""
    max_inflight_bytes: int = 64 * 1024 * 1024
    """Of WRITEs to one receiver, so that a slow one does not stop the others."""
    verify_blocks: bool = False
    """Compare a digest of every moved block on both sides."""

    @property
    def heartbeat_interval_s(self) -> float:
        """Between two heartbeats: short enough that two lost ones do not end a hold."""
        return min(self.renew_interval_s, self.handoff_lease_s / 3)

    @property
    def has_cluster_key(self) -> bool:
        """Whether the key is one that counts beyond loopback."""
        return self.cluster_key is not None and self.user_key_file is None

    @property
    def key_text(self) -> str:
        """Whose key is asked for, for people; the key is not in it."""
        if self.user_key_file is not None:
            return str(self.user_key_file)
        return "no key" if self.cluster_key is None else "the cluster key"

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if name.endswith("_s") and not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{name} must be a positive number of seconds, not {value}")
            if name.endswith("_share") and not 0 < value <= 1:
                raise ConfigError(f"{name} must be above 0 and at most 1")
        if not 0 <= self.control_port <= 65_535:
            raise ConfigError(f"control_port {self.control_port} is not between 0 and 65535")
        if self.cluster_key is not None and len(self.cluster_key) < MIN_CLUSTER_KEY_BYTES:
            raise ConfigError(f"the cluster key must have at least {MIN_CLUSTER_KEY_BYTES} bytes")
        if not self.has_cluster_key and not is_loopback(self.control_host):
            raise ConfigError(
                f"the control address {self.control_host} is reachable from other hosts: set a "
                "cluster key (--cluster-key-file) or use a loopback address"
            )


def require_allowed(config: ExchangeConfig, peer: PeerAddress) -> None:
    """Raise ``RequestError`` for a control address that is none, or on another host without a
    cluster key."""
    address = peer.control_address
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not is_port(port):
        raise RequestError(
            f"peer.control_address {address!r} is not of the form tcp://host:port",
            param="kv_transfer_params.peer",
            code="invalid_value",
        )
    if not config.has_cluster_key and not is_loopback(host):
        raise RequestError(
            f"peer.control_address {address} is on another host, which needs a cluster key on both",
            param="kv_transfer_params.peer",
            code="peer_not_allowed",
        )


def endpoint(host: str, port: int) -> str:
    """Return the ZeroMQ endpoint ``tcp://host:port``, IPv6 hosts in brackets."""
    bare = host.strip("[]")
    return f"tcp://[{bare}]:{port}" if ":" in bare else f"tcp://{bare}:{port}"
