"""The demo's table row, and how the demo ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.bench.chats import ChatRow
from kvferry.bench.turns_plan import TurnArm
from kvferry.cli.demo import _HEADER, Shown, format_row
from kvferry.cli.main import run
from kvferry.cluster.leftovers import Footprint
from kvferry.cluster.topology import Topology
from tests.unit.bench.turns_deployment import sample_of


def _row(*, is_same: bool, text: str, transport: str = "nixl") -> ChatRow:
    return ChatRow(
        mode="push",
        num_prompt_tokens=2345,
        ttft_s=1.234,
        second_gap_s=0.0456,
        num_received_bytes=1_234_567,
        transport=transport,
        moved_by="push",
        outcome="received",
        is_same=is_same,
        text=text,
    )


def test_row_shows_every_figure() -> None:
    shown = format_row(_row(is_same=True, text="A ferry\ncarries"))
    assert " ".join(shown.split()) == "2345 push 1.23 s 45.6 ms 1,234,567 nixl yes A ferry carries"


def test_columns_end_where_their_titles_end() -> None:
    shown = format_row(_row(is_same=True, text="x"))
    assert shown.index("2345") + 4 == _HEADER.index("prompt tokens") + len("prompt tokens")
    assert shown.index("push") == _HEADER.index("mode")
    assert shown.index("1,234,567") + 9 == _HEADER.index("moved bytes") + len("moved bytes")
    assert shown.index("nixl") + 4 == _HEADER.index("transport") + len("transport")
    assert shown.index("yes") + 3 == _HEADER.index("same tokens") + len("same tokens")


def test_difference_stands_out_and_long_answers_are_cut() -> None:
    shown = format_row(_row(is_same=False, text="y" * 100, transport=""))
    assert " NO " in shown
    assert shown.endswith("y…")
    assert len(shown) < 130


_NOTHING = Footprint(pids=frozenset(), addresses=frozenset(), shared_memory=frozenset())


@pytest.mark.parametrize(
    ("wrong", "code", "end"), [([], 0, "demo: ok"), (["turn 2: gone"], 1, "demo: failed")]
)
def test_a_complaint_is_said_and_fails_the_demo(
    wrong: list[str],
    code: int,
    end: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    started: list[Topology] = []
    turns = [sample_of(TurnArm.RECOMPUTE, 1, 0.1)]

    def start(topology: Topology, *_: object, **__: object) -> None:
        started.append(topology)

    monkeypatch.setattr("kvferry.cli.demo.with_deployment", start)
    monkeypatch.setattr(
        "kvferry.cli.demo.run_to_end", lambda work: Shown(list(wrong), turns, _NOTHING)
    )
    picture = tmp_path / "turns.png"
    assert run(["demo", "--picture", str(picture)]) == code
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [f"picture: {picture}", end]
    assert shown.err == "".join(f"demo: {complaint}\n" for complaint in wrong)
    assert started[0].dtype == "float32"
    assert "--enable-dev-endpoints" in started[0].prefill[0].arguments
