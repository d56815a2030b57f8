"""The table of the demo's conversation, and what becomes of its picture."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from kvferry.bench.reuse import ReuseRow
from kvferry.bench.turns import TurnSample
from kvferry.bench.turns_plan import TurnArm
from kvferry.cli.demo_conversation import (
    CONVERSATION_HEADER,
    format_reuse,
    show_conversation,
    write_picture,
)
from kvferry.errors import ConfigError
from tests.unit.bench.turns_deployment import sample_of


def _turns(**on: object) -> list[TurnSample]:
    off, reused = TurnArm.RECOMPUTE, TurnArm.READ_BACK_PUSH
    return [
        *(sample_of(off, turn, 0.5 * turn) for turn in (1, 2)),
        sample_of(reused, 1, 0.5),
        sample_of(reused, 2, 0.04, **on),
    ]


def test_columns_end_where_their_titles_end() -> None:
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
