"""Reads a stream of server-sent events, however its bytes are cut. Pure; knows no kind of event.

One reader for each stream. It takes the bytes as they come and gives the events that are whole by
then, so that whoever passes the bytes on need not wait for it.
"""

from __future__ import annotations

MAX_EVENT_BYTES = 4 * 1024 * 1024
END = b"[DONE]"
"""The data of the last event of OpenAI's streams."""


class EventReader:
    """Splits a stream into its events; lines may end in LF or CRLF."""

    __slots__ = ("_is_skipping", "_max_event_bytes", "_unfinished")

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        """An event of more than ``max_event_bytes`` is passed over: its end alone is looked for."""
        self._max_event_bytes = max_event_bytes
        self._unfinished = b""
        self._is_skipping = False

    @property
    def is_between_events(self) -> bool:
        """Whether all that has come is whole events."""
        return not self._unfinished and not self._is_skipping

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take in the next bytes; return each event that they complete, as its lines."""
        seen = self._unfinished + chunk if self._unfinished else chunk
        if b"\r" in seen:  # In a text it would be escaped.
            seen = seen.replace(b"\r\n", b"\n")
        *events, self._unfinished = seen.split(b"\n\n")
        if self._is_skipping and events:
            self._is_skipping = False
            del events[0]
        if len(self._unfinished) > self._max_event_bytes:
            self._is_skipping = True
        if self._is_skipping:
            self._unfinished = self._unfinished[-2:]
        return events


def data_of(event: bytes) -> bytes:
    """Return what an event carries; empty where it has none, as a comment."""
    if event.startswith(b"data:") and b"\n" not in event:
        return event[5:].strip()
    lines = event.split(b"\n")
    return b"\n".join(line[5:].strip() for line in lines if line.startswith(b"data:"))
