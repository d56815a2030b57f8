"""What a client's leaving counts as, at each point of a request."""

from __future__ import annotations

from typing import cast

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict

from kvferry.router.metrics import Outcome
from kvferry.router.request.state import RequestState, Tools


@pytest.fixture
def state() -> RequestState:
    return RequestState(
        tools=cast(Tools, None),
        request=make_mocked_request("POST", "/v1/completions"),
        request_id="request-1",
        headers=CIMultiDict(),
        arrived_s=0.0,
    )


def test_leaving_before_and_after_prefill_is_told_apart(state: RequestState) -> None:
    assert state.outcome_if_client_left() is Outcome.CLIENT_GONE_BEFORE_PREFILL_DONE
    state.is_prefill_done = True
    assert state.outcome_if_client_left() is Outcome.CLIENT_GONE_AFTER_PREFILL


def test_leaving_in_mid_stream_is_leaving(state: RequestState) -> None:
    state.stream = web.StreamResponse()
    assert state.outcome_if_client_left() is Outcome.CLIENT_GONE_STREAMING


def test_closing_after_the_whole_stream_is_not(state: RequestState) -> None:
    state.stream = web.StreamResponse()
    state.finish(Outcome.OK, state.stream)
    assert state.outcome_if_client_left() is Outcome.OK


def test_a_whole_answer_that_was_not_sent_yet_is_lost(state: RequestState) -> None:
    state.finish(Outcome.OK, web.Response())
    assert state.outcome_if_client_left() is Outcome.CLIENT_GONE_BEFORE_PREFILL_DONE
