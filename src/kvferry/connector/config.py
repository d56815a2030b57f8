"""Options of one instance's KV exchange."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from kvferry.errors import ConfigError, RequestError
from kvferry.options import REQUIRED, check_options, option
from kvferry.protocol.ids import Epoch, InstanceId, new_epoch
from kvferry.protocol.keys import MIN_KEY_BYTES, UserKeyFile, is_loopback
from kvferry.protocol.messages import MAX_NAME_CHARS
from kvferry.protocol.params import MAX_PORT, PeerAddress, is_port

DEFAULT_RECOMPUTE_THRESHOLD_TOKENS = 64


def _random_name() -> InstanceId:
    return InstanceId(f"instance-{secrets.token_hex(4)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeConfig:
    """All durations in seconds, all shares as fractions of the pool."""

    instance_id: InstanceId = option(
        REQUIRED,
        "A name that stays the same over restarts.",
        default_factory=_random_name,
        default_text="a random one",
    )
    epoch: Epoch = field(default_factory=new_epoch)
    control_host: str = option("127.0.0.1", "Address that other instances are heard on.")
    control_port: int = option(
        0, "Port of the same; 0 takes a free one.", minimum=0, maximum=MAX_PORT
    )
    advertise_host: str | None = option(
        None, "What other instances connect to.", default_text="the control host"
    )
    cluster_key: bytes | None = None
    user_key_file: UserKeyFile | None = None
    """Where ``cluster_key`` is from, if it is a user's own, which counts on loopback only."""
    handoff_lease_s: float = option(
        30.0, "How long a finished prefill is held for its reader, unless renewed.", above=0
    )
    renew_interval_s: float = 5.0
    """Between two heartbeats of a receiver; see ``heartbeat_interval_s``."""
    max_renewals: int = 120
    max_lease_s: float = 600.0
    control_timeout_s: float = option(
        2.0, "How long a peer may take to answer one control message.", flag="", above=0
    )
    receive_timeout_s: float = option(
        10.0, "How long KV may take to come; then the prompt is computed here.", above=0
    )
    history_timeout_s: float = option(
        5.0,
        "How long a conversation's KV may take to be read back; then it is computed.",
        flag="--read-back-timeout-s",
        above=0,
    )
    prefill_timeout_s: float = option(
        300.0,
        "Push: how long decode waits for prefill to complete; then it computes the prompt.",
        above=0,
    )
    quarantine_grace_s: float = 5.0
    """How long an abandoned READ may run before its link is torn down."""
    max_registered_share: float = option(
        0.25,
        "Push: share of the pool that may wait for prefills that have not begun.",
        above=0,
        maximum=1,
    )
    max_held_share: float = option(
        0.25, "Share of the pool that finished prefills may hold.", above=0, maximum=1
    )
    max_quarantine_share: float = option(
        0.25,
        "Share of the pool for blocks that an abandoned transfer may still touch.",
        flag="",
        above=0,
        maximum=1,
    )
    max_reader_share: float = 1.0
    """Of the pool, for one reader's leases; offers are bounded by ``max_held_share`` already."""
    max_history_share: float = 0.5
    """Of the pool, for one reader's leases on conversations held here."""
    max_peers: int = 64
    push_heartbeat_s: float = 1.0
    """How often a receiver asks a sender whether it still lives and what it has missed."""
    max_early_registrations: int = 1024
    """Registrations that came before their prefill."""
    max_inflight_bytes: int = 64 * 1024 * 1024
    """Of WRITEs to one receiver, so that a slow one does not stop the others."""
    verify_transfers: bool = option(
        False,
        "Compare a digest of every moved block, in all modes, with peers that do so too. Slow; "
        "only where the blocks lie in host memory.",
        flag="--verify-transfers",
    )

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
        check_options(self)
        if not 0 < len(self.instance_id) <= MAX_NAME_CHARS:
            raise ConfigError(f"instance_id must have 1 to {MAX_NAME_CHARS} characters")
        if self.cluster_key is not None and len(self.cluster_key) < MIN_KEY_BYTES:
            raise ConfigError(f"the cluster key must have at least {MIN_KEY_BYTES} bytes")
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
