"""What became of an instance's read-backs since its start, as the server shows it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvferry.protocol.prefill_report import PrefillReport


@dataclass(slots=True)
class ReadBackTotals:
    """Of prefills that asked a conversation's holder. On the event loop only."""

    num_tokens: int = 0
    """Prompt tokens that were read back."""
    num_bytes: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    """Read-backs by how they ended."""
    recomputed_tokens: Counter[str] = field(default_factory=Counter)
    """Prompt tokens computed since one failed, by how it ended."""

    def add(self, prefill: PrefillReport) -> None:
        """A prefill has ended that asked a holder."""
        self.num_tokens += prefill.num_read_back_tokens
        self.num_bytes += prefill.num_read_back_bytes
        self.outcomes[prefill.read_back_outcome] += 1
        if prefill.num_recomputed_tokens:
            self.recomputed_tokens[prefill.read_back_outcome] += prefill.num_recomputed_tokens
