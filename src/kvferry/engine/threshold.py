"""Whether tokens that a peer has are worth moving: by number, or by what either way has cost.

Pure: told of moves and computations as they end. What is measured is compared as two straight
lines, seconds by tokens, fitted to what was seen lately: a slow link shows in the slope, a far one
in the offset.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from kvferry.clock import Clock
from kvferry.connector.config import DEFAULT_RECOMPUTE_THRESHOLD_TOKENS
from kvferry.protocol.ids import InstanceId

MAX_SAMPLES = 32
SAMPLE_LIFE_S = 60.0
"""Older ones are forgotten, so that a link that has recovered is tried again."""
MAX_PEERS = 256


@dataclass(slots=True)
class CostLine:
    """Seconds by tokens, as a straight line through the samples of the last minute."""

    clock: Clock
    _samples: deque[tuple[float, int, float]] = field(
        default_factory=lambda: deque(maxlen=MAX_SAMPLES)
    )
    """Taken at (monotonic seconds), tokens, seconds."""

    def add(self, num_tokens: int, seconds: float) -> None:
        """Take a sample in."""
        self._samples.append((self.clock.monotonic_s(), num_tokens, seconds))

    def seconds(self, num_tokens: int) -> float | None:
        """Return what ``num_tokens`` will cost, None if nothing was seen lately.

        Least squares, with neither offset nor slope below zero. From samples of a single size the
        line is taken to go through the origin: a smaller move will tell.
        """
        oldest_s = self.clock.monotonic_s() - SAMPLE_LIFE_S
        while self._samples and self._samples[0][0] < oldest_s:
            self._samples.popleft()
        if not self._samples:
            return None
        count = len(self._samples)
        mean_tokens = sum(tokens for _, tokens, _ in self._samples) / count
        mean_s = sum(seconds for _, _, seconds in self._samples) / count
        spread = sum((tokens - mean_tokens) ** 2 for _, tokens, _ in self._samples)
        if spread == 0:
            return mean_s * num_tokens / max(1.0, mean_tokens)
        slope = (
            sum((tokens - mean_tokens) * (seconds - mean_s) for _, tokens, seconds in self._samples)
            / spread
        )
        slope = min(max(0.0, slope), mean_s / mean_tokens)
        return mean_s + slope * (num_tokens - mean_tokens)


class RecomputeThreshold:
    """Decides between moving and computing."""

    def __init__(self, tokens: int | None, clock: Clock) -> None:
        """Moves from ``tokens`` on. None: moves what costs less to move than to compute, by peer;
        until both are known, from ``DEFAULT_RECOMPUTE_THRESHOLD_TOKENS`` on."""
        self._tokens = DEFAULT_RECOMPUTE_THRESHOLD_TOKENS if tokens is None else tokens
        self._is_measured = tokens is None
        self._clock = clock
        self._compute = CostLine(clock)
        self._moves: OrderedDict[InstanceId, CostLine] = OrderedDict()

    def is_worth_moving(self, peer: InstanceId, num_tokens: int) -> bool:
        """Whether ``num_tokens`` that ``peer`` has should be moved rather than computed."""
        line = self._moves.get(peer)
        moving_s = line.seconds(num_tokens) if line is not None else None
        computing_s = self._compute.seconds(num_tokens)
        if moving_s is None or computing_s is None:
            return num_tokens >= self._tokens
        return num_tokens > 0 and moving_s < computing_s

    def min_tokens(self, peer: InstanceId, num_tokens: int) -> int:
        """Return the fewest of ``num_tokens`` that are worth a move, should ``peer`` have less.

        Found by halving: the two lines cross at most once.
        """
        too_few, enough = 0, num_tokens
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            if self.is_worth_moving(peer, middle):
                enough = middle
            else:
                too_few = middle
        return enough

    def note_moved(self, peer: InstanceId, num_tokens: int, seconds: float) -> None:
        """A move from ``peer`` has ended well."""
        if not self._is_measured:
            return
        line = self._moves.setdefault(peer, CostLine(self._clock))
        self._moves.move_to_end(peer)
        while len(self._moves) > MAX_PEERS:
            self._moves.popitem(last=False)
        line.add(num_tokens, seconds)

    def note_computed(self, num_tokens: int, seconds: float) -> None:
        """A forward over ``num_tokens`` prompt tokens has ended."""
        if self._is_measured:
            self._compute.add(num_tokens, seconds)
