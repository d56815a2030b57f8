"""How many requests run at once. Knows nothing of what they do; event loop's thread only."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Admission:
    """Admits up to ``max_inflight`` requests; each place is given back however it ends."""

    def __init__(self, max_inflight: int) -> None:
        self.max_inflight = max_inflight
        self._tasks: set[asyncio.Task[object]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_inflight(self) -> int:
        """Requests admitted and not ended."""
        return len(self._tasks)

    @contextmanager
    def place(self) -> Iterator[bool]:
        """Take a place for the current task for the length of the block; yield whether it did."""
        task = asyncio.current_task()
        if task is None or len(self._tasks) >= self.max_inflight:
            yield False
            return
        self._tasks.add(task)
        self._idle.clear()
        try:
            yield True
        finally:
            self._tasks.discard(task)
            if not self._tasks:
                self._idle.set()

    async def wait_idle(self) -> None:
        """Wait until none is left; the caller sets the deadline."""
        await self._idle.wait()

    async def drain(self, timeout_s: float) -> int:
        """Wait up to ``timeout_s`` for all to end, cancel the rest; return how many were cut."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            left = list(self._tasks)
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=1.0)
            return len(left)
        return 0
