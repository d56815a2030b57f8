"""What usage and report say of a prompt whose KV came from several places."""

from __future__ import annotations

import msgspec
import pytest

from kvferry.engine.request import EngineRequest
from kvferry.engine.tokenizer import DetokenizerStream
from kvferry.protocol.ids import RequestId
from kvferry.protocol.kv_report import KvReport
from kvferry.protocol.params import PrefillReport
from kvferry.server.formats import reports_of, usage_of
from kvferry.server.generation import Choice, ChoiceOptions

_DECODED = KvReport(
    arrived_s=1.0, num_prompt_tokens=1000, num_cached_tokens=900, num_received_tokens=100
)
_READ_BACK = PrefillReport(
    num_cached_tokens=160,
    num_read_back_tokens=640,
    num_computed_tokens=200,
    read_back_outcome="received",
)


def _choice(report: KvReport | None) -> Choice:
    request = EngineRequest(request_id=RequestId("r"), prompt_token_ids=())
    choice = Choice(0, request, DetokenizerStream(lambda ids: ""), ChoiceOptions())
    choice.report = report
    return choice


def _recomputed(count: int) -> KvReport:
    return msgspec.structs.replace(
        _DECODED, num_cached_tokens=0, num_received_tokens=0, num_computed_prompt_tokens=count
    )


@pytest.mark.parametrize(
    ("report", "cached"),
    [
        (_DECODED, 900),
        (msgspec.structs.replace(_DECODED, prefill=_READ_BACK), 800),
        (msgspec.structs.replace(_DECODED, prefill=PrefillReport(num_computed_tokens=1000)), 0),
        (msgspec.structs.replace(_recomputed(900), prefill=_READ_BACK), 100),
        (msgspec.structs.replace(_recomputed(1900), prefill=_READ_BACK), 0),
    ],
    ids=["no word of prefill", "read back", "computed", "computed again here", "and again"],
)
def test_cached_tokens_are_those_that_nobody_computed(report: KvReport, cached: int) -> None:
    usage = usage_of([_choice(report)], 1000)
    assert usage["prompt_tokens_details"] == {"cached_tokens": cached}


def test_the_prefill_part_of_a_report_is_shown_whole() -> None:
    report = msgspec.structs.replace(_DECODED, prefill=_READ_BACK)
    shown = reports_of([_choice(report)])["kv_report"]
    assert shown["prefill"] == {
        "num_cached_tokens": 160,
        "num_read_back_tokens": 640,
        "num_read_back_bytes": 0,
        "num_computed_tokens": 200,
        "read_back_outcome": "received",
        "read_back_s": 0.0,
        "compute_s": 0.0,
    }
    assert reports_of([_choice(_DECODED)])["kv_report"]["prefill"] is None


def test_a_choice_without_a_report_shows_none() -> None:
    assert reports_of([_choice(None)]) == {"kv_report": None}
