"""The steps before any leg: read and parse the body, decide how the request runs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from aiohttp import web
from aiohttp.web import RequestPayloadError

from kvferry.clock import Clock
from kvferry.errors import RequestError
from kvferry.protocol.params import Role
from kvferry.router import answers
from kvferry.router.cleanup import TransferCleanup
from kvferry.router.config import RouteMode, RouterConfig
from kvferry.router.context import Outcome, RequestContext
from kvferry.router.credits import HandoffCredits
from kvferry.router.decider import MODE_HEADER, decide, wanted_mode
from kvferry.router.dialect import Dialect
from kvferry.router.filters import can_push
from kvferry.router.fleet import Fleet, InstanceView
from kvferry.router.metrics import RouterFigures
from kvferry.router.parsing import parse_body
from kvferry.router.picker import ChoicePolicy, choose
from kvferry.router.signer import Signer
from kvferry.router.upstream import LegFailedError, Upstream

MAX_ATTEMPTS_PER_LEG = 2


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
    signer: Signer
    cleanup: TransferCleanup
    figures: RouterFigures
    dialect: Dialect
    policies: dict[Role, ChoicePolicy]
    push_policies: dict[Role, ChoicePolicy]
    """Among those that can push."""
    credits: HandoffCredits

    def choose(
        self,
        role: Role,
        tried_urls: Collection[str],
        policies: dict[Role, ChoicePolicy] | None = None,
    ) -> InstanceView | None:
        """Return the instance for the next attempt at a leg, None when none is left."""
        policy = (policies or self.policies)[role]
        return choose(self.fleet.snapshot(), role, policy, excluded_urls=tried_urls)

    def end_transfer(self, context: RequestContext) -> None:
        """Have every instance told that the context's handoff has ended."""
        if context.transfer is not None:
            self.cleanup.cancel(context.transfer)
            context.transfer = None

    def note_failure(self, view: InstanceView, failure: LegFailedError) -> None:
        """Count a failed leg, and doubt the instance where the failure gives reason to."""
        self.figures.leg_failed(view.url, view.role, failure.cause.value)
        if failure.cause.doubts_instance:
            self.fleet.report_connection_failure(view.url, str(failure))


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
        context.decision = decide(context.parsed().traits, may_push=self._may_push(wanted))
        context.plain_reason = context.decision.plain_reason

    def _may_push(self, wanted: RouteMode) -> bool:
        if wanted is RouteMode.PULL:
            return False
        tools = self._tools
        policies = tools.push_policies if wanted is RouteMode.PUSH else tools.policies
        views = [tools.choose(role, (), policies) for role in Role]
        return all(view is not None and can_push(view) for view in views)
