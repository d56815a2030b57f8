"""An error as clients see it, in OpenAI's form ``{"error": {message, type, param, code}}``.

Instances and routers answer with it. Knows no HTTP library, and not which error deserves what.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """One error for a client; ``retry_after_s`` becomes the header ``Retry-After``."""

    status: int
    message: str
    kind: str
    code: str | None = None
    param: str | None = None
    retry_after_s: int | None = None

    def encoded(self) -> bytes:
        """Return the JSON body."""
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})

    def as_event(self) -> bytes:
        """Return one server-sent event that carries the same body."""
        return b"data: " + self.encoded() + b"\n\n"

    @property
    def headers(self) -> dict[str, str]:
        """Headers of an HTTP answer that is nothing but this error."""
        headers = {"Content-Type": "application/json"}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(self.retry_after_s)
        return headers
