"""Whether a request is split into a prefill and a decode leg. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvferry.errors import RequestError
from kvferry.protocol.client_headers import MODE_HEADER as MODE_HEADER
from kvferry.protocol.params import Mode
from kvferry.router.config import RouteMode
from kvferry.router.request.parsing import RequestTraits


class PlainReason(enum.StrEnum):
    """Why a request ran on a decode instance alone."""

    SEVERAL_CHOICES = "several_choices"
    """``n`` or ``best_of`` above 1: a handoff has one receiver of one sequence."""
    SEVERAL_PROMPTS = "several_prompts"
    NO_PREFILL_INSTANCE = "no_prefill_instance"
    INCOMPATIBLE = "incompatible"
    """No prefill instance exchanges with a decode instance that could take it."""
    PREFILL_FAILED = "prefill_failed"
    NOTHING_OFFERED = "nothing_offered"
    """Prefill answered without transfer parameters."""
    NO_RECEIVER = "no_receiver"
    """Late choice: no decode instance could take a push any more."""
    OFFER_USED = "offer_used"
    """What prefill offered can be taken once, and an instance that had it has failed."""

    @property
    def is_fallback(self) -> bool:
        """Whether something went wrong, rather than the request asking for it."""
        return self not in (PlainReason.SEVERAL_CHOICES, PlainReason.SEVERAL_PROMPTS)


@dataclass(frozen=True, slots=True)
class Decision:
    """How a request runs: ``mode`` when split, ``plain_reason`` when not."""

    mode: Mode | None = None
    plain_reason: PlainReason | None = None


def wanted_mode(header: str | None, configured: RouteMode) -> RouteMode:
    """Return the mode that a request asks for by header, else the configured one.

    Raises ``RequestError`` for a value that is none.
    """
    if header is None:
        return configured
    try:
        return RouteMode(header.strip().lower())
    except ValueError as error:
        allowed = ", ".join(RouteMode)
        raise RequestError(
            f"{MODE_HEADER} must be one of {allowed}", param=MODE_HEADER, code="invalid_value"
        ) from error


def decide(traits: RequestTraits, *, may_push: bool) -> Decision:
    """Return how a request with ``traits`` runs.

    ``may_push``: push is wanted, and there are instances that can.
    """
    if traits.num_prompts > 1:
        return Decision(plain_reason=PlainReason.SEVERAL_PROMPTS)
    if traits.num_choices > 1:
        return Decision(plain_reason=PlainReason.SEVERAL_CHOICES)
    return Decision(mode=Mode.PUSH if may_push else Mode.PULL)
