"""A timeout that a process which did not run itself does not blame on others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_NUM_SLICES = 5


@asynccontextmanager
async def running_timeout(limit_s: float) -> AsyncIterator[None]:
    """As ``asyncio.timeout``, counting only time in which the event loop ran.

    The limit is a chain of slices. However late the loop comes back (the process was stopped, a
    callback was slow), that costs one slice, and what has come meanwhile is taken in before the
    next one ends. Raises ``TimeoutError``.
    """
    loop = asyncio.get_running_loop()
    slice_s = limit_s / _NUM_SLICES

    timer: asyncio.TimerHandle | None = None

    async with asyncio.timeout(None) as deadline:

        def begin_slice(num_left: int) -> None:
            nonlocal timer
            if num_left > 0:
                timer = loop.call_later(slice_s, begin_slice, num_left - 1)
            else:
                deadline.reschedule(loop.time())

        begin_slice(_NUM_SLICES)
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
