"""The token that prefill sampled, as it travels from prefill to decode.

Unknown fields are allowed: a newer prefill may say more.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class TokenLogprob(msgspec.Struct, frozen=True):
    """A sampled token's log probability and its best alternatives, as (token id, logprob)."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class FirstToken(msgspec.Struct, frozen=True):
    """The token that prefill sampled; decode answers it without a forward pass."""

    token_id: Annotated[int, Meta(ge=0, lt=2**32)]
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
    """Seed of the request's sampling, drawn by prefill where the client gave none."""
    logprob: TokenLogprob | None = None
