"""Options of one instance: the HTTP side's own, joined with the engine's and the exchange's."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.connector.config import ExchangeConfig
from kvferry.engine.config import EngineConfig
from kvferry.errors import ConfigError
from kvferry.options import check_options, option
from kvferry.protocol.keys import is_loopback
from kvferry.protocol.params import MAX_PORT


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """Where and how HTTP is served. Raises ``ConfigError`` for a value that cannot work."""

    host: str = option("127.0.0.1", "Address that HTTP is served on.")
    port: int = option(0, "0 takes a free port.", minimum=0, maximum=MAX_PORT)
    max_body_bytes: int = 16 * 1024 * 1024
    inline_tokenize_chars: int = 8192
    """Longer texts are tokenised on a thread of their own."""
    shutdown_timeout_s: float = option(
        5.0,
        "How long running requests may take to end on SIGTERM or Ctrl-C.",
        minimum=0,
        maximum=3600,
    )
    has_dev_endpoints: bool = option(
        False,
        "Serve POST /reset_prefix_cache, which forgets earlier prompts; for measurements.",
        flag="--enable-dev-endpoints",
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceConfig:
    """Everything that one instance is started with."""

    model: str
    """A model folder, or the bundled model's name."""
    engine: EngineConfig
    exchange: ExchangeConfig
    http: HttpConfig
    served_model_names: tuple[str, ...] = option(
        (), "What clients call it; repeatable.", flag="--served-model-name"
    )
    """None: ``model`` itself."""
    transport: str = option(
        "auto",
        "How KV moves; auto is nixl where it works, else shm (one host).",
        choices=("auto", "nixl", "shm"),
    )
    ucx_tls: str | None = option(
        None, "UCX's transports for nixl, such as tcp.", default_text="UCX's choice"
    )

    def __post_init__(self) -> None:
        """Refuse to take ``kv_transfer_params`` from whoever reaches this host."""
        check_options(self)
        if not self.exchange.has_cluster_key and not is_loopback(self.http.host):
            raise ConfigError(
                f"the HTTP address {self.http.host} is reachable from other hosts, and an instance "
                "obeys kv_transfer_params: set a cluster key (--cluster-key-file) or use a "
                "loopback address and let the router face them"
            )
