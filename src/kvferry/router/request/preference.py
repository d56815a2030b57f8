"""Whether a decode leg goes to the instance that holds its conversation. Pure."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.router.fleet.registry import InstanceView


class HolderChoice(enum.StrEnum):
    """Where the decode leg of a known conversation went; the values are metric labels."""

    HOLDER = "holder"
    OVERLOADED = "overloaded"
    """Elsewhere: the holder had too many more legs in flight than another."""
    ELSEWHERE = "elsewhere"
    """The holder could not be chosen: not healthy, draining, without credit, tried before, or one
    that exchanges nothing with the prefill instance."""


@dataclass(frozen=True, slots=True)
class Preference:
    """Wish for the holder, as long as it is not busier than another by more than the slack."""

    url: str
    slack_requests: int


def prefer(
    candidates: Sequence[InstanceView], preference: Preference
) -> tuple[Sequence[InstanceView], HolderChoice]:
    """Return those of ``candidates``, all usable, that remain for the choice, and why."""
    holder = next((view for view in candidates if view.url == preference.url), None)
    if holder is None:
        return candidates, HolderChoice.ELSEWHERE
    least = min(view.num_inflight for view in candidates)
    if holder.num_inflight <= least + preference.slack_requests:
        return (holder,), HolderChoice.HOLDER
    others = [view for view in candidates if view.url != preference.url]
    return others, HolderChoice.OVERLOADED
