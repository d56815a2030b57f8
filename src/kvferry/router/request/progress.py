"""A prefill leg that is answered as a stream: how far it is, then its whole answer. Pure."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

_END = b"[DONE]"
_NOTHING = msgspec.Raw(b"")


class _Progress(msgspec.Struct):
    num_computed_tokens: Annotated[int, Meta(ge=0)]
    num_prompt_tokens: Annotated[int, Meta(ge=0)]


class _Event(msgspec.Struct):
    kv_progress: _Progress | None = None
    error: msgspec.Raw = _NOTHING


_decoder = msgspec.json.Decoder(_Event)


class PrefillEvents:
    """Takes in the stream's bytes. ``answer`` is its last event that is not progress."""

    def __init__(self) -> None:
        self._unfinished = b""
        self.answer: bytes | None = None
        self.is_error = False
        """Whether ``answer`` is an error."""

    def feed(self, chunk: bytes) -> list[float]:
        """Return the progress that ``chunk`` told, as shares of the prompt, 0 to 1."""
        *events, self._unfinished = (self._unfinished + chunk).split(b"\n\n")
        shares = (self._take(event) for event in events)
        return [share for share in shares if share is not None]

    def _take(self, event: bytes) -> float | None:
        data = b"\n".join(
            line.removeprefix(b"data:").strip()
            for line in event.splitlines()
            if line.startswith(b"data:")
        )
        if not data or data == _END:
            return None
        try:
            decoded = _decoder.decode(data)
        except (msgspec.DecodeError, RecursionError):
            decoded = _Event()
        if decoded.kv_progress is None:
            self.answer, self.is_error = data, bytes(decoded.error) not in (b"", b"null")
            return None
        progress = decoded.kv_progress
        return min(1.0, progress.num_computed_tokens / max(1, progress.num_prompt_tokens))
