"""The picture has every arm and names its axes with units; without matplotlib it is refused."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from kvferry.bench.turns import TurnArm
from kvferry.bench.turns_report import draw_ttft, ttft_curves, ttft_figure
from kvferry.errors import ConfigError
from tests.unit.bench.turns_deployment import sample_of

_SAMPLES = [sample_of(arm, turn, 0.1 * turn) for arm in TurnArm for turn in (1, 2)]


def test_every_arm_is_a_line_in_milliseconds() -> None:
    (axes,) = ttft_figure(ttft_curves(_SAMPLES), "a model").axes
    assert axes.get_xlabel() == "prompt length (tokens, history included)"
    assert axes.get_ylabel() == "time to first token (ms)"
    assert len(axes.lines) == len(TurnArm)
    assert [np.asarray(line.get_xdata()).tolist() for line in axes.lines] == [[100, 1100]] * 4
    assert [np.asarray(line.get_ydata()).tolist() for line in axes.lines] == [[100, 200]] * 4
    legend = axes.get_legend()
    assert legend is not None
    assert len({text.get_text() for text in legend.get_texts()}) == len(TurnArm)
    assert "a model" in {text.get_text() for text in axes.texts}


def test_the_file_is_a_png_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "turns.png"
    draw_ttft(_SAMPLES, path, subtitle="")
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert list(tmp_path.iterdir()) == [path]


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        draw_ttft(_SAMPLES, tmp_path / "none" / "turns.png", subtitle="")


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"kvferry\[plot\]"):
        draw_ttft(_SAMPLES, tmp_path / "turns.png", subtitle="")
    assert list(tmp_path.iterdir()) == []
