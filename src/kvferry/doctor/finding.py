"""One finding: what was checked of what, how that came out, and what to do about it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Result(enum.StrEnum):
    """How a check came out."""

    OK = "ok"
    WARNING = "warning"
    """It works, but not as well as it might, or not for all requests."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
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
        return Finding(check=self.name, subject=self.subject, result=Result.OK, found=found)

    def warning(self, found: str, remedy: str) -> Finding:
        """Something might be better."""
        return Finding(
            check=self.name,
            subject=self.subject,
            result=Result.WARNING,
            found=found,
            remedy=remedy,
        )

    def failed(self, found: str, remedy: str) -> Finding:
        """Something does not work."""
        return Finding(
            check=self.name,
            subject=self.subject,
            result=Result.FAILED,
            found=found,
            remedy=remedy,
        )
