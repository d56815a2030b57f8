"""One request on its way through the pipeline: what is known of it so far, and how it ended."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import msgspec
from aiohttp import web
from multidict import CIMultiDict

from kvferry.errors import LocalProtocolError
from kvferry.protocol.ids import TransferId
from kvferry.router.answers import ErrorAnswer
from kvferry.router.history.recall import Conversation, Recollection
from kvferry.router.request.decider import Decision, PlainReason
from kvferry.router.request.parsing import ParsedBody
from kvferry.router.request.preference import HolderChoice


class Outcome(enum.StrEnum):
    """How a request ended; every request has exactly one."""

    OK = "ok"
    BAD_REQUEST = "bad_request"
    """Refused with a 4xx, by the router or by an engine."""
    PREFILL_FAILED = "prefill_failed"
    DECODE_FAILED = "decode_failed"
    CLIENT_GONE_BEFORE_PREFILL_DONE = "client_gone_before_prefill_done"
    CLIENT_GONE_AFTER_PREFILL = "client_gone_after_prefill"
    """Prefill had finished (or was not needed), and the client had got no byte yet."""
    CLIENT_GONE_STREAMING = "client_gone_streaming"
    MISMATCH = "mismatch"
    """Answered by decode, which computed the prompt: prefill made another one of the request."""
    FALLBACK_DECODE_ONLY = "fallback_decode_only"
    """Answered by a decode instance alone because prefill could not do its part."""
    NO_INSTANCE = "no_instance"
    NO_CREDIT = "no_credit"
    """Too many handoffs were under way for every decode instance, for too long."""
    OVERLOADED = "overloaded"
    TIMEOUT = "timeout"


GOOD_OUTCOMES = (Outcome.OK, Outcome.MISMATCH, Outcome.FALLBACK_DECODE_ONLY)
"""The client has got its whole answer."""


@dataclass(frozen=True, slots=True)
class OpenTransfer:
    """A handoff that was begun, and every instance that may know of it."""

    transfer_id: TransferId
    prefill_url: str
    decode_urls: tuple[str, ...] = ()
    authorization: str | None = None
    """The client's, so that an instance that asks for one also takes the end of a handoff."""


@dataclass(slots=True)
class RequestContext:
    """State of one request; steps fill it in from top to bottom."""

    request: web.Request
    path: str
    request_id: str
    headers: CIMultiDict[str]
    """Headers of a leg, before a signature is added."""
    arrived_s: float
    """On the router's clock."""
    body: ParsedBody | None = None
    conversation: Conversation | None = None
    holder_choice: HolderChoice | None = None
    """How the last choice of a decode instance went; None where no holder is known."""
    decision: Decision | None = None
    transfer: OpenTransfer | None = None
    """Set from before a prefill leg is sent until the handoff is known to have ended."""
    offered: msgspec.Raw | None = None
    """What prefill offered, as it came."""
    is_prefill_done: bool = False
    receive_outcome: str = ""
    """How the decode instance says that its receive has ended; empty: it does not say."""
    plain_reason: PlainReason | None = None
    stream: web.StreamResponse | None = None
    """The client's streamed answer, once it has begun."""
    response: web.StreamResponse | None = None
    """The client's whole answer; set together with ``outcome``."""
    outcome: Outcome | None = None
    step_seconds: dict[str, float] = field(default_factory=dict)

    def finish(self, outcome: Outcome, response: web.StreamResponse) -> None:
        """End the request: no further step runs."""
        self.outcome = outcome
        self.response = response

    def finish_with_error(self, outcome: Outcome, error: ErrorAnswer) -> None:
        """End the request with an error of the router's own."""
        self.finish(outcome, error.as_response())

    @property
    def recollection(self) -> Recollection | None:
        """What is remembered of the request's conversation."""
        return None if self.conversation is None else self.conversation.recollection

    def parsed(self) -> ParsedBody:
        """Return the body. Only for steps after the one that parses it."""
        if self.body is None:
            raise LocalProtocolError("the body is parsed by the first step")
        return self.body

    def outcome_if_client_left(self) -> Outcome:
        """Return the outcome should the client leave now.

        A client that closes once its stream is complete has not left: what is still tidied up
        then is not its business.
        """
        if self.outcome is not None and self.stream is not None and self.response is self.stream:
            return self.outcome
        if self.stream is not None:
            return Outcome.CLIENT_GONE_STREAMING
        if self.is_prefill_done:
            return Outcome.CLIENT_GONE_AFTER_PREFILL
        return Outcome.CLIENT_GONE_BEFORE_PREFILL_DONE
