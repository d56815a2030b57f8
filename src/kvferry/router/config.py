"""The router's options, checked once at the start. Knows no socket and no environment."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field

from kvferry.errors import ConfigError
from kvferry.options import REQUIRED, check_options, option
from kvferry.protocol.headers import DEFAULT_RETENTION_S
from kvferry.protocol.keys import UserKeyFile
from kvferry.protocol.params import MAX_PORT
from kvferry.router.engines import EngineConfig, normalise_url

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

    id_headers: tuple[str, ...] = option(
        ("X-Session-ID", "X-Conversation-ID"),
        "A header that may name a request's conversation; repeat for more, the first that is sent "
        "counts. Else the body's session_id, conversation_id or prompt_cache_key does, else the "
        "conversation is recognised by how its prompt begins.",
        flag="--conversation-header",
        metavar="NAME",
    )
    tenant_header: str | None = option(
        None,
        "A header that names the tenant in place of the API key; to be set by a gateway that lets "
        "no client set it.",
        metavar="NAME",
        default_text="the API key in Authorization",
    )
    max_conversations: int = option(
        100_000,
        "Conversation ids and turns that are remembered; the least recently used go first.",
        minimum=1,
    )
    conversation_ttl_s: float = option(
        DEFAULT_RETENTION_S,
        "How long a turn is remembered, from the end of its answer: the instances' retention.",
        above=0,
    )
    holder_slack_requests: int = option(
        4,
        "The decode instance that holds a conversation is chosen while it has at most so many more "
        "requests in flight than the least busy one.",
        minimum=0,
    )
    read_back: ReadBack = option(
        ReadBack.AUTO,
        "Tell prefill which instance holds the conversation, so that it reads the history instead "
        "of computing it. A request may set it by X-KVFerry-Read-Back: auto or off.",
        flag="--read-back/--no-read-back",
        parse=lambda is_on: ReadBack.AUTO if is_on else ReadBack.OFF,
    )

    @property
    def header_names(self) -> tuple[str, ...]:
        """The headers that are named here."""
        return self.id_headers + (() if self.tenant_header is None else (self.tenant_header,))

    def __post_init__(self) -> None:
        check_options(self)
        for option_name, names in (
            ("conversation-header", self.id_headers),
            ("tenant-header", () if self.tenant_header is None else (self.tenant_header,)),
        ):
            for name in names:
                if not _HEADER_NAME.fullmatch(name):
                    raise ConfigError(
                        f"--{option_name}: {name!r} is no name of a header: give letters, digits "
                        "and !#$%&'*+-.^_`|~, such as X-Session-ID"
                    )


def _split(values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(url for value in values for url in value.split(",") if url.strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Options of one router. Raises ``ConfigError`` when one is wrong."""

    prefill_urls: tuple[str, ...] = option(
        REQUIRED,
        "A prefill instance; repeat for more, or separate with commas.",
        flag="--prefill",
        metavar="URL",
        parse=_split,
    )
    decode_urls: tuple[str, ...] = option(
        REQUIRED,
        "A decode instance; repeat for more, or separate with commas.",
        flag="--decode",
        metavar="URL",
        parse=_split,
    )
    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8000, "Port to listen on; 0 takes a free one.", minimum=0, maximum=MAX_PORT)
    cluster_key: bytes | None = None
    """Signs the legs that carry transfer parameters, and is asked for at control ports; None leaves
    legs unsigned."""
    user_key_file: UserKeyFile | None = None
    """Where ``cluster_key`` is from, if it is this user's own."""
    on_prefill_failure: OnPrefillFailure = option(
        OnPrefillFailure.DECODE,
        "When prefill fails: let decode do it all, answer an error, or (push) begin both legs "
        "again once with another prefill instance, then let decode do it all.",
        choices=("decode", "error", "retry"),
    )
    mode: RouteMode = option(
        RouteMode.AUTO,
        "How KV moves: auto pushes where both chosen instances can; push chooses among those "
        "that can; what cannot be pushed is pulled. A request may set it by X-KVFerry-Mode.",
        choices=tuple(RouteMode),
    )
    decode_choice: DecodeChoice = option(
        DecodeChoice.EARLY,
        "Push: choose decode at once, in turn; or by load once prefill has come some way. vLLM "
        "does not tell how far it is: with it, late is at once, by load.",
        choices=tuple(DecodeChoice),
    )
    decode_choice_progress: float = option(
        0.5,
        "Late choice: the share of the prompt that is computed by then.",
        minimum=0,
        maximum=1,
    )
    max_outstanding_handoffs: int = option(
        32,
        "Pushes per decode instance whose prefill is not yet admitted or answered; more wait.",
        minimum=1,
    )
    conversations: ConversationConfig = field(default_factory=ConversationConfig)
    engines: EngineConfig = field(default_factory=EngineConfig)
    queue_timeout_s: float = option(
        30.0, "How long a request waits for that; then it is answered 503.", above=0
    )
    request_timeout_s: float = option(600.0, "Bound of a whole request, stream included.", above=0)
    prefill_timeout_s: float = option(
        120.0,
        "Bound of a prefill leg, and then of the wait for a stream's first byte.",
        above=0,
    )
    connect_timeout_s: float = option(5.0, "Bound of connecting to an instance.", above=0)
    cancel_timeout_s: float = 5.0
    """Bound of telling the instances that a handoff has ended."""
    health_interval_s: float = option(
        2.0,
        "Time between two probes of an instance; half of it once one went unanswered.",
        above=0,
    )
    health_timeout_s: float = option(
        2.0,
        "Bound of a probe. After two in a row without an answer, and nothing else from the "
        "instance, what waits for it ends.",
        above=0,
    )
    shutdown_timeout_s: float = option(
        30.0, "How long running requests may go on after a signal to stop.", minimum=0
    )
    max_inflight: int = option(1024, "Requests at once; more are answered 429.", minimum=1)
    max_body_bytes: int = option(
        32 * 1024 * 1024, "Largest request body; a larger one is answered 413.", minimum=1
    )
    max_answer_bytes: int = 64 * 1024 * 1024
    """Largest answer that is not a stream; a larger one is an error."""

    def __post_init__(self) -> None:
        for option_name, urls in (("prefill", self.prefill_urls), ("decode", self.decode_urls)):
            if not urls:
                raise ConfigError(f"--{option_name} is missing: give at least one instance's URL")
            object.__setattr__(self, f"{option_name}_urls", tuple(map(normalise_url, urls)))
        self.engines.check_urls(self.prefill_urls, self.decode_urls)
        check_options(self)
