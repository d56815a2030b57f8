"""The demo's conversation, with reuse off and on: what is compared, and what counts as right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.bench.turns import TurnSample
from kvferry.bench.turns_plan import TurnArm

REUSE_ARMS = (TurnArm.RECOMPUTE, TurnArm.READ_BACK_PUSH)
"""Off, on."""
_LEAST_READ_BACK_SHARE = 0.5
"""Of the history: answers may be split into other tokens when they are sent back."""


@dataclass(frozen=True, slots=True)
class ReuseRow:
    """One turn of the conversation under both arms."""

    off: TurnSample
    on: TurnSample

    @property
    def is_same(self) -> bool:
        """Whether both answered the same tokens."""
        return self.off.answer == self.on.answer

    @property
    def times_faster(self) -> float:
        """How much sooner the first token came with reuse on."""
        return self.off.ttft_s / self.on.ttft_s

    def complaint(self) -> str | None:
        """What is wrong with this turn, if anything."""
        turn = f"turn {self.on.turn} of the conversation"
        if not self.is_same:
            return f"{turn}: reuse on and off gave other tokens"
        wanted = _LEAST_READ_BACK_SHARE * self.on.num_history_tokens
        if self.on.num_read_back_tokens < wanted:
            return (
                f"{turn}: {self.on.num_read_back_tokens} of {self.on.num_history_tokens} tokens "
                f"of history were read back: {self.on.outcome or 'it was not tried'}"
            )
        return None


def reuse_rows(samples: Sequence[TurnSample]) -> list[ReuseRow]:
    """Return the turns of one conversation that was held under both arms, in order."""
    off, on = (
        sorted((s for s in samples if s.arm is arm), key=lambda sample: sample.turn)
        for arm in REUSE_ARMS
    )
    return [ReuseRow(*pair) for pair in zip(off, on, strict=True)]
