"""``ActiveReaders``: which readers have a lease right now, so that their links are progressed."""

from __future__ import annotations

from collections import Counter

from kvferry.connector.machine.effects import Effect, StartServing, StopServing


class ActiveReaders:
    """Counts leases by reader, of whatever kind; not locked: ``Planner`` is."""

    def __init__(self) -> None:
        self._num_leases: Counter[str] = Counter()

    def begin(self, reader: str) -> list[Effect]:
        """One more lease of ``reader``; return what is to be done."""
        self._num_leases[reader] += 1
        return [StartServing(reader)] if self._num_leases[reader] == 1 else []

    def end(self, reader: str) -> list[Effect]:
        """One lease less; return what is to be done."""
        self._num_leases[reader] -= 1
        if self._num_leases[reader] > 0:
            return []
        del self._num_leases[reader]
        return [StopServing(reader)]
