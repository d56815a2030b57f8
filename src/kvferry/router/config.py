"""The router's options, checked once at the start. Knows no socket and no environment."""

from __future__ import annotations

import enum
import math
import re
from dataclasses import dataclass, field

from kvferry.errors import ConfigError
from kvferry.protocol.user_key import UserKeyFile
from kvferry.router.engines import EngineConfig
from kvferry.router.urls import normalise_url

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


class OnPrefillFailure(enum.StrEnum):
    """What happens when no prefill instance could do its part."""

    ERROR = "error"
    """The client gets an error."""
    DECODE = "decode"
    """A decode instance computes the prompt itself; counted as ``fallback_decode_only``."""
    RETRY = "retry"
    """Push: both legs are begun again, once, with another prefill instance; then as ``DECODE``."""


class RouteMode(enum.StrEnum):
    """How KV is to move, as configured or asked for; the instances decide what is possible."""

    AUTO = "auto"
    """Push where both chosen instances can, else pull."""
    PULL = "pull"
    PUSH = "push"
    """As ``AUTO``, but the choice is made among those that can push, where there are any."""


class ReadBack(enum.StrEnum):
    """Whether prefill is told who probably holds a conversation."""

    AUTO = "auto"
    """Where that is known, and both instances can read back."""
    OFF = "off"


class DecodeChoice(enum.StrEnum):
    """When a push's decode instance is chosen; the values are metric labels."""

    EARLY = "early"
    """Together with the prefill instance: both legs are dispatched at once."""
    LATE = "late"
    """By load, once prefill has come some way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationConfig:
    """Options of how conversations are recognised and used. Raises ``ConfigError``."""

    id_headers: tuple[str, ...] = ("X-Session-ID", "X-Conversation-ID")
    """Headers that may name a conversation, the first that is sent counts."""
    tenant_header: str | None = None
    """A header that names the tenant in place of the API key."""
    max_conversations: int = 100_000
    """Ids and turns that are remembered."""
    conversation_ttl_s: float = 480.0
    """How long, from the end of an answer: what instances retain by default."""
    read_back: ReadBack = ReadBack.AUTO
    """For requests that do not say themselves."""
    holder_slack_requests: int = 4
    """By how many requests the holder may be busier than another and still be chosen."""

    @property
    def header_names(self) -> tuple[str, ...]:
        """The headers that are named here."""
        return self.id_headers + (() if self.tenant_header is None else (self.tenant_header,))

    def __post_init__(self) -> None:
        if not self.max_conversations > 0:
            raise ConfigError("--max-conversations must be greater than 0")
        if not 0 < self.conversation_ttl_s < math.inf:
            raise ConfigError("--conversation-ttl-s must be greater than 0")
        if self.holder_slack_requests < 0:
            raise ConfigError("--holder-slack-requests must not be negative")
        for option, names in (
            ("conversation-header", self.id_headers),
            ("tenant-header", () if self.tenant_header is None else (self.tenant_header,)),
        ):
            for name in names:
                if not _HEADER_NAME.fullmatch(name):
                    raise ConfigError(
                        f"--{option}: {name!r} is no name of a header: give letters, digits "
                        "and !#$%&'*+-.^_`|~, such as X-Session-ID"
                    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Options of one router. Raises ``ConfigError`` when one is wrong."""

    prefill_urls: tuple[str, ...]
    decode_urls: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes any free port."""
    cluster_key: bytes | None = None
    """Signs the legs that carry transfer parameters, and is asked for at control ports; None leaves
    legs unsigned."""
    user_key_file: UserKeyFile | None = None
    """Where ``cluster_key`` is from, if it is this user's own."""
    on_prefill_failure: OnPrefillFailure = OnPrefillFailure.DECODE
    mode: RouteMode = RouteMode.AUTO
    """For requests that do not ask for one themselves."""
    decode_choice: DecodeChoice = DecodeChoice.EARLY
    decode_choice_progress: float = 0.5
    """Late choice: the share of the prompt that is computed by then, 0 to 1."""
    max_outstanding_handoffs: int = 32
    """Pushes for one decode instance whose prefill is neither admitted nor answered."""
    conversations: ConversationConfig = field(default_factory=ConversationConfig)
    engines: EngineConfig = field(default_factory=EngineConfig)
    queue_timeout_s: float = 30.0
    """How long a request waits for such a place."""
    request_timeout_s: float = 600.0
    """Bound of a whole request, its stream included."""
    prefill_timeout_s: float = 120.0
    """Bound of a prefill leg, and of the wait for the first byte of a streamed decode leg, which
    counts from the end of prefill."""
    connect_timeout_s: float = 5.0
    cancel_timeout_s: float = 5.0
    """Bound of telling the instances that a handoff has ended."""
    health_interval_s: float = 2.0
    health_timeout_s: float = 2.0
    shutdown_timeout_s: float = 30.0
    """How long running requests may go on after the router was told to stop."""
    max_inflight: int = 1024
    max_body_bytes: int = 32 * 1024 * 1024
    max_answer_bytes: int = 64 * 1024 * 1024
    """Largest answer that is not a stream; a larger one is an error."""

    def __post_init__(self) -> None:
        for option, urls in (("prefill", self.prefill_urls), ("decode", self.decode_urls)):
            if not urls:
                raise ConfigError(f"--{option} is missing: give at least one instance's URL")
            object.__setattr__(self, f"{option}_urls", tuple(map(normalise_url, urls)))
        self.engines.check_urls(self.prefill_urls, self.decode_urls)
        for option in (
            "request_timeout_s",
            "prefill_timeout_s",
            "connect_timeout_s",
            "cancel_timeout_s",
            "health_interval_s",
            "health_timeout_s",
            "queue_timeout_s",
            "max_outstanding_handoffs",
            "max_inflight",
            "max_body_bytes",
            "max_answer_bytes",
        ):
            if not getattr(self, option) > 0:
                raise ConfigError(f"--{option.replace('_', '-')} must be greater than 0")
        if not 0 <= self.decode_choice_progress <= 1:
            raise ConfigError("--decode-choice-progress must be 0 to 1")
        if self.shutdown_timeout_s < 0:
            raise ConfigError("--shutdown-timeout-s must not be negative")
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"--port must be 0 to 65535, not {self.port}")
