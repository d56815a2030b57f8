"""What an instance keeps for conversations' later turns, as the server shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RetainedFigures:
    """What is kept for conversations' later turns."""

    num_conversations: int = 0
    num_blocks: int = 0
    share: float = 0.0
    """Of the pool."""
    num_evicted: int = 0
    """Retained blocks that were reused before their time, since the start."""
    ends: Mapping[str, int] = field(default_factory=dict)
    """Conversations that are retained no longer, by reason, since the start."""
