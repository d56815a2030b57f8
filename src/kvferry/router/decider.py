"""Whether a request is split into a prefill and a decode leg. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvferry.protocol.params import Mode
from kvferry.router.parsing import RequestTraits


class PlainReason(enum.StrEnum):
    """Why a request ran on a decode instance alone."""

    SEVERAL_CHOICES = "several_choices"
    """``n`` or ``best_of`` above 1: a handoff has one receiver of one sequence."""
    SEVERAL_PROMPTS = "several_prompts"
    NO_PREFILL_INSTANCE = "no_prefill_instance"
    PREFILL_FAILED = "prefill_failed"
    NOTHING_OFFERED = "nothing_offered"
    """Prefill answered without transfer parameters."""

    @property
    def is_fallback(self) -> bool:
        """Whether something went wrong, rather than the request asking for it."""
        return self not in (PlainReason.SEVERAL_CHOICES, PlainReason.SEVERAL_PROMPTS)


@dataclass(frozen=True, slots=True)
class Decision:
    """How a request runs: ``mode`` when split, ``plain_reason`` when not."""

    mode: Mode | None = None
    plain_reason: PlainReason | None = None


def decide(traits: RequestTraits) -> Decision:
    """Return how a request with ``traits`` runs."""
    if traits.num_prompts > 1:
        return Decision(plain_reason=PlainReason.SEVERAL_PROMPTS)
    if traits.num_choices > 1:
        return Decision(plain_reason=PlainReason.SEVERAL_CHOICES)
    return Decision(mode=Mode.PULL)
