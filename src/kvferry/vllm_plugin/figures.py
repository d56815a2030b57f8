"""The plugin's figures as one flat value: totals since the start, and how much there is now.

They cross vLLM's processes as a dictionary, so a name carries its labels: ``name|label|label``.
Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from kvferry.connector.ports import ConnectorSnapshot
from kvferry.vllm_plugin.orders import FillEnd

FigureValues = dict[str, float]
RECEIVES, BYTES = "receives", "transfer_bytes"
HANDOFFS, HISTORY_LEASES = "handoffs", "history_leases"
TOTALS = {
    RECEIVES: ("mode", "outcome"),
    BYTES: ("mode",),
    HANDOFFS: ("outcome",),
    HISTORY_LEASES: ("outcome",),
}
"""Names of totals, and what their labels are."""
AMOUNTS = (
    "handoffs_held", "leased_blocks", "quarantined_blocks", "retained_blocks", "blind_links",
)  # fmt: skip
"""Names of what there is now."""
_OUTCOME_PREFIXES = {"offer_": HANDOFFS, "history_": HISTORY_LEASES}


class ReceiveFigures:
    """Counts how receives have ended; on several ranks, together."""

    def __init__(self) -> None:
        self._receives: Counter[tuple[str, str]] = Counter()
        self._bytes: Counter[str] = Counter()

    def count(self, ends: Sequence[FillEnd]) -> None:
        """Receives have ended."""
        for end in ends:
            self._receives[end.mode, end.outcome] += 1
            if end.num_bytes:
                self._bytes[end.mode] += end.num_bytes

    def values(self) -> FigureValues:
        """Return all figures."""
        values: FigureValues = {
            f"{RECEIVES}|{mode}|{outcome}": count
            for (mode, outcome), count in self._receives.items()
        }
        for mode, num_bytes in self._bytes.items():
            values[f"{BYTES}|{mode}"] = num_bytes
        return values


def exchange_figures(
    snapshot: ConnectorSnapshot, num_retained_blocks: int, num_blind_links: int
) -> FigureValues:
    """Return what one exchange tells: what it has in hand, and how others' leases ended."""
    values: FigureValues = {
        "handoffs_held": snapshot.num_handoffs_held,
        "leased_blocks": snapshot.num_blocks_leased,
        "quarantined_blocks": snapshot.num_blocks_quarantined,
        "retained_blocks": num_retained_blocks,
        "blind_links": num_blind_links,
    }
    for name, count in snapshot.outcomes.items():
        for prefix, figure in _OUTCOME_PREFIXES.items():
            if name.startswith(prefix):
                values[f"{figure}|{name.removeprefix(prefix)}"] = count
    return values


class ChangedFigures:
    """Figures are told when any has changed, and then all of them."""

    def __init__(self) -> None:
        self._told: FigureValues = {}

    def take(self, values: FigureValues) -> FigureValues | None:
        """Return ``values``, or None if they were told already."""
        if values == self._told:
            return None
        self._told = values
        return values


def split(values: Mapping[str, float]) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """Yield each figure as its name, its labels and its value; unknown names are left out."""
    for key, value in values.items():
        name, *labels = key.split("|")
        known = name in AMOUNTS if not labels else len(TOTALS.get(name, ())) == len(labels)
        if known:
            yield name, tuple(labels), value
