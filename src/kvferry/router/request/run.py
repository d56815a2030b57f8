"""A request from its body to its answer, within its deadline, and the account of how it ended.

``answer`` is the way of every request, from top to bottom. Whatever happens on it, a request gets
one outcome, and a handoff that it leaves open is ended.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from aiohttp import web
from aiohttp.web import RequestPayloadError

from kvferry.errors import LocalProtocolError, RequestError
from kvferry.observe.log import get_logger
from kvferry.protocol.error_answer import ErrorAnswer
from kvferry.protocol.headers import (
    MODE_HEADER,
    READ_BACK_HEADER,
    RETENTION_HEADER,
    refuse_unknown_headers,
)
from kvferry.protocol.params import Mode, Role
from kvferry.router import answers
from kvferry.router.answers import client_is_gone, end_stream_with_error
from kvferry.router.config import DecodeChoice, RouteMode
from kvferry.router.fleet.registry import InstanceView
from kvferry.router.headers import wanted_mode, wanted_read_back, wanted_retention_s
from kvferry.router.history.keys import salted, tenant_of
from kvferry.router.history.recall import Conversation
from kvferry.router.metrics import GOOD_OUTCOMES, Outcome
from kvferry.router.request.legs import DecodeLeg, run_prefill_leg
from kvferry.router.request.parsing import parse_body
from kvferry.router.request.plan import PlainReason, Plan, RouteRequest, plan
from kvferry.router.request.push import push
from kvferry.router.request.state import MAX_ATTEMPTS_PER_LEG, RequestState
from kvferry.router.upstream import LegAnswer, LegFailedError, LegFailure

_log = get_logger(__name__)


async def run(state: RequestState) -> web.StreamResponse:
    """Return the client's answer.

    Raises ``asyncio.CancelledError`` when the client has left.
    """
    limit_s = state.tools.config.request_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            await answer(state)
    except TimeoutError:
        await _cut_short(state, answers.timed_out("the request", limit_s))
    except RequestError as error:
        state.finish_with_error(Outcome.BAD_REQUEST, answers.of_request_error(error))
    except ConnectionResetError:
        # Writing to the client failed before its leaving was told; nobody gets this answer.
        state.finish(state.outcome_if_client_left(), state.stream or web.Response(status=499))
    except asyncio.CancelledError:
        if client_is_gone(state.request):
            state.outcome = state.outcome_if_client_left()
            raise
        # Cancelled by the router's own shutdown: the client is still there to be told.
        await _cut_short(state, answers.shutting_down())
    finally:
        _account(state)
    if state.response is None:
        raise LocalProtocolError("no request is left without an answer")
    return state.response


async def answer(state: RequestState) -> None:
    """Answer the client. Raises ``RequestError`` when its request is wrong."""
    with state.timing("parse"):
        await _parse(state)
    with state.timing("conversation"):
        _find_conversation(state)
    with state.timing("decide"):
        route = plan(state.route, state.tools.fleet.snapshot())
    state.plain_reason = route.plain_reason if route.mode is None else None
    if route.decode is None:
        state.finish_with_error(Outcome.NO_INSTANCE, answers.no_instance("decode"))
        return
    if route.mode is Mode.PUSH:
        with state.timing("push"):
            is_pushed = await push(state)
        if not is_pushed:
            pull = replace(state.route, mode=RouteMode.PULL)
            route = plan(pull, state.tools.fleet.snapshot())
    if route.mode is Mode.PULL:
        with state.timing("prefill"):
            await _prefill(state, route)
    if state.response is None:
        state.is_prefill_done = True
        with state.timing("decode"):
            await _decode(state)


async def _parse(state: RequestState) -> None:
    """Read and check the body; transfer parameters of the client's own end here."""
    request, config = state.request, state.tools.config
    if "Content-Encoding" in request.headers:
        raise RequestError("compressed request bodies are not supported", status=415)
    try:
        body = await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise answers.body_too_large(config.max_body_bytes) from error
    except RequestPayloadError as error:
        raise RequestError(f"the request body cannot be read: {error}") from error
    state.body = parse_body(body)


def _find_conversation(state: RequestState) -> None:
    """Find out whose request it is and which conversation it belongs to; salt the body for its
    tenant."""
    tools, headers = state.tools, state.request.headers
    config = tools.config.conversations
    refuse_unknown_headers(headers, config.header_names)
    read_back = wanted_read_back(headers.get(READ_BACK_HEADER), config.read_back)
    retention_s = wanted_retention_s(headers.get(RETENTION_HEADER))
    mode = wanted_mode(headers.get(MODE_HEADER), tools.config.mode)
    tenant = tenant_of(headers, config.tenant_header)
    state.body = salted(state.body, tenant)
    keys = tools.recogniser.keys_of(tenant, state.request.path, headers, state.body)
    recollection, result = tools.recall.look_up(keys)
    tools.figures.conversation_lookups[result].inc()
    state.conversation = Conversation(
        keys=keys, read_back=read_back, retention_s=retention_s, recollection=recollection
    )
    state.route = RouteRequest(
        traits=state.body.traits,
        mode=mode,
        holder_url="" if recollection is None else recollection.holder.url,
        prefers_holder=recollection is not None and recollection.is_same,
        holder_slack_requests=config.holder_slack_requests,
        is_pushed_by_load=tools.config.decode_choice is DecodeChoice.LATE,
    )


# -- a pull's prefill leg ---------------------------------------------------------------------
async def _prefill(state: RequestState, route: Plan) -> None:
    """Have an instance compute the prompt and offer its KV: up to two, each for a transfer id of
    its own. Else note why decode does it all, or answer with an error."""
    figures = state.tools.figures
    figures.pulls.inc()
    failure: LegFailedError | None = None
    tried_urls: list[str] = []
    view = route.prefill
    while view is not None:
        if tried_urls:
            figures.leg_retries[Role.PREFILL].inc()
        tried_urls.append(view.url)
        transfer_id = state.open_transfer(view)
        try:
            prefilled = await run_prefill_leg(state, view, transfer_id, Mode.PULL)
        except LegFailedError as error:
            failure = error
            state.tools.note_failure(view, error)
            state.end_transfer()
        else:
            _take_offer(state, view, prefilled)
            return
        is_last = len(tried_urls) == MAX_ATTEMPTS_PER_LEG
        view = None if is_last else state.choose_prefill(tried_urls)
    reason = route.plain_reason if failure is None else PlainReason.PREFILL_FAILED
    state.finish_without_prefill(failure, reason)


def _take_offer(state: RequestState, view: InstanceView, prefilled: LegAnswer) -> None:
    if prefilled.status >= 400:
        # The request itself is refused: nothing was computed, so there is nothing to end.
        state.transfer = None
        state.finish(Outcome.BAD_REQUEST, answers.passed_on(prefilled, state.request_id))
        return
    state.offered = view.dialect.offered_params(prefilled.body)
    if state.offered is None:
        state.plain_reason = PlainReason.NOTHING_OFFERED
        state.end_transfer()


# -- the decode leg of a pull, or of a request that is not split ------------------------------
async def _decode(state: RequestState) -> None:
    """Answer the client: up to two instances get the same offer, until the client has a byte."""
    figures = state.tools.figures
    if state.plain_reason is not None:
        figures.plain_decodes[state.plain_reason].inc()
    failure: LegFailedError | None = None
    tried_urls: list[str] = []
    for attempt in range(MAX_ATTEMPTS_PER_LEG):
        choice = state.choose_decode(tried_urls)
        if choice.has_only_others:
            _drop_offer(state, PlainReason.INCOMPATIBLE)
            state.end_transfer()
            choice = state.choose_decode(tried_urls)
        elif choice.view is None and state.plain_reason is PlainReason.OFFER_USED:
            choice = state.choose_decode(())  # It may be the transfer that failed.
        view = choice.view
        if view is None:
            break
        tried_urls.append(view.url)
        if attempt > 0:
            figures.leg_retries[Role.DECODE].inc()
        try:
            await _run_decode_leg(state, view)
        except LegFailedError as error:
            failure = error
            state.tools.note_failure(view, error)
            is_sent = error.cause is not LegFailure.UNREACHABLE
            if state.offered is not None and is_sent and not view.dialect.traits.checks_offers:
                # It may have been taken, and nobody would notice that it is taken twice.
                _drop_offer(state, PlainReason.OFFER_USED)
        else:
            return
    state.finish_without_decode(failure)


def _drop_offer(state: RequestState, reason: PlainReason) -> None:
    """Have decode do it alone."""
    state.offered = None
    state.plain_reason = reason
    state.tools.figures.plain_decodes[reason].inc()


async def _run_decode_leg(state: RequestState, view: InstanceView) -> None:
    if state.offered is None or state.transfer is None:
        body, headers = state.body.encoded, state.headers
    else:
        body, headers = state.decode_message(view, state.offered, state.transfer.transfer_id)
    leg = DecodeLeg(state, view)
    try:
        leg.limit_begin()
        await leg.open(body, headers)
        await leg.deliver()
    finally:
        leg.close()
    if state.outcome in GOOD_OUTCOMES and state.outcome is not Outcome.MISMATCH:
        state.transfer = None  # Else nobody has taken it: prefill need not hold it.


# -- its end ----------------------------------------------------------------------------------
async def _cut_short(state: RequestState, error: ErrorAnswer) -> None:
    if state.stream is None:
        state.finish_with_error(Outcome.TIMEOUT, error)
    else:
        await end_stream_with_error(state.request, state.stream, error)
        state.finish(Outcome.TIMEOUT, state.stream)


def _account(state: RequestState) -> None:
    """Count the outcome, and end a handoff that nobody else will."""
    figures = state.tools.figures
    state.end_transfer()
    outcome = state.outcome
    if outcome is None:  # Something failed in a way that nothing should.
        outcome = Outcome.DECODE_FAILED if state.is_prefill_done else Outcome.PREFILL_FAILED
    figures.requests[outcome].inc()
    gone = figures.client_gone.get(outcome)
    if gone is not None:
        gone.inc()
    _log.debug(
        "a request has ended",
        extra={"fields": {"request_id": state.request_id, "outcome": outcome.value}},
    )
