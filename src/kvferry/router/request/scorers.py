"""How well an instance suits a leg: pure functions, higher is better."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvferry.router.fleet.registry import InstanceView

Scorer = Callable[[InstanceView], float]


def no_preference(view: InstanceView) -> float:
    """Return the same for all, which leaves the choice to the picker."""
    del view
    return 0.0


def fewest_inflight(view: InstanceView) -> float:
    """Prefer the instance with the fewest legs in flight."""
    return -float(view.num_inflight)


def most_free_blocks(view: InstanceView) -> float:
    """Prefer the instance with the largest free share of its pool, when it was last asked."""
    return view.identity.free_share if view.identity is not None else 0.0


def best_scored(
    candidates: Sequence[InstanceView], scorers: Sequence[Scorer]
) -> Sequence[InstanceView]:
    """Return the candidates with the highest sum of scores, in their order."""
    if len(candidates) < 2 or not scorers:
        return candidates
    scores = [sum(scorer(view) for scorer in scorers) for view in candidates]
    best = max(scores)
    return [view for view, score in zip(candidates, scores, strict=True) if score == best]
