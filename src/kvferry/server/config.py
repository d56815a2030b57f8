"""Options of one instance: the HTTP side's own, joined with the engine's and the exchange's."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.connector.config import ExchangeConfig, is_loopback
from kvferry.engine.config import EngineConfig
from kvferry.errors import ConfigError

DEFAULT_MAX_BODY_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """Where and how HTTP is served. Raises ``ConfigError`` for a value that cannot work."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free port."""
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    inline_tokenize_chars: int = 8192
    """Longer texts are tokenised on a thread of their own."""
    shutdown_timeout_s: float = 5.0
    """For running requests to end after they have been told to."""
    has_dev_endpoints: bool = False
    """Whether anyone who reaches this server may empty its prefix cache."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"port {self.port} is not between 0 and 65535")
        if self.max_body_bytes < 1:
            raise ConfigError(f"max_body_bytes must be at least 1, not {self.max_body_bytes}")
        if not 0 <= self.shutdown_timeout_s < 3600:
            raise ConfigError(
                f"shutdown_timeout_s must be 0 to 3600 seconds, not {self.shutdown_timeout_s}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceConfig:
    """Everything that one instance is started with."""

    model: str
    """A model folder, or the bundled model's name."""
    engine: EngineConfig
    exchange: ExchangeConfig
    http: HttpConfig
    served_model_names: tuple[str, ...] = ()
    """What clients call the model; none: ``model`` itself."""
    transport: str = "auto"
    """``nixl``, ``shm``, or ``auto``: the best that works here."""
    ucx_tls: str | None = None
    """UCX transports for nixl; None leaves UCX its choice."""

    def __post_init__(self) -> None:
        """Refuse to take ``kv_transfer_params`` from whoever reaches this host."""
        if not self.exchange.has_cluster_key and not is_loopback(self.http.host):
            raise ConfigError(
                f"the HTTP address {self.http.host} is reachable from other hosts, and an instance "
                "obeys kv_transfer_params: set a cluster key (--cluster-key-file) or use a "
                "loopback address and let the router face them"
            )
