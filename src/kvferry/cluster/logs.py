"""Follow the log files of running processes, line by line. Knows files only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

_POLL_S = 0.2


class LogFollower:
    """Passes on lines that are appended to log files, prefixed with the file's stem."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._offsets: dict[Path, int] = {}

    async def follow(self, paths: Callable[[], Iterable[Path]]) -> None:
        """Pass on new lines of ``paths()`` (asked again and again) until cancelled."""
        try:
            while True:
                self.drain(paths())
                await asyncio.sleep(_POLL_S)
        finally:
            self.drain(paths())

    def drain(self, paths: Iterable[Path]) -> None:
        """Pass on all complete lines that are there now."""
        for path in paths:
            offset = self._offsets.get(path, 0)
            try:
                with path.open("rb") as log:
                    log.seek(offset)
                    appended = log.read()
            except FileNotFoundError:
                continue
            complete = appended[: appended.rfind(b"\n") + 1]
            self._offsets[path] = offset + len(complete)
            for line in complete.decode("utf-8", "replace").splitlines():
                self._emit(f"{path.stem} | {line}")
