"""Whether an instance's answer has begun, and whether it is whole.

An engine that is stopped ends what runs there with the finish reason ``abort``, under status 200,
or with none at all: vLLM streams nothing but ``[DONE]`` for what has no token yet. What looks like
a whole answer lacks the rest of its tokens.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvferry.protocol.receive_note import MAX_NOTE_BYTES, noted_outcome
from kvferry.router.upstream import LegFailedError, LegFailure

_ABORTS = (b'"finish_reason":"abort"', b'"finish_reason": "abort"')
_REASONS = (b'"finish_reason":"', b'"finish_reason": "', b'\ndata: {"error"')
_DONE = b"\ndata: [DONE]"
# Inside a text quotes and line ends are escaped, so none of them is ever taken for one of these.
_NUM_KEPT_BYTES = MAX_NOTE_BYTES + max(len(pattern) for pattern in (*_ABORTS, *_REASONS, _DONE))
_MAX_OPENING_BYTES = 4096


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    delta: dict[str, Any] | None = None
    token_ids: list[int] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []


_answer_decoder = msgspec.json.Decoder(_Answer)


class StreamEnd:
    """Looks at a stream's bytes as they pass."""

    __slots__ = ("_has_reason", "_kept", "is_done", "receive_outcome")

    def __init__(self) -> None:
        self._kept = b"\n"
        self._has_reason = False
        self.is_done = False
        """Whether the stream's last event has been seen: there is nothing more to come."""
        self.receive_outcome = ""
        """How decode says that its receive has ended; known with the last event."""

    def see(self, chunk: bytes) -> None:
        """Take in the next bytes. Raises ``LegFailedError`` if the engine has aborted."""
        seen = self._kept + chunk
        if any(pattern in seen for pattern in _ABORTS):
            raise _aborted()
        self._has_reason = self._has_reason or any(pattern in seen for pattern in _REASONS)
        self.is_done = seen.rstrip().endswith(_DONE)
        if self.is_done:
            self.receive_outcome = noted_outcome(seen)
        if self.is_done and not self._has_reason:
            raise _aborted()
        self._kept = seen[-_NUM_KEPT_BYTES:]


def is_opening(first: bytes) -> bool:
    """Whether the first bytes of a chat's stream tell nothing but the answer's role.

    vLLM sends that as an event of its own, and may have aborted the request by then.
    """
    if b'"role"' not in first or len(first) > _MAX_OPENING_BYTES or not first.endswith(b"\n\n"):
        return False
    events = [event.removeprefix(b"data:").strip() for event in first.split(b"\n\n")]
    try:
        answers = [_answer_decoder.decode(event) for event in events if event]
    except (msgspec.MsgspecError, RecursionError):
        return False
    return all(_is_empty(choice) for answer in answers for choice in answer.choices)


def _is_empty(choice: _Choice) -> bool:
    if choice.finish_reason is not None or choice.token_ids or choice.delta is None:
        return False
    return not any(value for key, value in choice.delta.items() if key != "role")


def require_whole(body: bytes) -> None:
    """Raise ``LegFailedError`` if the engine has aborted a choice of the answer ``body``."""
    if b'"abort"' not in body:
        return
    try:
        choices = _answer_decoder.decode(body).choices
    except (msgspec.MsgspecError, RecursionError):
        return
    if any(choice.finish_reason == "abort" for choice in choices):
        raise _aborted()


def _aborted() -> LegFailedError:
    return LegFailedError(
        LegFailure.ABORTED, "it has ended the request itself, as an instance does that is stopped"
    )
