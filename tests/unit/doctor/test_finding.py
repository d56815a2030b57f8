"""Findings as text and as a record."""

from __future__ import annotations

import json

from kvferry.doctor.deployment_checks import findings_of
from kvferry.doctor.facts import RouterFacts
from kvferry.doctor.finding import (
    Check,
    format_findings,
    format_instances,
    format_summary,
    record_of,
)
from tests.unit.doctor.deployment_facts import well

FINDINGS = [
    Check("http", "prefill").ok("healthy"),
    Check("control port", "p").warning("slow", "make it fast"),
    Check("handoff", "prefill → decode").failed("lost", "find it"),
]


def test_each_finding_is_a_line_and_its_remedy_another() -> None:
    assert format_findings(FINDINGS) == (
        "ok       http          prefill           healthy\n"
        "WARNING  control port  p                 slow\n"
        "         → make it fast\n"
        "FAILED   handoff       prefill → decode  lost\n"
        "         → find it"
    )


def test_counts_come_last() -> None:
    assert format_summary(FINDINGS) == "3 findings: 1 ok, 1 warning, 1 failed"


def test_instances_are_shown_with_what_they_serve() -> None:
    facts = well(routers=(RouterFacts(url="http://r:1", clock_ahead_s=None, fleet=()),))
    router, prefill, decode = format_instances(facts).splitlines()
    assert router.split() == ["router", "http://r:1"]
    assert prefill.startswith("prefill")
    assert all(word in decode for word in ("kvferry", "tiny", "float32", "nixl"))


def test_nothing_is_shown_as_nothing() -> None:
    assert format_findings([]) == ""


def test_the_record_is_json_with_findings_and_facts() -> None:
    facts = well()
    record = json.loads(json.dumps(record_of(facts, findings_of(facts))))
    assert (record["record"], record["result"]) == ("doctor", "ok")
    assert record["facts"]["instances"][0]["http"]["info"]["layout"]["kv_dtype"] == "float32"
    assert {item["check"] for item in record["findings"]} >= {"http", "handoff"}
