"""Whether an instance's answer is whole: streams end with ``[DONE]``, and no answer with an abort.

An engine that is stopped ends what runs there with the finish reason ``abort``, under status 200:
what looks like a whole answer lacks the rest of its tokens.
"""

from __future__ import annotations

import msgspec

from kvferry.router.upstream import LegFailedError, LegFailure

_ABORTS = (b'"finish_reason":"abort"', b'"finish_reason": "abort"')
# Inside a text its quotes are escaped, so none of them is ever taken for one.
_NUM_KEPT_BYTES = max(len(pattern) for pattern in _ABORTS)
_DONE = b"data: [DONE]"


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []


_answer_decoder = msgspec.json.Decoder(_Answer)


class StreamEnd:
    """Looks at a stream's bytes as they pass."""

    __slots__ = ("_kept", "is_done")

    def __init__(self) -> None:
        self._kept = b""
        self.is_done = False
        """Whether the stream's last event has been seen: there is nothing more to come."""

    def see(self, chunk: bytes) -> None:
        """Take in the next bytes. Raises ``LegFailedError`` if the engine has aborted."""
        seen = self._kept + chunk
        if any(pattern in seen for pattern in _ABORTS):
            raise _aborted()
        self._kept = seen[-_NUM_KEPT_BYTES:]
        self.is_done = self._kept.rstrip().endswith(_DONE)


def require_whole(body: bytes) -> None:
    """Raise ``LegFailedError`` if the engine has aborted a choice of the answer ``body``."""
    if b'"abort"' not in body:
        return
    try:
        choices = _answer_decoder.decode(body).choices
    except msgspec.MsgspecError:
        return
    if any(choice.finish_reason == "abort" for choice in choices):
        raise _aborted()


def _aborted() -> LegFailedError:
    return LegFailedError(
        LegFailure.ABORTED, "it has ended the request itself, as an instance does that is stopped"
    )
