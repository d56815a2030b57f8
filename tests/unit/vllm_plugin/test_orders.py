"""Figures that cross vLLM's processes as a dictionary."""

from __future__ import annotations

from collections import Counter

from kvferry.connector.ports import ConnectorSnapshot
from kvferry.protocol.ids import RequestId
from kvferry.vllm_plugin.orders import (
    ChangedFigures,
    FigureValues,
    FillEnd,
    count_receive,
    exchange_figures,
    split_figures,
)

_SNAPSHOT = ConnectorSnapshot(
    num_handoffs_held=2, outcomes={"offer_read": 3, "history_expired": 1, "receive_slow": 9}
)


def _end(mode: str, outcome: str, num_bytes: int = 0) -> FillEnd:
    return FillEnd(RequestId("a"), outcome, num_bytes=num_bytes, mode=mode)


def _counted(*ends: FillEnd) -> FigureValues:
    values: Counter[str] = Counter()
    for end in ends:
        count_receive(values, end)
    return dict(values)


def test_receives_are_counted_by_mode_and_outcome() -> None:
    values = _counted(
        _end("pull", "received", 10), _end("pull", "received", 5), _end("push", "gone")
    )
    assert values["receives|pull|received"] == 2
    assert values["receives|push|gone"] == 1
    assert values["transfer_bytes|pull"] == 15


def test_what_the_exchange_tells_is_joined() -> None:
    values = exchange_figures(_SNAPSHOT, 7, 1)
    assert (values["handoffs_held"], values["retained_blocks"]) == (2, 7)
    assert values["blind_links"] == 1
    assert (values["handoffs|read"], values["history_leases|expired"]) == (3, 1)


def test_a_figure_is_its_name_its_labels_and_its_value() -> None:
    told = {**_counted(_end("pull", "slow")), **exchange_figures(_SNAPSHOT, 7, 1)}
    found = {(name, *labels): value for name, labels, value in split_figures(told)}
    assert found["receives", "pull", "slow"] == 1
    assert found["retained_blocks",] == 7


def test_figures_are_told_when_they_change() -> None:
    changed = ChangedFigures()
    assert changed.take({}) is None
    values = _counted(_end("pull", "gone"))
    assert changed.take(values) == {"receives|pull|gone": 1}
    assert changed.take(dict(values)) is None


def test_figures_of_another_version_are_left_out() -> None:
    assert list(split_figures({"more": 1, "receives|pull": 2, "leased_blocks|x": 3})) == []
