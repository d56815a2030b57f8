"""Which cores each instance gets. Pure; pins nothing."""

from __future__ import annotations

from collections.abc import Sequence


def assign_cores(wanted: Sequence[int], available: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return for each instance the cores that it is pinned to.

    ``wanted[i]`` is how many cores instance i asks for. With fewer than two cores available nobody
    is pinned (all empty). Cores are dealt in turn and shared from the start again when they run
    out; an instance never gets one core twice.
    """
    if len(available) < 2:
        return tuple(() for _ in wanted)
    dealt: list[tuple[int, ...]] = []
    position = 0
    for count in wanted:
        taken = min(count, len(available))
        dealt.append(
            tuple(
                sorted(available[(position + offset) % len(available)] for offset in range(taken))
            )
        )
        position += taken
    return tuple(dealt)
