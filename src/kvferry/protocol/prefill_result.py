"""What prefill tells decode of its end: the token that it sampled, and where the KV came from.

Unknown fields are allowed: a newer prefill may say more.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

MAX_OUTCOME_CHARS = 64

_Count = Annotated[int, Meta(ge=0, le=2**40)]
_Seconds = Annotated[float, Meta(ge=0, le=86_400)]


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


class PrefillReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a prompt's KV came from, and the time that took on prefill."""

    num_cached_tokens: _Count = 0
    """Found in prefill's own cache."""
    num_read_back_tokens: _Count = 0
    num_read_back_bytes: _Count = 0
    num_computed_tokens: _Count = 0
    """Recomputed ones included."""
    read_back_outcome: Annotated[str, Meta(max_length=MAX_OUTCOME_CHARS)] = ""
    """``received``, or why it was recomputed; empty: no read-back was tried."""
    read_back_s: _Seconds = 0.0
    """From asking the holder until the blocks were there, or until that failed."""
    compute_s: _Seconds = 0.0
    """From the first forward's start to the last one's end."""

    @property
    def num_recomputed_tokens(self) -> int:
        """Tokens that were computed because a read-back has brought nothing."""
        has_failed = self.read_back_outcome and not self.num_read_back_tokens
        return self.num_computed_tokens if has_failed else 0
