"""Findings as text and as a JSON record. Pure."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from kvferry import __version__
from kvferry.doctor.facts import DeploymentFacts, InstanceFacts
from kvferry.doctor.finding import Finding, Result
from kvferry.doctor.findings import worst
from kvferry.doctor.fleet_checks import short_name

RECORD_VERSION = 1
_MARKS = {Result.OK: "ok", Result.WARNING: "WARNING", Result.FAILED: "FAILED"}
_REMEDY_MARK = "→ "


def format_instances(facts: DeploymentFacts) -> str:
    """Return one line for each router and instance that was asked."""
    rows = [("router", router.url, "") for router in facts.routers]
    rows += [
        (item.info.instance_id if item.info else "unknown", item.url, _kind(item))
        for item in facts.instances
    ]
    return _columns(rows)


def _kind(instance: InstanceFacts) -> str:
    info = instance.info
    parts = [instance.http.engine]
    if info is not None:
        parts += [short_name(info.layout.model_name), info.layout.kv_dtype, info.transport]
    return ", ".join(part for part in parts if part)


def format_findings(findings: Sequence[Finding]) -> str:
    """Return a line for each finding, and under it what to do, where there is anything."""
    rows = [(_MARKS[item.result], item.check, item.subject, item.found) for item in findings]
    lines = _columns(rows).splitlines()
    indent = " " * (max(map(len, _MARKS.values())) + 2)
    shown = []
    for line, finding in zip(lines, findings, strict=True):
        shown.append(line)
        if finding.remedy:
            shown.append(f"{indent}{_REMEDY_MARK}{finding.remedy}")
    return "\n".join(shown)


def _columns(rows: Sequence[tuple[str, ...]]) -> str:
    if not rows:
        return ""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
    return "\n".join(lines)


def format_summary(findings: Sequence[Finding]) -> str:
    """Return the counts, and in a word how it came out."""
    counts = Counter(finding.result for finding in findings)
    shown = ", ".join(f"{counts[result]} {result}" for result in Result)
    return f"{len(findings)} findings: {shown}"


def record_of(facts: DeploymentFacts, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the JSON record: the findings, and the facts that they were decided from."""
    # Values of any JSON type, as the facts have them.
    shown: dict[str, Any] = msgspec.to_builtins(facts)
    return {
        "record": "doctor",
        "version": RECORD_VERSION,
        "kvferry": __version__,
        "result": worst(findings).value,
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "facts": shown,
    }
