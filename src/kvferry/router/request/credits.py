"""How many prefills may be under way for each decode instance: nobody piles up handoffs on one.

A credit is taken before a prefill is dispatched and given back once it is admitted or answered.
Event loop's thread only.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from kvferry.router.fleet.registry import InstanceView

Pick = Callable[[Collection[str]], InstanceView | None]
"""Chooses a decode instance outside the URLs given; None when none may be chosen."""


class Credit:
    """One outstanding prefill for ``view``; closing again does nothing."""

    __slots__ = ("_credits", "view")

    def __init__(self, credits: HandoffCredits, view: InstanceView) -> None:
        self._credits: HandoffCredits | None = credits
        self.view = view

    def close(self) -> None:
        """Give it back."""
        credits, self._credits = self._credits, None
        if credits is not None:
            credits.give_back(self.view.url)


@dataclass(frozen=True, slots=True)
class _Waiter:
    pick: Pick
    future: asyncio.Future[Credit]


class HandoffCredits:
    """Grants credits in the order in which they were asked for, as far as choices allow."""

    def __init__(self, max_outstanding: int) -> None:
        self._max_outstanding = max_outstanding
        self._num_outstanding: Counter[str] = Counter()
        self._full: set[str] = set()
        self._waiters: deque[_Waiter] = deque()

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a credit."""
        return len(self._waiters)

    def num_outstanding(self, url: str) -> int:
        """Credits taken for ``url`` and not given back."""
        return self._num_outstanding[url]

    def try_take(self, pick: Pick) -> Credit | None:
        """Return a credit for the instance that ``pick`` chooses, None when it finds none."""
        view = pick(self._full)
        if view is None:
            return None
        self._num_outstanding[view.url] += 1
        if self._num_outstanding[view.url] >= self._max_outstanding:
            self._full.add(view.url)
        return Credit(self, view)

    async def wait_for(self, pick: Pick, timeout_s: float) -> Credit | None:
        """Wait up to ``timeout_s`` for a credit; None when there was none by then."""
        waiter = _Waiter(pick, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter.future
        except TimeoutError:
            self._undo(waiter)
            return None
        except asyncio.CancelledError:
            self._undo(waiter)
            raise
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    @staticmethod
    def _undo(waiter: _Waiter) -> None:
        """Give back what was granted at the moment in which the waiter gave up."""
        if waiter.future.done() and not waiter.future.cancelled():
            waiter.future.result().close()

    def give_back(self, url: str) -> None:
        """Take back one credit of ``url``, and grant it to the first that can use it."""
        self._num_outstanding[url] -= 1
        self._full.discard(url)
        for waiter in list(self._waiters):
            if waiter.future.done():
                continue
            credit = self.try_take(waiter.pick)
            if credit is not None:
                self._waiters.remove(waiter)
                waiter.future.set_result(credit)
                return
