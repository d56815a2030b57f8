"""One request on its way: what is known of it so far, what it works with, and how it has ended."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import msgspec
from aiohttp import web
from multidict import CIMultiDict

from kvferry.clock import Clock
from kvferry.protocol.error_answer import ErrorAnswer
from kvferry.protocol.ids import TransferId, new_transfer_id
from kvferry.protocol.params import Role
from kvferry.router import answers
from kvferry.router.config import OnPrefillFailure, RouterConfig
from kvferry.router.fleet.registry import Fleet, InstanceView
from kvferry.router.history.keys import Recogniser
from kvferry.router.history.recall import Conversation, Recall
from kvferry.router.metrics import Outcome, RouterFigures
from kvferry.router.request.credits import HandoffCredits
from kvferry.router.request.parsing import NO_BODY, ParsedBody
from kvferry.router.request.plan import (
    ANYBODY,
    Choice,
    HolderChoice,
    PlainReason,
    RouteRequest,
    choose_decode,
    choose_prefill,
)
from kvferry.router.request.transfers import OpenTransfer, Signer, TransferCleanup
from kvferry.router.upstream import LegFailedError, LegFailure, Upstream

MAX_ATTEMPTS_PER_LEG = 2
_NUM_DOUBTS_OF_ENDING = 5
"""One that is being stopped answers its probes well until it has ended: others get its share."""
_MISMATCH = "mismatch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What requests work with; one set for a router."""

    config: RouterConfig
    clock: Clock
    fleet: Fleet
    upstream: Upstream
    signer: Signer
    cleanup: TransferCleanup
    figures: RouterFigures
    credits: HandoffCredits
    recall: Recall
    recogniser: Recogniser

    def note_failure(self, view: InstanceView, failure: LegFailedError) -> None:
        """Count a failed leg, and doubt the instance where the failure gives reason to."""
        self.figures.leg_failed(view.url, view.role, failure.cause.value)
        if failure.cause.doubts_instance:
            is_ending = failure.cause is LegFailure.ABORTED
            num_doubts = _NUM_DOUBTS_OF_ENDING if is_ending else 0
            self.fleet.report_connection_failure(view.url, str(failure), num_doubts=num_doubts)


@dataclass(slots=True, kw_only=True)
class RequestState:
    """One request; filled in from top to bottom."""

    tools: Tools
    request: web.Request
    request_id: str
    headers: CIMultiDict[str]
    """Of a leg, before a signature is added."""
    arrived_s: float
    """On the router's clock."""
    body: ParsedBody = NO_BODY
    conversation: Conversation | None = None
    route: RouteRequest = ANYBODY
    holder_choice: HolderChoice | None = None
    """How the last choice of a decode instance went; None where no holder is preferred."""
    transfer: OpenTransfer | None = None
    """Set from before a prefill leg is sent until the handoff is known to have ended."""
    offered: msgspec.Raw | None = None
    """What prefill offered, as it came."""
    is_prefill_done: bool = False
    receive_outcome: str = ""
    """How the decode instance says that its receive has ended; empty: it does not say."""
    plain_reason: PlainReason | None = None
    """Why decode does it all, or does now."""
    stream: web.StreamResponse | None = None
    """The client's streamed answer, once it has begun."""
    response: web.StreamResponse | None = None
    """The client's whole answer; set together with ``outcome``."""
    outcome: Outcome | None = None

    # -- its end ------------------------------------------------------------------------------
    def finish(self, outcome: Outcome, response: web.StreamResponse) -> None:
        """Note the client's answer: nothing more is begun for it."""
        self.outcome = outcome
        self.response = response

    def finish_with_error(self, outcome: Outcome, error: ErrorAnswer) -> None:
        """Answer with an error of the router's own."""
        self.finish(outcome, error.as_response())

    @property
    def good_outcome(self) -> Outcome:
        """The outcome of a request that decode has answered whole."""
        if self.receive_outcome == _MISMATCH:
            return Outcome.MISMATCH
        is_fallback = self.plain_reason is not None and self.plain_reason.is_fallback
        return Outcome.FALLBACK_DECODE_ONLY if is_fallback else Outcome.OK

    def finish_without_prefill(
        self, failure: LegFailedError | None, plain_reason: PlainReason | None
    ) -> None:
        """Let decode do it all for ``plain_reason``, or answer with an error, as configured.

        ``failure``: that of the last prefill leg; None: no instance was left.
        """
        is_full = failure is not None and failure.cause is LegFailure.OVERLOADED
        if is_full or self.tools.config.on_prefill_failure is OnPrefillFailure.ERROR:
            self._finish_with_failure(Role.PREFILL, failure)
        else:
            self.plain_reason = plain_reason

    def finish_without_decode(self, failure: LegFailedError | None) -> None:
        """Answer with the last decode leg's failure; None: no instance was left."""
        self._finish_with_failure(Role.DECODE, failure)

    def _finish_with_failure(self, role: Role, failure: LegFailedError | None) -> None:
        is_prefill = role is Role.PREFILL
        outcome = Outcome.PREFILL_FAILED if is_prefill else Outcome.DECODE_FAILED
        if failure is None:
            self.finish_with_error(Outcome.NO_INSTANCE, answers.no_instance(role.value))
        elif failure.answer is not None:
            is_full = failure.cause is LegFailure.OVERLOADED
            response = answers.passed_on(failure.answer, self.request_id)
            self.finish(Outcome.OVERLOADED if is_full else outcome, response)
        elif failure.cause is LegFailure.TIMEOUT:
            limit_s = self.tools.config.prefill_timeout_s
            self.finish_with_error(Outcome.TIMEOUT, answers.timed_out(role.value, limit_s))
        else:
            self.finish_with_error(outcome, answers.leg_failed(role.value, str(failure)))

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

    @contextmanager
    def timing(self, step: str) -> Iterator[None]:
        """Count how long a step of the way takes."""
        clock = self.tools.clock
        started_s = clock.monotonic_s()
        try:
            yield
        finally:
            self.tools.figures.observe_step(step, clock.monotonic_s() - started_s)

    # -- its instances ------------------------------------------------------------------------
    def choose_prefill(
        self,
        excluded_urls: Collection[str],
        *,
        must_push: bool = False,
        receiver: InstanceView | None = None,
    ) -> InstanceView | None:
        """Return the instance for a further attempt at a prefill leg, None when none is left."""
        return choose_prefill(
            self.route,
            self.tools.fleet.snapshot(),
            excluded_urls=excluded_urls,
            must_push=must_push,
            receiver=receiver,
        )

    def choose_decode(self, excluded_urls: Collection[str], *, must_push: bool = False) -> Choice:
        """Return the instance for a decode leg, one that fits the open handoff."""
        choice = choose_decode(
            self.route,
            self.tools.fleet.snapshot(),
            excluded_urls=excluded_urls,
            must_push=must_push,
            sender_url="" if self.transfer is None else self.transfer.prefill.url,
        )
        self.holder_choice = choice.holder
        return choice

    # -- its handoff --------------------------------------------------------------------------
    def open_transfer(self, prefill: InstanceView) -> TransferId:
        """Note a handoff as open; to be called before its prefill leg is sent."""
        transfer_id = new_transfer_id()
        authorization = self.headers.get("Authorization")
        self.transfer = OpenTransfer(transfer_id, prefill, authorization=authorization)
        return transfer_id

    def note_receiver(self, view: InstanceView) -> None:
        """Have ``view`` told, too, should the handoff end early."""
        if self.transfer is not None:
            self.transfer = replace(self.transfer, decodes=(*self.transfer.decodes, view))

    def end_transfer(self) -> None:
        """Have every instance told that the handoff has ended."""
        if self.transfer is not None:
            self.tools.cleanup.cancel(self.transfer)
            self.transfer = None

    def leg_headers(
        self, view: InstanceView, body: bytes, transfer_id: TransferId
    ) -> CIMultiDict[str]:
        """Return the headers of a leg of a handoff, signed where there is a cluster key."""
        headers = self.headers.copy()
        headers.update(view.dialect.leg_headers(transfer_id))
        return self.tools.signer.signed(headers, body, transfer_id)

    def decode_message(
        self, view: InstanceView, params: msgspec.Raw, transfer_id: TransferId
    ) -> tuple[bytes, CIMultiDict[str]]:
        """Return body and headers of the handoff's decode leg on ``view``, which is noted for it.

        ``params``: what prefill has offered, or from whom a push is to come.
        """
        conversation = self.conversation
        is_told = conversation is not None and view.can_read_back
        retention_s = conversation.retention_s if conversation is not None and is_told else None
        fields = view.dialect.decode_fields(self.body.fields, params, retention_s)
        body = msgspec.json.encode(fields)
        self.note_receiver(view)
        return body, self.leg_headers(view, body, transfer_id)

    # -- its conversation ---------------------------------------------------------------------
    def note_answer(self, view: InstanceView, answer: bytes | None = None) -> None:
        """Remember that ``view`` answers the request, for the conversation's next turn.

        ``answer``: what it has answered, where that is known as a whole.
        """
        if self.conversation is None:
            return
        kept = None if answer is None else view.dialect.history_in(self.body.fields, answer)
        self.tools.recall.note_answer(self.conversation, view, kept)
