"""A picture of TTFT against prompt length. Owns how it looks; matplotlib is imported to draw it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.bench.turns_plan import TurnArm
from kvferry.bench.turns_report import Curve
from kvferry.errors import ConfigError

if TYPE_CHECKING:
    # Imported when something is drawn: the command line starts without it.
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIZE_INCHES = (8.0, 4.8)
_DOTS_PER_INCH = 150
_INK, _FAINT, _GRID = "#222222", "#666666", "#e4e4e4"
_LOOKS = {
    # Colours that people who see few of them can still tell apart, by brightness and by mark.
    TurnArm.RECOMPUTE: ("recompute: reuse off", "#8a8a8a", "o", "-"),
    TurnArm.WARM: ("warm: prefill kept its cache", "#009e73", "s", "--"),
    TurnArm.READ_BACK: ("read-back: reuse on", "#0072b2", "^", "-"),
    TurnArm.READ_BACK_PUSH: ("read-back + push: reuse on", "#d55e00", "D", "-"),
}


def require_drawing() -> None:
    """Raise ``ConfigError`` if there is nothing to draw with."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "a picture needs matplotlib, which the extra `plot` installs: pip install "
            "'kvferry[plot]'"
        )


def draw_ttft(curves: Sequence[Curve], path: Path, *, subtitle: str) -> None:
    """Write the PNG ``path``, whole or not at all. Raises ``ConfigError`` if it cannot."""
    require_drawing()
    figure = ttft_figure(curves, subtitle)
    draft = path.with_name(path.name + ".draft")
    try:
        figure.savefig(draft, format="png")
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error


def ttft_figure(curves: Sequence[Curve], subtitle: str) -> Figure:
    """Return the drawing: a line of medians for each arm, with a band from quartile to quartile."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, dpi=_DOTS_PER_INCH, layout="constrained")
    axes = figure.add_subplot()
    for curve in curves:
        _draw_curve(axes, curve)
    _dress(axes, subtitle)
    return figure


def _draw_curve(axes: Axes, curve: Curve) -> None:
    label, colour, mark, line = _LOOKS[curve.arm]
    lengths = [point.num_prompt_tokens for point in curve.points]
    axes.fill_between(
        lengths,
        [1e3 * point.p25_s for point in curve.points],
        [1e3 * point.p75_s for point in curve.points],
        color=colour,
        alpha=0.15,
        linewidth=0,
    )
    axes.plot(
        lengths,
        [1e3 * point.median_s for point in curve.points],
        color=colour,
        marker=mark,
        markersize=5,
        linestyle=line,
        linewidth=1.8,
        label=label,
    )


def _dress(axes: Axes, subtitle: str) -> None:
    axes.set_title("Time to first token of a conversation's turns", loc="left", color=_INK, pad=22)
    axes.text(0, 1.02, subtitle, transform=axes.transAxes, fontsize=8.5, color=_FAINT)
    axes.set_xlabel("prompt length (tokens, history included)", color=_INK)
    axes.set_ylabel("time to first token (ms)", color=_INK)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_FAINT, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_GRID)
    legend = axes.legend(loc="upper left", labelcolor=_INK, framealpha=1)
    legend.get_frame().set_edgecolor("none")
