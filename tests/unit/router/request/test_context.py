"""What a client's leaving counts as, at each point of a request."""

from __future__ import annotations

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict

from kvferry.router.request.context import Outcome, RequestContext


@pytest.fixture
def context() -> RequestContext:
    return RequestContext(
        request=make_mocked_request("POST", "/v1/completions"),
        path="/v1/completions",
        request_id="request-1",
        headers=CIMultiDict(),
        arrived_s=0.0,
    )


def test_leaving_before_and_after_prefill_is_told_apart(context: RequestContext) -> None:
    assert context.outcome_if_client_left() is Outcome.CLIENT_GONE_BEFORE_PREFILL_DONE
    context.is_prefill_done = True
    assert context.outcome_if_client_left() is Outcome.CLIENT_GONE_AFTER_PREFILL


def test_leaving_in_mid_stream_is_leaving(context: RequestContext) -> None:
    context.stream = web.StreamResponse()
    assert context.outcome_if_client_left() is Outcome.CLIENT_GONE_STREAMING


def test_closing_after_the_whole_stream_is_not(context: RequestContext) -> None:
    context.stream = web.StreamResponse()
    context.finish(Outcome.OK, context.stream)
    assert context.outcome_if_client_left() is Outcome.OK


def test_a_whole_answer_that_was_not_sent_yet_is_lost(context: RequestContext) -> None:
    context.finish(Outcome.OK, web.Response())
    assert context.outcome_if_client_left() is Outcome.CLIENT_GONE_BEFORE_PREFILL_DONE
