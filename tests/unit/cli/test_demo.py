"""The demo's two tables, its picture, and how it ends."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from kvferry.bench.demo import ChatRow, ReuseRow
from kvferry.bench.turns import TurnArm, TurnSample
from kvferry.cli.demo import (
    _HEADER,
    CONVERSATION_HEADER,
    Shown,
    format_reuse,
    format_row,
    show_conversation,
    write_picture,
)
from kvferry.cli.main import run
from kvferry.cluster.leftovers import Footprint
from kvferry.cluster.topology import Topology
from kvferry.errors import ConfigError
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


def _turns(**on: object) -> list[TurnSample]:
    off, reused = TurnArm.RECOMPUTE, TurnArm.READ_BACK_PUSH
    return [
        *(sample_of(off, turn, 0.5 * turn) for turn in (1, 2)),
        sample_of(reused, 1, 0.5),
        sample_of(reused, 2, 0.04, **on),
    ]


def test_columns_of_the_conversation_end_where_their_titles_end() -> None:
    _, off, _, on = _turns()
    shown = format_reuse(ReuseRow(off, on))
    assert shown.split() == ["2", "1100", "1000", "1000", "1000", "ms", "40", "ms", "25.0", "yes"]
    titles = ["turn", "prompt tokens", "history", "read back", "reuse off", "reuse on", "times"]
    assert len(shown) == len(CONVERSATION_HEADER)
    for title in titles:
        end = CONVERSATION_HEADER.index(title) + len(title)
        assert shown[end - 1] != " "
        assert shown[end] == " "


def test_a_turn_without_history_has_nothing_to_be_faster_by() -> None:
    off, _, on, _ = _turns()
    assert format_reuse(ReuseRow(off, on)).split()[-2:] == ["-", "yes"]


def test_what_is_wrong_is_returned(capsys: pytest.CaptureFixture[str]) -> None:
    assert show_conversation(_turns()) == []
    assert len(capsys.readouterr().out.strip().splitlines()) == 4
    (complaint,) = show_conversation(_turns(num_read_back_tokens=0, outcome="unreachable"))
    assert "turn 2 of the conversation: 0 of 1000 tokens" in complaint
    assert complaint.endswith("unreachable")


def test_the_picture_goes_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_picture(_turns(), None, subtitle="")
    write_picture(_turns(), tmp_path / "other.png", subtitle="")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kvferry-turns.png", "other.png"]
    shown = capsys.readouterr().out.splitlines()
    assert shown == [f"picture: {tmp_path / name}" for name in ("kvferry-turns.png", "other.png")]


def test_what_hinders_a_picture_that_nobody_asked_for_is_only_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    write_picture(_turns(), None, subtitle="")
    assert "no picture: a picture needs matplotlib" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="needs matplotlib"):
        write_picture(_turns(), tmp_path / "asked.png", subtitle="")
    assert list(tmp_path.iterdir()) == []
