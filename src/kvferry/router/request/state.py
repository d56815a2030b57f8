"""What steps work with, and those before any leg that read the body and decide how it runs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from aiohttp import web
from aiohttp.web import RequestPayloadError
from multidict import CIMultiDict

from kvferry.client.dialects import Dialect
from kvferry.clock import Clock
from kvferry.errors import RequestError
from kvferry.protocol.ids import TransferId
from kvferry.protocol.params import Role
from kvferry.router import answers
from kvferry.router.config import DecodeChoice, RouteMode, RouterConfig
from kvferry.router.fleet.leg_wait import LegWaits
from kvferry.router.fleet.registry import Fleet, InstanceView
from kvferry.router.history.recall import Recall
from kvferry.router.metrics import RouterFigures
from kvferry.router.request.context import Outcome, RequestContext
from kvferry.router.request.credits import HandoffCredits
from kvferry.router.request.decider import MODE_HEADER, decide, wanted_mode
from kvferry.router.request.filters import can_push, fitting
from kvferry.router.request.parsing import parse_body
from kvferry.router.request.plan import ChoicePolicy, choose, choose_near
from kvferry.router.request.preference import Preference
from kvferry.router.request.transfers import TransferCleanup
from kvferry.router.signer import Signer
from kvferry.router.upstream import LegFailedError, LegFailure, Upstream

MAX_ATTEMPTS_PER_LEG = 2
_NUM_DOUBTS_OF_ENDING = 5
"""One that is being stopped answers its probes well until it has ended: others get its share."""


class Step(Protocol):
    """One named part of a request's way; fills in the context or ends the request."""

    name: str

    async def run(self, context: RequestContext) -> None:
        """Do the step. May raise ``RequestError`` when the client's request is wrong."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTools:
    """What steps work with; one set for a router."""

    config: RouterConfig
    clock: Clock
    fleet: Fleet
    upstream: Upstream
    waits: LegWaits
    signer: Signer
    cleanup: TransferCleanup
    figures: RouterFigures
    dialect: Dialect
    policies: dict[Role, ChoicePolicy]
    push_policies: dict[Role, ChoicePolicy]
    """Among those that can push."""
    credits: HandoffCredits
    recall: Recall

    @property
    def decode_choice(self) -> DecodeChoice:
        """When a push's decode instance is chosen: early where progress is never told."""
        tells_progress = self.dialect.traits.tells_progress
        return self.config.decode_choice if tells_progress else DecodeChoice.EARLY

    def choose(
        self,
        role: Role,
        tried_urls: Collection[str],
        policies: dict[Role, ChoicePolicy] | None = None,
    ) -> InstanceView | None:
        """Return the instance for the next attempt at a leg, None when none is left."""
        policy = (policies or self.policies)[role]
        return choose(self.fleet.snapshot(), role, policy, excluded_urls=tried_urls)

    def choose_prefill(
        self,
        context: RequestContext,
        tried_urls: Collection[str],
        policies: dict[Role, ChoicePolicy] | None = None,
        *,
        receiver: InstanceView | None = None,
    ) -> InstanceView | None:
        """Return the instance for a prefill leg, None when none is left.

        It exchanges with ``receiver``; where that is not chosen yet, with the conversation's holder
        if it may, else with some decode instance.
        """
        if not self.fleet.is_divided:
            return self.choose(Role.PREFILL, tried_urls, policies)
        snapshot, policies = self.fleet.snapshot(), policies or self.policies
        partners = [receiver] if receiver else policies[Role.DECODE].candidates(snapshot.decode)
        holder = context.recollection.holder.url if context.recollection else ""
        view = None
        for among in ([partner for partner in partners if partner.url == holder], partners):
            if view is None and among:
                policy = policies[Role.PREFILL].among(fitting(among))
                view = choose(snapshot, Role.PREFILL, policy, excluded_urls=tried_urls)
        return view

    def choose_decode(
        self,
        context: RequestContext,
        tried_urls: Collection[str],
        policies: dict[Role, ChoicePolicy] | None = None,
    ) -> InstanceView | None:
        """Return the instance for a decode leg, the conversation's holder where that may be.

        It exchanges with the prefill instance of the open handoff, where there is one.
        """
        context.holder_choice = None
        snapshot, policy = self.fleet.snapshot(), (policies or self.policies)[Role.DECODE]
        if context.transfer is not None and self.fleet.is_divided:
            sender = self.fleet.view(context.transfer.prefill_url, Role.PREFILL)
            policy = policy.among(fitting([sender] if sender else []))
        recollection = context.recollection
        if recollection is None or not recollection.is_same:
            return choose(snapshot, Role.DECODE, policy, excluded_urls=tried_urls)
        slack = self.config.conversations.holder_slack_requests
        preference = Preference(recollection.holder.url, slack)
        view, context.holder_choice = choose_near(
            snapshot, policy, preference, excluded_urls=tried_urls
        )
        return view

    def has_only_others(self, context: RequestContext, tried_urls: Collection[str]) -> bool:
        """Whether a decode instance is left, but none that exchanges with the open handoff's."""
        if context.transfer is None or not self.fleet.is_divided:
            return False
        is_left = self.choose(Role.DECODE, tried_urls) is not None
        return is_left and self.choose_decode(context, tried_urls) is None

    def choose_receiver(
        self, context: RequestContext, tried_urls: Collection[str]
    ) -> InstanceView | None:
        """Return the decode instance of a push whose prefill instance is not chosen yet."""
        policies, snapshot = self.push_policies, self.fleet.snapshot()
        if not self.fleet.is_divided:
            return self.choose_decode(context, tried_urls, policies)
        senders = policies[Role.PREFILL].candidates(snapshot.prefill)
        policy = policies[Role.DECODE].among(fitting(senders))
        return self.choose_decode(context, tried_urls, {**policies, Role.DECODE: policy})

    def note_answer(
        self, context: RequestContext, view: InstanceView, answer: bytes | None = None
    ) -> None:
        """Remember that ``view`` answers the request, for the conversation's next turn.

        ``answer``: what it has answered, where that is known as a whole.
        """
        if context.conversation is None:
            return
        kept = None if answer is None else self.dialect.history_in(context.parsed().fields, answer)
        self.recall.note_answer(context.conversation, view, kept)

    def leg_headers(
        self, context: RequestContext, body: bytes, transfer_id: TransferId
    ) -> CIMultiDict[str]:
        """Return the headers of a leg of a handoff, signed where there is a cluster key."""
        headers = context.headers.copy()
        headers.update(self.dialect.leg_headers(transfer_id))
        return self.signer.signed(headers, body, transfer_id)

    def retention_s(self, context: RequestContext, view: InstanceView) -> float | None:
        """Return what ``view`` is to be told of retention; None where it is told nothing."""
        conversation = context.conversation
        if conversation is None or not view.can_read_back:
            return None
        return conversation.retention_s

    def end_transfer(self, context: RequestContext) -> None:
        """Have every instance told that the context's handoff has ended."""
        if context.transfer is not None:
            self.cleanup.cancel(context.transfer)
            context.transfer = None

    def note_failure(self, view: InstanceView, failure: LegFailedError) -> None:
        """Count a failed leg, and doubt the instance where the failure gives reason to."""
        self.figures.leg_failed(view.url, view.role, failure.cause.value)
        if failure.cause.doubts_instance:
            is_ending = failure.cause is LegFailure.ABORTED
            num_doubts = _NUM_DOUBTS_OF_ENDING if is_ending else 0
            self.fleet.report_connection_failure(view.url, str(failure), num_doubts=num_doubts)


class ParseStep:
    """Reads and checks the body; transfer parameters of the client's own end here."""

    name = "parse"

    def __init__(self, tools: StepTools) -> None:
        self._tools = tools

    async def run(self, context: RequestContext) -> None:
        """Fill in ``body``, or refuse one that is too large or malformed."""
        if "Content-Encoding" in context.request.headers:
            raise RequestError("compressed request bodies are not supported", status=415)
        try:
            body = await context.request.read()
        except web.HTTPRequestEntityTooLarge:
            error = answers.body_too_large(self._tools.config.max_body_bytes)
            context.finish_with_error(Outcome.BAD_REQUEST, error)
            return
        except RequestPayloadError as error:
            raise RequestError(f"the request body cannot be read: {error}") from error
        context.body = parse_body(body)


class DecideStep:
    """Decides how the request runs; refuses it at once when nobody could decode it."""

    name = "decide"

    def __init__(self, tools: StepTools) -> None:
        self._tools = tools

    async def run(self, context: RequestContext) -> None:
        """Fill in ``decision``."""
        asked = context.request.headers.get(MODE_HEADER)
        wanted = wanted_mode(asked, self._tools.config.mode)
        if self._tools.choose(Role.DECODE, []) is None:
            context.finish_with_error(Outcome.NO_INSTANCE, answers.no_instance("decode"))
            return
        may_push = self._may_push(context, wanted)
        context.decision = decide(context.parsed().traits, may_push=may_push)
        context.plain_reason = context.decision.plain_reason

    def _may_push(self, context: RequestContext, wanted: RouteMode) -> bool:
        if wanted is RouteMode.PULL:
            return False
        tools = self._tools
        if wanted is RouteMode.PUSH:
            decode = tools.choose_receiver(context, ())
            prefill = tools.choose_prefill(context, (), tools.push_policies, receiver=decode)
        else:
            decode = tools.choose_decode(context, ())
            prefill = tools.choose_prefill(context, (), receiver=decode)
        return all(view is not None and can_push(view) for view in (prefill, decode))
