"""An error as clients see it, in OpenAI's form ``{"error": {message, type, param, code}}``.

Instances and routers answer with it. Does not know which error deserves what.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from aiohttp import web


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

    def as_response(self) -> web.Response:
        """Return the whole HTTP answer."""
        from aiohttp import web  # only servers have it loaded

        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return web.Response(
            status=self.status,
            body=self.encoded(),
            content_type="application/json",
            headers=headers,
        )
