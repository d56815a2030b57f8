"""Findings: how each check came out, and all of them as text and as a JSON record. Pure."""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry import __version__
from kvferry.doctor.facts import DeploymentFacts, InstanceFacts, short_name

RECORD_VERSION = 1
_REMEDY_MARK = "→ "


class Result(enum.StrEnum):
    """How a check came out."""

    OK = "ok"
    WARNING = "warning"
    """It works, but not as well as it might, or not for all requests."""
    FAILED = "failed"


_MARKS = {Result.OK: "ok", Result.WARNING: "WARNING", Result.FAILED: "FAILED"}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. ``remedy`` is one sentence, empty where nothing is to be done."""

    check: str
    subject: str
    """The instance, pair or host that was checked."""
    result: Result
    found: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """A check of one subject, which makes its findings."""

    name: str
    subject: str

    def ok(self, found: str) -> Finding:
        """Nothing is to be done."""
        return Finding(self.name, self.subject, Result.OK, found)

    def warning(self, found: str, remedy: str) -> Finding:
        """Something might be better."""
        return Finding(self.name, self.subject, Result.WARNING, found, remedy)

    def failed(self, found: str, remedy: str) -> Finding:
        """Something does not work."""
        return Finding(self.name, self.subject, Result.FAILED, found, remedy)


def worst(findings: Sequence[Finding]) -> Result:
    """Return the worst result among ``findings``; none at all is fine."""
    return max((finding.result for finding in findings), key=list(Result).index, default=Result.OK)


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
    indent = " " * (max(map(len, _MARKS.values())) + 2)
    shown = []
    for line, finding in zip(_columns(rows).splitlines(), findings, strict=True):
        shown.append(line)
        if finding.remedy:
            shown.append(f"{indent}{_REMEDY_MARK}{finding.remedy}")
    return "\n".join(shown)


def _columns(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


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
